"""Published weights on real images: the exported file really is the network that was trained."""

import io
import itertools
import os
import zipfile
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image

from export.backbones import Choice, load_backbone
from export.parity import photos_in, timm_reference
from export.to_onnx import Exported, export_module
from protocol.models.preprocessing import Preprocessing, preprocess

SHARED = Path(__file__).resolve().parents[4] / "shared"
WEIGHTS = Path(os.environ.get("PROTOFLEET_BENCH_WEIGHTS", SHARED / "weights"))
DATA = Path(os.environ.get("PROTOFLEET_BENCH_DATA", SHARED / "data"))
HALF = (0.5, 0.5, 0.5)
TRAIN, TEST = 50, 30
"""Images a class."""


def need(path: Path) -> Path:
    """Skip where a file that is not part of the project is absent."""
    if not path.is_file():
        pytest.skip(f"no {path}: see PROTOFLEET_BENCH_WEIGHTS and PROTOFLEET_BENCH_DATA")
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A published backbone, trained on pixels from -1 to 1, compared with torch on thirty photographs."""
    weights = need(WEIGHTS / "tf_mobilenetv3_small_100.google_qat_in1k.safetensors")
    folder = tmp_path_factory.mktemp("real")
    zipfile.ZipFile(need(DATA / "photos.zip")).extractall(folder)
    backbone = load_backbone(
        Choice("tf_mobilenetv3_small_100", weights, image_size=96, mean=HALF, std=HALF, crop_pct=1.0)
    )
    return export_module(
        backbone.module,
        backbone.metadata,
        path=folder / "backbone.onnx",
        reference=timm_reference(backbone.module, backbone.config),
        photos=itertools.islice(photos_in(folder), 30),
    )


def test_published_weights_agree_with_torch(exported: Exported) -> None:
    parity = exported.metadata.parity
    assert parity is not None
    assert parity.images == 30
    assert parity.relative_error < 1e-4
    assert parity.cosine > 0.9999999


def cifar(part: str, count: int, spec: Preprocessing) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The first images of each class, as a backbone wants them, and their classes."""
    with zipfile.ZipFile(need(DATA / "cifar10.zip")) as archive:
        names = sorted(name for name in archive.namelist() if f"{part}/" in name and name.endswith(".jpg"))
        classes = sorted({name.split("/")[-2] for name in names})
        taken = [[name for name in names if f"/{label}/" in name][:count] for label in classes]
        images = [
            preprocess(Image.open(io.BytesIO(archive.read(name))), spec) for same in taken for name in same
        ]
    return np.stack(images), np.repeat(np.arange(len(classes)), count)


def probe(features: NDArray[np.float32], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Ridge regression on one-hot classes: (L, C)."""
    gram = features.T.astype(np.float64) @ features + len(features) * np.eye(features.shape[1])
    targets = np.eye(10)[labels] - 0.1
    return np.asarray(np.linalg.solve(gram, features.T @ targets), dtype=np.float64)


def test_exported_features_separate_cifar10_classes(exported: Exported) -> None:
    session = onnxruntime.InferenceSession(exported.path)
    spec = exported.metadata.preprocessing
    (train, train_labels), (test, test_labels) = cifar("train", TRAIN, spec), cifar("test", TEST, spec)
    weights = probe(session.run(["feature"], {"image": train})[0], train_labels)
    scores = session.run(["feature"], {"image": test})[0] @ weights
    assert np.mean(scores.argmax(axis=1) == test_labels) > 0.4
