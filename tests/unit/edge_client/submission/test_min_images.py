"""No prototype averages fewer than `min_images` images, checked in the bytes of encoded submissions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.intake.validation import read_message
from edge_client.data.holdout import held_out, held_out_count
from edge_client.data.images import LabeledImage
from edge_client.data.prototype_averaging import class_means
from edge_client.submission import round_submission
from edge_client.submission.image_features import FoundImages, training_feature_keys
from edge_client.submission.prepared_submission import encode_submission, prepare_prototypes
from edge_client.training import local_round
from edge_client.training.local_round import LocalModel, RoundResult
from edge_client.training.trainer import TrainingSet
from protocol.errors import ProtofleetError
from protocol.wire.codec import to_array
from protocol.wire.messages import Program, RoundManifest, Submission, TaskManifest
from tests.support.devices.device_factory import TINY, make_manifest, make_workspace
from tests.support.devices.round_factory import put_contents, take_images
from tests.support.messages.submissions import values_of

CLASSES = ("ant", "bee", "cat", "dog")
PROGRAM = Program(
    init=TINY, step=TINY, project=TINY, head=TINY, persistent=(), uploaded=(), batch_size=4
)  # fmt: skip
SIZE = 1 << 6
"""Length of a feature: one value per image of a class, so that a prototype shows which images are in it."""


def _feature(image: LabeledImage) -> NDArray[np.float32]:
    """Return the image's own direction."""
    feature = np.zeros(SIZE, np.float32)
    feature[int(Path(image.relative).stem)] = 1.0
    return feature


def _behind(payload: bytes) -> list[tuple[int, int, int]]:
    """Return the class, the declared count and the actual number of images of each prototype in a submission."""
    message = read_message(payload)
    assert isinstance(message, Submission)
    arrays = (to_array(message.labels), to_array(message.counts), values_of(message))
    return [
        (int(label), int(count), int((prototype != 0).sum()))
        for label, count, prototype in zip(*arrays, strict=True)
    ]


def class_means_of_features(
    manifest: TaskManifest, _: object, *, data: TrainingSet, **__: object
) -> RoundResult:
    """Stand in for a training whose projection is the feature itself."""
    values, labels, counts = class_means(
        data.feature, data.labels, num_classes=len(CLASSES), min_images=manifest.min_images
    )
    model = LocalModel({}, values, counts.astype(np.float32))
    return RoundResult(model, values.astype(np.float16), labels, counts, {}, None)


def _sent(
    counts: Sequence[int], manifest: TaskManifest, holdout: float, folder: Path
) -> list[tuple[int, int, int]]:
    """Return what leaves a device with so many images per class; nothing if it has too few."""
    images = take_images(counts)
    workspace = make_workspace(folder)
    (key,) = training_feature_keys(manifest)
    workspace.cache.put(key, [(image.identity, _feature(image)) for image in images], [])
    put_contents(workspace.cache, images)
    found = FoundImages(tuple(images), (), held_out(images, holdout))
    try:
        if manifest.program is None:
            prepared = prepare_prototypes(workspace, manifest, found)
        else:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(local_round, "train_round", class_means_of_features)
                patched.setattr(local_round, "feature_size", lambda *_: SIZE)
                prepared = round_submission.RoundTraining(workspace).train(
                    b"t" * 32,
                    manifest,
                    RoundManifest(task=b"t" * 32, number=0, rounds=1, epochs=1, tensors=TINY),
                    found=found,
                    on_progress=lambda *_: None,
                    should_stop=lambda: False,
                )
    except ProtofleetError:
        return []
    finally:
        workspace.cache.close()
    return _behind(encode_submission(prepared, task=b"t" * 32, manifest=manifest, sequence=1))


@pytest.mark.parametrize("program", [None, PROGRAM], ids=["fedtc", "rounds"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(any),
    alpha=st.floats(0.01, 1.0),
    batch_size=st.integers(1, 12),
    holdout=st.floats(0.0, 0.9),
    data=st.data(),
)
def test_every_prototype_averages_at_least_min_images(
    tmp_path_factory: pytest.TempPathFactory, program: Program | None, counts: list[int], alpha: float,
    batch_size: int, holdout: float, data: st.DataObject,
) -> None:  # fmt: skip
    """For any images and any task, each prototype's count is correct and large enough."""
    min_images = data.draw(st.integers(1, batch_size))
    manifest = make_manifest(
        classes=CLASSES, alpha=alpha, batch_size=batch_size, min_images=min_images, program=program
    )
    sent = _sent(counts, manifest, holdout, tmp_path_factory.mktemp("device"))
    for label, said, images in sent:
        assert said == images >= min_images, CLASSES[label]
    training = [count - held_out_count(count, holdout) for count in counts]
    enough = {label for label in range(4) if training[label] >= min_images}
    assert {label for label, _, _ in sent} <= enough, "a class with fewer gives none"
    if program is not None or alpha == 1.0:
        assert {label for label, _, _ in sent} == enough
