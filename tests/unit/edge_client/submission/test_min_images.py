"""No prototype of fewer than `min_images` images: looked for in the bytes of encoded submissions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.ingest.validation import read_message
from edge_client.config import LocalSettings
from edge_client.data.images import LabeledImage, held_out
from edge_client.data.prototypes import class_means
from edge_client.storage.feature_cache import FeatureCache
from edge_client.submission.builder import (
    FoundImages,
    PreparedSubmission,
    learning_keys,
    prepare,
    prepare_round,
    submission_of,
)
from edge_client.training.local_round import LocalModel, RoundResult
from protocol.errors import ProtofleetError
from protocol.wire.codec import to_array
from protocol.wire.messages import BlobRef, Program, Submission, TaskManifest

CLASSES = ("ant", "bee", "cat", "dog")
BLOB = BlobRef(digest=b"b" * 32, size_bytes=1, name="b")
PROGRAM = Program(
    init=BLOB, step=BLOB, project=BLOB, head=BLOB, persistent=(), uploaded=(), batch_size=4
)  # fmt: skip
SIZE = 1 << 6
"""Values of a feature: one for each image of a class, so that a prototype tells which ones are in it."""


def _images(counts: Sequence[int]) -> list[LabeledImage]:
    return [
        LabeledImage(Path(), f"{CLASSES[label]}/{number}.png", label, size_bytes=1, mtime_ns=1)
        for label, count in enumerate(counts)
        for number in range(count)
    ]


def _feature(image: LabeledImage) -> NDArray[np.float32]:
    """An image's own direction."""
    feature = np.zeros(SIZE, np.float32)
    feature[int(Path(image.relative).stem)] = 1.0
    return feature


def _behind(payload: bytes) -> list[tuple[int, int, int]]:
    """Of each prototype in a submission's bytes: its class, what it says of itself, and the images in it."""
    message = read_message(payload)
    assert isinstance(message, Submission)
    arrays = (to_array(message.labels), to_array(message.counts), to_array(message.prototypes))
    return [
        (int(label), int(count), int((prototype != 0).sum()))
        for label, count, prototype in zip(*arrays, strict=True)
    ]


def _sent(
    counts: Sequence[int], manifest: TaskManifest, holdout: float, folder: Path
) -> list[tuple[int, int, int]]:
    """What leaves a device with so many images of each class; nothing at all where it says that it has too few."""
    images = _images(counts)
    local = LocalSettings(device_id="device", data=folder, holdout=holdout, batch_size=4, workers=1)
    cache = FeatureCache(folder / "features.sqlite")
    (key,) = learning_keys(manifest)
    cache.put(key, [(image.identity, _feature(image)) for image in images], [])
    found = FoundImages(tuple(images), ())

    def take_part(kept: Sequence[LabeledImage]) -> RoundResult:
        projection = np.array([_feature(image) for image in kept], np.float32).reshape(-1, SIZE)
        labels = np.array([image.label for image in kept], np.int64)
        values, owners, sizes = class_means(
            projection, labels, num_classes=len(CLASSES), min_images=manifest.min_images
        )
        local_model = LocalModel({}, values, sizes.astype(np.float32))
        return RoundResult(local_model, values.astype(np.float16), owners, sizes, {}, None)

    try:
        prepared: PreparedSubmission
        if manifest.program is None:
            prepared = prepare(task=manifest, local=local, found=found, cache=cache)
        else:
            prepared, _ = prepare_round(task=manifest, local=local, found=found, take_part=take_part)
    except ProtofleetError:
        return []
    finally:
        cache.close()
    return _behind(submission_of(prepared, task=b"t" * 32, manifest=manifest, sequence=1))


@pytest.mark.parametrize("program", [None, PROGRAM], ids=["fedtc", "rounds"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(any),
    alpha=st.floats(0.01, 1.0),
    batch_size=st.integers(1, 12),
    holdout=st.floats(0.0, 0.9),
    data=st.data(),
)
def test_no_prototype_is_made_of_fewer_images_than_min_images(
    tmp_path_factory: pytest.TempPathFactory, program: Program | None, counts: list[int], alpha: float,
    batch_size: int, holdout: float, data: st.DataObject,
) -> None:  # fmt: skip
    """Whatever a device has and a task says: each prototype has as many images as it says, and enough of them."""
    min_images = data.draw(st.integers(1, batch_size))
    manifest = TaskManifest(
        fleet="f", algorithm="a", classes=CLASSES, backbones=(BLOB,), alpha=alpha, batch_size=batch_size,
        min_images=min_images, seed=0, program=program,
    )  # fmt: skip
    sent = _sent(counts, manifest, holdout, tmp_path_factory.mktemp("device"))
    for label, said, images in sent:
        assert said == images >= min_images, CLASSES[label]
    kept = [image for image in _images(counts) if not held_out(image, holdout)]
    enough = {label for label in range(4) if sum(p.label == label for p in kept) >= min_images}
    assert {label for label, _, _ in sent} <= enough, "a class with fewer gives none"
    if program is not None or alpha == 1.0:
        assert {label for label, _, _ in sent} == enough
