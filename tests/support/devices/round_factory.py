"""A least-squares task in rounds, with its blobs, images and training hooks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_client.graphs.program_graph import Role
from edge_client.images.images import LabeledImage
from edge_client.store.feature_cache import FeatureCache
from edge_client.training.trainer import Checkpoint, TrainingHooks
from protocol.wire.arrays import to_tensor
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, Program, RoundManifest, TaskManifest, Tensors
from tests.support.devices.job_threads import EndedError
from tests.support.graphs.step_graphs import FEATURES, file, round_tensors

TASK = b"t" * 32
BACKBONE = b"b" * 32
CLASSES = ("cat", "dog", "fox")
COUNTS = (7, 6, 5)
"""Images of each class."""
ROLES: tuple[Role, ...] = ("init", "step", "project", "head")


class Blobs(Protocol):
    """Where a task's blobs are put."""

    def put(self, data: bytes, /) -> bytes:
        """Store a blob, and return its digest."""


def stored(blobs: Blobs, data: bytes, name: str) -> BlobRef:
    return BlobRef(digest=blobs.put(data), size_bytes=len(data), name=name)


def make_task(
    blobs: Blobs,
    *,
    kept: tuple[str, ...] = (),
    uploaded: tuple[str, ...] = (),
    batch_size: int = 4,
    min_images: int = 1,
    graphs: Mapping[str, bytes] | None = None,
) -> TaskManifest:
    """Return a least-squares task; `graphs` replaces some of its programs."""
    files: dict[str, bytes] = {role: file(role) for role in ROLES}
    files |= graphs or {}
    program = Program(
        **{role: stored(blobs, files[role], role) for role in ROLES},
        persistent=kept,
        uploaded=uploaded,
        batch_size=batch_size,
    )
    return TaskManifest(
        fleet="f",
        algorithm="least-squares",
        classes=CLASSES,
        backbones=(BlobRef(digest=BACKBONE, size_bytes=1, name="backbone"),),
        alpha=1.0,
        batch_size=5,
        min_images=min_images,
        seed=0,
        program=program,
    )


def tensors_blob(values: Mapping[str, NDArray[Any]]) -> bytes:
    return encode(Tensors(values={name: to_tensor(array) for name, array in values.items()}))


def open_round(
    blobs: Blobs,
    *,
    number: int = 0,
    epochs: int = 2,
    tensors: Mapping[str, NDArray[Any]] | None = None,
    payload: bytes | None = None,
) -> RoundManifest:
    """Return a round whose tensors, or `payload` instead, are stored."""
    data = tensors_blob({**round_tensors(), **(tensors or {})}) if payload is None else payload
    reference = stored(blobs, data, f"tensors-{number}")
    return RoundManifest(task=TASK, number=number, rounds=9, epochs=epochs, tensors=reference)


def watching(
    *, stop_before: int | None = None, on_checkpoint: Callable[[Checkpoint], None] = lambda _: None
) -> TrainingHooks:
    """Return hooks that end the training before step `stop_before`, after its checkpoint."""
    steps = iter(range(10**6))

    def end(checkpoint: Checkpoint) -> None:
        if next(steps) == stop_before:
            on_checkpoint(checkpoint)
            raise EndedError

    return TrainingHooks(
        on_checkpoint=end,
        on_progress=lambda _done, _total: None,
        checkpoint_s=1e9 if stop_before is None else 0.0,
    )


def same_bits(one: Mapping[str, NDArray[Any]], other: Mapping[str, NDArray[Any]]) -> bool:
    return one.keys() == other.keys() and all(
        array.dtype == other[name].dtype
        and array.shape == other[name].shape
        and np.ascontiguousarray(array).tobytes() == np.ascontiguousarray(other[name]).tobytes()
        for name, array in one.items()
    )


def take_images(counts: Sequence[int] = COUNTS) -> list[LabeledImage]:
    """Return images of each class, in the order of their names."""
    return [
        LabeledImage(Path("data"), f"{label}/{number:03d}.png", label, 100, 1_000)
        for label, count in enumerate(counts)
        for number in range(count)
    ]


def look_at(cache: FeatureCache, images: Sequence[LabeledImage]) -> None:
    """Put features of images into the cache; they depend on the file's name only."""
    features = [
        (image.identity, np.random.default_rng(list(image.identity.encode())).normal(size=FEATURES))
        for image in images
    ]
    cache.put(BACKBONE.hex(), [(name, vector.astype(np.float32)) for name, vector in features], [])
    put_contents(cache, images)


def put_contents(cache: FeatureCache, images: Sequence[LabeledImage]) -> None:
    """Put digests of files that do not exist into the cache."""
    cache.put_contents({image.identity: digest_of(image.identity.encode()) for image in images})
