"""Images, backbones, heads, settings and jobs for the device's tests."""

import itertools
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper, numpy_helper, parser
from PIL import Image

from edge_client.config import Settings
from edge_client.core.events import BuildSubmission
from edge_client.core.state import Mode, UploadItem
from edge_client.core.submission_kinds import kind_of
from edge_client.graphs.backbone import Backbone, open_backbone
from edge_client.heads.class_prior import Adjuster
from edge_client.heads.classifier import Classifier
from edge_client.heads.head import Head
from edge_client.images.image_scanner import ImageScanner
from edge_client.kinds.builder import MAKE, leave_groups
from edge_client.kinds.image_features import FoundImages, Workspace
from edge_client.kinds.image_grouping import Grouping, group_images
from edge_client.kinds.prepared_submission import PreparedSubmission
from edge_client.store.device_state import DeviceState
from edge_client.store.feature_cache import FeatureCache
from edge_client.store.stored_values import InstalledHead
from protocol.models.onnx_metadata import HeadMetadata, to_properties
from protocol.wire.codec import digest_of
from protocol.wire.messages import BlobRef, Program, RoundManifest, TaskManifest
from tests.support.devices.job_states import job_state
from tests.support.graphs.backbones import tiny_backbone
from tests.support.graphs.hostile_graphs import extended

CLASSES = ("cat", "dog")
TINY = BlobRef(digest=digest_of(tiny_backbone()), size_bytes=len(tiny_backbone()), name="tiny")
PROGRAM = Program(
    init=TINY, step=TINY, project=TINY, head=TINY, persistent=(), uploaded=(), batch_size=4
)  # fmt: skip
"""Of a task in rounds whose graphs no test runs."""


def write_images(folder: Path, *, count: int, seed: int = 0, classes: tuple[str, ...] = CLASSES) -> Path:
    """Write `count` noisy images per class, each class with its own brightness; returns the folder."""
    random = np.random.default_rng(seed)
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = random.integers(0, 80, (12, 10, 3)) + 150 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:04d}.png")
    return folder


def noise(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Return an image of random pixels, which no codec can compress."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def image_file(path: Path, image: Image.Image | None = None, **options: Any) -> Path:
    """Write an image, random pixels by default, and create its folders; `options` are Pillow's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or noise()).save(path, **options)
    return path


def slow_jpeg(path: Path, *, scans: int) -> Path:
    """Write a progressive JPEG of 4 megapixels whose last scan is repeated: each takes a millisecond or more."""
    image_file(path, Image.new("L", (2000, 2000), 128), quality=50, progressive=True)
    data, end = path.read_bytes(), b"\xff\xd9"
    last = data[data.rindex(b"\xff\xc4") : -len(end)]
    path.write_bytes(data.removesuffix(end) + scans * last + end)
    return path


def gray_png(width: int, height: int, data: bytes) -> bytes:
    """Return a PNG file whose header claims a size, with compressed rows of gray pixels, which may be others."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return png_of({b"IHDR": header, b"IDAT": data})


def png_of(chunks: Mapping[bytes, bytes]) -> bytes:
    """Return a PNG file of chunks by their kinds, and of its end."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    contents = {**chunks, b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(itertools.starmap(chunk, contents.items()))


def make_settings(folder: Path, **changes: Any) -> Settings:
    settings = Settings(
        broker=None, fleet="f", device_id="device", mode=Mode.SERVICE, data=folder / "data", holdout=0.0,
        provider="cpu", threads=1, batch_size=4, backbones=(), rescan_s=30.0,
    )  # fmt: skip
    return replace(settings, **changes)


def make_workspace(folder: Path, **changes: Any) -> Workspace:
    """Return the workspace of a device that has the tiny backbone; `changes` are of its settings."""
    state = DeviceState(folder / "state")
    state.blobs.put(tiny_backbone())
    return open_workspace(make_settings(folder, **changes), state, FeatureCache(folder / "features.sqlite"))


def open_workspace(settings: Settings, state: DeviceState, cache: FeatureCache, **values: Any) -> Workspace:
    """Return the workspace of a new job, which scans the data folder itself."""
    return Workspace(settings, job_state(state), cache, ImageScanner(settings.data).scan, **values)


def group_and_leave(workspace: Workspace, task: TaskManifest, found: FoundImages) -> Grouping:
    """Return the released images, once their groups are left for the state."""
    grouping = group_images(workspace, task, found)
    leave_groups(workspace, grouping)
    return grouping


def make_submission(
    workspace: Workspace,
    task: TaskManifest,
    found: FoundImages,
    opened: RoundManifest | None = None,
    *,
    digest: bytes = b"t" * 32,
) -> PreparedSubmission:
    """Make a submission of a kind that groups images, of images whose features are cached."""
    grouping = group_and_leave(workspace, task, found)
    return MAKE[kind_of(task)](workspace, BuildSubmission(digest, task, opened), found, grouping)


def make_manifest(**changes: Any) -> TaskManifest:
    """Return a task without rounds on the tiny backbone."""
    values = {"alpha": 1.0, "batch_size": 5, "min_images": 2, "seed": 0, "backbones": (TINY,), **changes}
    return TaskManifest(**{"fleet": "f", "algorithm": "fedtc", "classes": CLASSES, **values})


def payload_of(state: DeviceState, item: UploadItem) -> bytes:
    payload = state.outbox.payload(item)
    assert payload is not None
    return payload


def tiny(folder: Path, *, seed: int = 0, feature_size: int = 16) -> Backbone:
    path = folder / f"tiny-{seed}.onnx"
    path.write_bytes(tiny_backbone(feature_size=feature_size, seed=seed))
    return open_backbone(path, provider="cpu", threads=1)


def choosy(folder: Path) -> Backbone:
    """Open a backbone whose feature of an all-white image is NaN."""
    text = """
        darkest = ReduceMin<keepdims = 1, axes = [1]>(flat)
        left = Sub(one, darkest)
        one_or_nan = Div(left, left)
        feature = Mul(plain, one_or_nan)
    """
    path = folder / "choosy.onnx"
    path.write_bytes(extended(text, one=np.ones((), np.float32)))
    return open_backbone(path, provider="cpu", threads=1)


def classifier(backbones: Sequence[Backbone], head: Head) -> Classifier:
    """Return a classifier without a prior."""
    adjuster = Adjuster(head.classes, "none", labels={})
    installed = InstalledHead(head=b"", version=1, backbones=(), classes=head.classes)
    return Classifier(installed, backbones, head, adjuster)


def linear_head(
    backbones: Sequence[Backbone],
    weights: np.ndarray[tuple[int, int], np.dtype[np.float32]],
    *,
    softmax: bool = True,
    classes: tuple[str, ...] = CLASSES,
    sha256s: tuple[str, ...] = (),
) -> bytes:
    """Return a head file with one matrix, float32 (L, C), for some backbones."""
    size = sum(backbone.metadata.feature_size for backbone in backbones)
    outcome = "Softmax" if softmax else "Identity"
    outputs = f"float[n, {weights.shape[1]}] logits, float[n, {weights.shape[1]}] probabilities"
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        head (float[n, {size}] feature) => ({outputs})
        {{
            logits = MatMul(feature, weights)
            probabilities = {outcome}(logits)
        }}""")
    model.graph.initializer.append(numpy_helper.from_array(weights.astype(np.float32), "weights"))
    facts = HeadMetadata(
        classes=classes,
        version=3,
        task="0" * 64,
        backbones=sha256s or tuple(backbone.sha256 for backbone in backbones),
        feature_size=size,
        training={},
    )
    helper.set_model_props(model, to_properties(facts))
    return bytes(model.SerializeToString())
