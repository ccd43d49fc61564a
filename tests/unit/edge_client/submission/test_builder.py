"""Prototypes of a device, their encoding, and evaluations."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aggregator.ingest.validation import Expectation, check_submission, read_message
from edge_client.config import LocalSettings
from edge_client.data.images import find_images, held_out
from edge_client.inference import open_head
from edge_client.storage.feature_cache import FeatureCache
from edge_client.submission.evaluation import evaluate_head
from edge_client.submission.features import extract_features
from edge_client.submission.prepared_submission import PreparedSubmission, encode_submission
from edge_client.submission.prototype_submission import prepare_prototypes
from protocol.errors import ConfigError, ProtofleetError
from protocol.wire.messages import BlobRef, Submission, TaskManifest
from tests.support.device_factory import CLASSES, linear_head, tiny, write_images

TASK = b"t" * 32


def _manifest(**changes: object) -> TaskManifest:
    values = {"alpha": 1.0, "batch_size": 5, "min_images": 2, "seed": 0, **changes}
    blob = BlobRef(digest=b"b" * 32, size_bytes=1, name="tiny")
    return TaskManifest(fleet="f", algorithm="fedtc", classes=CLASSES, backbones=(blob,), **values)  # type: ignore[arg-type]


def _local(data: Path, *, holdout: float = 0.2, device_id: str = "device") -> LocalSettings:
    return LocalSettings(device_id=device_id, data=data, holdout=holdout, batch_size=4, workers=2)


def _prepare(
    folder: Path, local: LocalSettings, manifest: TaskManifest, *, secret: bytes = b"s" * 32
) -> PreparedSubmission:
    cache = FeatureCache(folder / "features.sqlite")
    found = extract_features(
        task=manifest,
        local=local,
        cache=cache,
        open_backbone=lambda _: tiny(folder),
        on_progress=lambda _done, _total: None,
        should_stop=lambda: False,
    )
    return prepare_prototypes(task=manifest, local=local, found=found, cache=cache, secret=secret)


def test_held_out_images_are_in_no_prototype(tmp_path: Path) -> None:
    """Every other image is in exactly one, and the report has the counts."""
    data = write_images(tmp_path / "data", count=30)
    prepared = _prepare(tmp_path, _local(data), _manifest())
    images = find_images(data, CLASSES)
    kept = [image for image in images if not held_out(image, 0.2)]
    assert 0 < len(images) - len(kept) < 30
    assert prepared.counts.sum() == len(kept)
    assert [report.images for report in prepared.classes] == [30, 30]
    assert sum(report.held_out for report in prepared.classes) == len(images) - len(kept)
    assert prepared.prototypes.dtype == np.float16


def test_the_same_images_give_the_same_submission(tmp_path: Path) -> None:
    """Another device shuffles differently."""
    data = write_images(tmp_path / "data", count=12)
    first = _prepare(tmp_path, _local(data), _manifest())
    assert _prepare(tmp_path, _local(data), _manifest()).fingerprint == first.fingerprint
    other = _prepare(tmp_path, _local(data, device_id="other"), _manifest())
    assert other.fingerprint != first.fingerprint


def test_the_shuffle_depends_on_the_devices_secret(tmp_path: Path) -> None:
    """Task, device and class, which the aggregator knows, do not determine it."""
    data = write_images(tmp_path / "data", count=12)
    first, other = (_prepare(tmp_path, _local(data), _manifest(), secret=bytes([i] * 32)) for i in range(2))
    assert first.counts.tolist() == other.counts.tolist()
    assert first.fingerprint != other.fingerprint


def test_the_aggregator_accepts_a_submission(tmp_path: Path) -> None:
    """It holds the device's prototypes."""
    prepared = _prepare(tmp_path, _local(write_images(tmp_path / "data", count=12)), _manifest())
    payload = encode_submission(prepared, task=TASK, manifest=_manifest(), sequence=7)
    message = read_message(payload)
    assert isinstance(message, Submission)
    assert message.sequence == 7
    taken = check_submission(message, Expectation(TASK, _manifest(), 16))
    np.testing.assert_array_equal(taken.values, prepared.prototypes.astype(np.float32))
    np.testing.assert_array_equal(taken.counts, prepared.counts)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.tuples(st.integers(0, 9), st.integers(0, 9)), min_images=st.integers(1, 4))
def test_classes_below_min_images_are_left_out(
    tmp_path_factory: pytest.TempPathFactory, counts: tuple[int, int], min_images: int
) -> None:
    """For any number of images per class."""
    folder = tmp_path_factory.mktemp("work")
    for name, count in zip(CLASSES, counts, strict=True):
        write_images(folder / "data", count=count, classes=(name,))
    manifest = _manifest(batch_size=4, min_images=min_images)
    local = _local(folder / "data", holdout=0.0)
    if max(counts) < min_images:
        with pytest.raises(ProtofleetError, match=r"no class has enough|holds no images"):
            _prepare(folder, local, manifest)
        return
    prepared = _prepare(folder, local, manifest)
    assert prepared.counts.min() >= min_images
    for report, count in zip(prepared.classes, [count for count in counts if count], strict=True):
        assert report.left_out == (count < min_images)
        assert sum(report.counts) == (0 if report.left_out else count)


def test_no_usable_image_is_an_error(tmp_path: Path) -> None:
    """Only broken images, or no data at all."""
    data = write_images(tmp_path / "data", count=2)
    for image in data.rglob("*.png"):
        image.write_text("broken")
    with pytest.raises(ProtofleetError, match="none of the 4 images can be used"):
        _prepare(tmp_path, _local(data), _manifest())
    with pytest.raises(ConfigError):
        _prepare(tmp_path, _local(tmp_path / "nowhere"), _manifest())


@pytest.mark.parametrize(
    ("alpha", "min_images", "needed"), [(0.99, 2, 2), (1.0, 5, 5), (0.5, 2, 3), (0.5, 1, 1)]
)
def test_the_stated_number_of_images_is_sufficient(
    tmp_path: Path, alpha: float, min_images: int, needed: int
) -> None:
    """One image fewer is not."""
    manifest = _manifest(alpha=alpha, min_images=min_images)
    data = write_images(tmp_path / "data", count=needed)
    assert len(_prepare(tmp_path, _local(data, holdout=0.0), manifest).counts) == len(CLASSES)
    if needed > 1:
        for name in CLASSES:
            (data / name / "0000.png").unlink()
        with pytest.raises(ProtofleetError, match=f" {needed} training images are needed: add images$"):
            _prepare(tmp_path, _local(data, holdout=0.0), manifest)


def test_an_evaluation_counts_held_out_images_only(tmp_path: Path) -> None:
    """Correct and incorrect add up to the readable held-out images."""
    data = write_images(tmp_path / "data", count=25)
    (data / "cat" / "broken.png").write_text("broken")
    local, manifest = _local(data, holdout=0.4), _manifest()
    prepared = _prepare(tmp_path, local, manifest)
    backbone = tiny(tmp_path)
    head = open_head(linear_head([backbone], np.zeros((16, 2), dtype=np.float32)), backbones=[backbone])
    evaluation = evaluate_head(
        head,
        task=TASK,
        manifest=manifest,
        version=1,
        local=local,
        cache=FeatureCache(tmp_path / "features.sqlite"),
    )
    totals = [right + wrong for right, wrong in zip(evaluation.correct, evaluation.incorrect, strict=True)]
    assert totals == [report.held_out for report in prepared.classes]
    assert evaluation.correct == (totals[0], 0)


def test_a_head_is_evaluated_without_matching_images(tmp_path: Path) -> None:
    """A wrong folder or a missing disk is no fault of the head."""
    backbone = tiny(tmp_path)
    head = open_head(linear_head([backbone], np.zeros((16, 2), dtype=np.float32)), backbones=[backbone])
    data = write_images(tmp_path / "data", count=2, classes=("cat", "zebra"))
    for folder in (data, tmp_path / "away"):
        evaluation = evaluate_head(
            head,
            task=TASK,
            manifest=_manifest(),
            version=1,
            local=_local(folder),
            cache=FeatureCache(tmp_path / "features.sqlite"),
        )
        assert (evaluation.correct, evaluation.incorrect) == ((0, 0), (0, 0))
