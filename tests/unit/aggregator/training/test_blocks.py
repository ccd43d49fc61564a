"""Principal prototypes on the aggregator: devices with blocks are compared, limited and trained on like others."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aggregator.config.schema import Robust
from aggregator.intake.validation import Prototypes
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.head_job import run
from aggregator.training.robust import outlier_detection, training_set
from aggregator.training.robust.outlier_detection import judge
from aggregator.training.robust.outlier_statistics import summaries, summarized
from aggregator.training.robust.training_set import judged_set, limited_means
from protocol.wire.arrays import to_unsigned
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Submission
from protocol.wire.principal_prototypes import joined
from protocol.wire.quantization import principal_fields, prototype_fields
from tests.support.messages.jobs import head_job, workspace
from tests.support.messages.prototype_sets import CLASSES, honest, in_blocks
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST


def _mixed(devices: int) -> dict[str, Prototypes]:
    """Return a fleet in which every second device has a block."""
    return {f"dev{number}": (in_blocks if number % 2 else honest)(number) for number in range(devices)}


def _judged(parts: dict[str, Prototypes]) -> dict[str, str]:
    return dict(judge(summaries(parts), classes=CLASSES, false_alarm_rate=0.01).quarantined)


def _with_block(part: Prototypes, **changes: np.ndarray) -> Prototypes:
    assert part.block is not None
    return replace(part, block=replace(part.block, **changes))


def test_variance_of_a_class_is_that_of_its_block() -> None:
    """The trace over the images less one for each class; every image but one of a class tells of it."""
    one = summarized(in_blocks(1)).classes[0]
    assert one.variance == pytest.approx(90 * FEATURE_SIZE / 87)
    assert (one.images, one.prototypes) == (30, 30)
    block = in_blocks(1).block
    assert block is not None
    both = summarized(replace(honest(1), block=joined([block, block]))).classes[0]
    assert (both.images, both.prototypes) == (30 + 60, 1 + 5 + 58)


def test_honest_mixed_fleet_has_no_outliers() -> None:
    assert _judged(_mixed(12)) == {}


@pytest.mark.parametrize("number", [4, 5])
def test_mislabeled_device_of_a_mixed_fleet_is_quarantined(number: int) -> None:
    """One with a block, or with batches."""
    parts = _mixed(12)
    part = parts[f"dev{number}"]
    wrong = (
        replace(part, labels=(part.labels + 1) % 3)
        if part.block is None
        else _with_block(part, labels=(part.block.labels + 1) % 3)
    )
    assert list(_judged(parts | {f"dev{number}": wrong})) == [f"dev{number}"]


def test_block_that_is_too_scattered_is_quarantined() -> None:
    parts = {f"dev{number}": in_blocks(number) for number in range(8)}
    block = parts["dev3"].block
    assert block is not None
    found = _judged(parts | {"dev3": _with_block(parts["dev3"], rows=9 * block.rows)})
    assert list(found) == ["dev3"]
    assert "times as scattered as plausible" in found["dev3"]


def test_mean_of_a_block_is_moved_to_the_expected_distance() -> None:
    """Of the class that is far from the others' alone; its rows stay."""
    parts = [in_blocks(number) for number in range(8)]
    block = limited_means(parts)[0].block
    assert block is not None
    moved = block.means + 50 * (block.labels == 1)[:, None].astype(np.float32)
    after = limited_means([_with_block(parts[0], means=moved), *parts[1:]])[0].block
    assert after is not None
    np.testing.assert_array_equal(after.means[block.labels != 1], block.means[block.labels != 1])
    assert np.abs(after.means[1] - block.means[1]).max() < 2
    np.testing.assert_array_equal(after.rows, block.rows)


def test_large_fleet_is_compared_in_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outlier is found in its cohort, whichever devices that has, and no cohort is larger than allowed."""
    monkeypatch.setattr(outlier_detection, "COHORT", 12)
    monkeypatch.setattr(training_set, "COHORT", 12)
    sizes = []

    def watched(parts: dict[str, Prototypes]) -> object:
        sizes.append(len(parts))
        return summaries(parts)

    monkeypatch.setattr(training_set, "summaries", watched)
    parts = _mixed(40)
    block = parts["dev7"].block
    assert block is not None
    parts["dev7"] = _with_block(parts["dev7"], labels=(block.labels + 1) % 3)
    cohorts = []
    for version in (1, 2):
        data, judgment, counted = judged_set(parts, classes=CLASSES, robust=Robust(), version=version)
        assert list(judgment.quarantined) == ["dev7"]
        assert counted.images == int(data.counts.sum())
        cohorts.append(data.values.tolist())
    assert cohorts[0] != cohorts[1]
    assert max(sizes) <= 12


def test_job_trains_on_blocks_and_on_devices_without(tmp_path: Path) -> None:
    """A device of an earlier version sends batches alone; counted are the images in all prototypes."""
    manifest = msgspec.structs.replace(MANIFEST, prototypes="auto")
    blobs, sent = FolderBlobs(tmp_path / "blobs"), []
    for number, part in enumerate(_mixed(6).values()):
        labels, counts = part.labels, part.counts
        sent.append(
            Submission(
                task=digest_of(encode(manifest)),
                sequence=1 + number,
                labels=to_unsigned(labels),
                counts=to_unsigned(counts),
                images=90,
                **principal_fields(part.values.astype(np.float16), part.block),
            )
        )
    result = run(head_job(blobs, *sent, manifest=manifest), workspace(blobs, tmp_path / "out"))
    assert result.prototypes == result.counting.images == 6 * 90
    assert (result.quarantined, result.few_prototypes) == ({}, {})
    few = msgspec.structs.replace(sent[0], **_first_prototypes(sent[0], 1))
    result = run(head_job(blobs, few, manifest=manifest), workspace(blobs, tmp_path / "few"))
    assert result.few_prototypes == {"cat": 5}
    assert (tmp_path / "out" / "head.onnx").is_file()


def test_job_counts_all_images_of_batches_alone(tmp_path: Path) -> None:
    """Where devices may upload blocks and none does, as in `status`: also the images beyond a device's limit."""
    manifest = msgspec.structs.replace(MANIFEST, prototypes="auto")
    blobs, sent = FolderBlobs(tmp_path / "blobs"), []
    for number in range(6):
        part = honest(number)
        counts = part.counts * (100 if number == 0 else 1)
        sent.append(
            Submission(
                task=digest_of(encode(manifest)),
                sequence=1 + number,
                labels=to_unsigned(part.labels),
                counts=to_unsigned(counts),
                images=int(counts.sum()),
                **prototype_fields(part.values.astype(np.float16)),
            )
        )
    result = run(
        head_job(blobs, *sent, manifest=manifest, robust=Robust(detect_outliers=False)),
        workspace(blobs, tmp_path / "out"),
    )
    assert result.prototypes == result.counting.images == 5 * 90 + 9000
    assert result.counting.counted < 1000


def _first_prototypes(submission: Submission, number: int) -> dict[str, object]:
    part = honest(0)
    values = part.values[:number].astype(np.float16)
    return {
        "labels": to_unsigned(part.labels[:number]),
        "counts": to_unsigned(part.counts[:number]),
        **prototype_fields(values),
    }
