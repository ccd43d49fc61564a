"""A head of sums is the same however the images are divided over devices, and no device's sums can spoil it."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakSet

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest

from aggregator.algorithms.statistics.moments import WHOLE, add, moments_of, no_rows
from aggregator.config.schema import Robust
from aggregator.coordination.bounds import counted_images, counted_scatter
from aggregator.graphs.head_export import mapped
from aggregator.intake.validation import Expectation, Prototypes, Refused
from aggregator.storage.blobs import FolderBlobs
from aggregator.training import statistics_job as job_module
from aggregator.training.jobs import Result, StatisticsJob, Workspace
from aggregator.training.robust import outlier_detection
from aggregator.training.robust.outlier_statistics import DeviceSummary, summarized
from aggregator.training.robust.weights import Counting
from aggregator.training.statistics_job import added, run, weighted
from aggregator.training.statistics_sums import submitted_moments
from protocol.errors import ProtofleetError
from protocol.statistics.second_moment import decode, from_triangle, to_triangle
from protocol.statistics.second_moment import encode as encode_moment
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.messages import Submission
from protofleet.simulation.statistics import sums_submission
from tests.support.messages.jobs import statistics_job, workspace
from tests.support.messages.statistics import (
    FEATURE_MAP,
    GROUPS_EXPECTATION,
    SINGLE_EXPECTATION,
    groups_of,
    images,
    sums_of,
)


def job_on(
    folder: Path,
    submissions: Mapping[str, Submission],
    expectation: Expectation,
    robust: Robust = Robust(),  # noqa: B008 - frozen
) -> tuple[StatisticsJob, Workspace]:
    blobs = FolderBlobs(folder / "blobs")
    job = statistics_job(blobs, submissions, expectation, robust=robust, has_novelty=True)
    return job, workspace(blobs, folder)


def made(
    folder: Path,
    submissions: Mapping[str, Submission],
    expectation: Expectation = SINGLE_EXPECTATION,
    robust: Robust = Robust(),  # noqa: B008 - frozen
) -> tuple[Result, bytes]:
    """The result of a job, and its head without its metadata."""
    result = run(*job_on(folder, submissions, expectation, robust))
    model = onnx.load(folder / "head.onnx")
    del model.metadata_props[:]
    return result, model.SerializeToString()


def accuracy(folder: Path, features: np.ndarray, labels: np.ndarray) -> float:
    session = onnxruntime.InferenceSession(folder / "head.onnx")
    (logits,) = session.run(["logits"], {"feature": features})
    return float((logits.argmax(axis=1) == labels).mean())


def moment_of(submission: Submission) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    counts, sums = to_array(submission.counts), to_array(submission.prototypes)
    return (
        counts,
        sums,
        from_triangle(decode(submission.tensors["second_moment"], counts, sums), sums.shape[1]),
    )


def with_moment(submission: Submission, moment: np.ndarray) -> Submission:
    counts, sums, _ = moment_of(submission)
    coded = encode_moment(to_triangle(np.rint(moment).astype(np.int64)), counts, sums)
    return msgspec.structs.replace(submission, tensors={"second_moment": coded})


def test_head_does_not_depend_on_who_has_the_images(tmp_path: Path) -> None:
    """The same bytes: one device with all images, three in any order, and another split with like devices."""
    features, labels = images(0, 24)
    heads = set()
    for number, devices in enumerate((1, 2, 3, 4)):
        for order in (1, -1):
            device_of = np.arange(len(labels)) % devices
            parts = {
                str(device): sums_of(features[device_of == device], labels[device_of == device])
                for device in range(devices)[::order]
            }
            result, head = made(tmp_path / f"{number}{order}", parts)
            heads.add(head)
            assert result.prototypes == len(labels)
            assert not result.counting.limited
    assert len(heads) == 1


@pytest.mark.parametrize("make", [sums_of, groups_of])
def test_head_predicts(tmp_path: Path, make: type) -> None:
    expectation = SINGLE_EXPECTATION if make is sums_of else GROUPS_EXPECTATION
    result, _ = made(
        tmp_path, {str(device): make(*images(device)) for device in range(3)}, expectation=expectation
    )
    assert result.prototypes == (180 if make is sums_of else 36)
    assert result.metrics["onnx_max_difference"] < 1e-4
    features, labels = images(50)
    assert accuracy(tmp_path, features, labels) > 0.95
    session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
    known, foreign = (
        session.run(["novelty"], {"feature": each})[0] for each in (features, features[::-1, ::-1])
    )
    assert np.quantile(known, 0.9) < np.quantile(foreign, 0.1)


def test_groups_are_the_same_statistic_as_their_sums() -> None:
    """An aggregator squares the rows: of two encodings, one."""
    features, labels = images(3)
    found = submitted_moments(groups_of(features, labels), GROUPS_EXPECTATION, FEATURE_MAP)
    rows = to_array(groups_of(features, labels).prototypes).astype(np.int64)
    np.testing.assert_array_equal(from_triangle(found.second_moment, rows.shape[1]), 5 * rows.T @ rows)
    assert found.counts.tolist() == [20, 20, 20]
    assert found.rows == 12


def test_negative_direction_is_refused(tmp_path: Path) -> None:
    """It would cancel the scatter of all other devices there, and every training would fail."""
    honest = sums_of(*images(7))
    _, _, moment = moment_of(honest)
    axis = np.linalg.eigh(moment.astype(float))[1][:, -1]
    evil = with_moment(honest, moment - 2 * (axis @ moment @ axis) * np.outer(axis, axis))
    result, _ = made(tmp_path, {"a": sums_of(*images(0)), "evil": evil})
    assert "negative" in result.quarantined["evil"]
    with pytest.raises(Refused, match="negative"):
        made(tmp_path / "alone", {"evil": evil})


def test_sums_of_rows_longer_than_those_of_images_are_refused(tmp_path: Path) -> None:
    """Their scatter would hide what distinguishes the classes of other devices."""
    rows = np.random.default_rng(0).choice([-127, 127], (100, FEATURE_MAP.size))
    moments = moments_of(rows, np.full(100, 2), np.ones(100, np.int64), num_classes=3)
    counts, sums = moments.counts[2:], moments.sums[2:]
    evil = msgspec.structs.replace(
        sums_of(*images(0)),
        prototypes=to_tensor(sums.astype(np.int32)),
        labels=to_tensor(np.array([2], np.uint8)),
        counts=to_tensor(counts.astype(np.uint8)),
        images=100,
        tensors={"second_moment": encode_moment(moments.second_moment, counts, sums)},
    )
    parts = {"a": sums_of(*images(0)), "b": sums_of(*images(1))}
    result, head = made(tmp_path / "with", {**parts, "evil": evil})
    assert "no longer than" in result.quarantined["evil"]
    assert made(tmp_path / "without", parts)[1] == head


def test_sum_of_a_class_longer_than_those_of_images_is_refused() -> None:
    """Where few images make a class, those of others would leave room for it."""
    honest = sums_of(*images(0))
    counts, sums, _ = moment_of(honest)
    sums, counts = sums.astype(np.int64), np.array([1000, 1000, 10], np.uint16)
    sums[2] = 60 * counts[2]
    moment = np.outer(sums[2], sums[2]) // counts[2] + np.diag(np.full(len(sums[2]), 40_000))
    moment += sum(
        np.outer(total, total) // images_of for total, images_of in zip(sums[:2], (20, 20), strict=True)
    )
    evil = msgspec.structs.replace(
        honest,
        prototypes=to_tensor(sums.astype(np.int32)),
        counts=to_tensor(counts),
        images=int(counts.sum()),
        tensors={"second_moment": encode_moment(to_triangle(moment), counts, sums)},
    )
    with pytest.raises(Refused, match="no longer than"):
        submitted_moments(evil, SINGLE_EXPECTATION, FEATURE_MAP)


def test_rows_of_groups_count_no_longer_than_one_and_a_half_times_those_of_images() -> None:
    rows = np.random.default_rng(0).choice([-127, 127], (100, FEATURE_MAP.size))
    evil = msgspec.structs.replace(
        groups_of(*images(0)),
        prototypes=to_tensor(rows.astype(np.int8)),
        labels=to_tensor(np.full(100, 2, np.uint8)),
        counts=to_tensor(np.full(100, 5, np.uint8)),
        images=500,
    )
    found = submitted_moments(evil, GROUPS_EXPECTATION, FEATURE_MAP)
    diagonal = np.diag(from_triangle(found.second_moment, FEATURE_MAP.size))
    for block, longest in FEATURE_MAP.longest:
        assert diagonal[block].sum() / 500 <= (1.5 * longest) ** 2 * 1.05  # rounded to integers again


def test_device_that_states_many_images_is_limited(tmp_path: Path) -> None:
    """It counts a multiple of the median device, or a share of the fleet and of each class."""
    parts = {str(device): sums_of(*images(device, 4)) for device in range(4)}
    parts["large"] = sums_of(*images(9, 400))
    result, limited = made(tmp_path / "limited", parts)
    assert [device for device, _ in result.counting.limited] == ["large"]
    result, unlimited = made(tmp_path / "unlimited", parts, robust=Robust(max_multiple=0))
    assert result.counting == Counting(1248, 1248)
    assert limited != unlimited


@pytest.mark.parametrize("make", [groups_of, sums_of])
def test_outlier_is_quarantined(tmp_path: Path, make: type) -> None:
    """A device that flips labels, among groups and among sums of single images."""
    features, labels = images(30, 40)
    parts = {str(device): make(*images(device, 40)) for device in range(9)}
    parts["flipped"] = make(np.roll(features, 40, axis=0), labels)
    expectation = SINGLE_EXPECTATION if make is sums_of else GROUPS_EXPECTATION
    result, _ = made(tmp_path, parts, expectation)
    assert list(result.quarantined) == ["flipped"]


def test_sums_far_from_the_others_count_in_part(tmp_path: Path) -> None:
    """Also if outliers are not quarantined, and whatever number of images the device states."""
    features, labels = images(30, 400)
    parts = {str(device): sums_of(*images(device, 40)) for device in range(9)}
    parts["flipped"] = sums_of(np.roll(features, 400, axis=0), labels)
    result, _ = made(tmp_path, parts, robust=Robust(detect_outliers=False))
    assert {device for device, _ in result.counting.limited} == {"flipped"}
    assert sum("far from the other devices' mean" in text for _, text in result.counting.limited) == 3
    assert accuracy(tmp_path, features, labels) > 0.95


def test_claims_for_classes_of_its_own_do_not_unlimit_them(tmp_path: Path) -> None:
    """The fleet's classes stay common, however many images a device states of another one."""
    features, labels = images(50)
    common = {str(device): images(device) for device in range(6)}
    parts = {device: sums_of(each[own < 2], own[own < 2]) for device, (each, own) in common.items()}
    row = mapped(FEATURE_MAP, features[labels == 0]).mean(axis=0) * 1.0
    evil = np.tile(np.rint(row).astype(np.int8), (10_000, 1))
    parts["evil"] = sums_submission({2: evil}, task=SINGLE_EXPECTATION.task, images=len(evil))
    made(tmp_path, parts)
    assert accuracy(tmp_path, features[labels < 2], labels[labels < 2]) > 0.9


def test_device_with_a_class_of_its_own_does_not_take_the_images_of_others(tmp_path: Path) -> None:
    """One row beyond the mean of another class would: all classes count alike."""
    features, labels = images(50)
    row = mapped(FEATURE_MAP, features[labels == 0]).mean(axis=0) * 1.1
    evil = msgspec.structs.replace(
        groups_of(features, labels),
        prototypes=to_tensor(np.rint(row).astype(np.int8)[None]),
        labels=to_tensor(np.array([2], np.uint8)),
        counts=to_tensor(np.array([5], np.uint8)),
        images=5,
    )
    common = {str(device): images(device) for device in range(6)}
    parts = {device: groups_of(each[own < 2], own[own < 2]) for device, (each, own) in common.items()}
    made(tmp_path, {**parts, "evil": evil}, GROUPS_EXPECTATION)
    assert accuracy(tmp_path, features[labels < 2], labels[labels < 2]) > 0.9


@pytest.mark.parametrize("cohort", [2, 500])
def test_each_submission_is_added_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cohort: int) -> None:
    """The rest of what does not count fully is subtracted, to the bit; only such submissions are read again.

    Of a class, less of the large device counts than of its scatter.
    """
    monkeypatch.setattr(outlier_detection, "COHORT", cohort)
    reads = Counter[str]()
    read = FolderBlobs.read

    def counted(self: FolderBlobs, digest: bytes) -> bytes:
        reads[digest.hex()] += 1
        return read(self, digest)

    monkeypatch.setattr(FolderBlobs, "read", counted)
    parts = {str(device): groups_of(*images(device)) for device in range(5)}
    features, labels = images(9, 400)
    first = np.concatenate(
        [np.flatnonzero(labels == label)[:number] for label, number in enumerate((400, 20, 20))]
    )
    parts["large"] = groups_of(features[first], labels[first])
    parts["invalid"] = sums_of(*images(7))
    job, place = job_on(tmp_path, parts, GROUPS_EXPECTATION)
    sums = added(job, place, GROUPS_EXPECTATION)
    sums.quarantined["3"] = "as if outlier detection had found it"
    total, counted_in_classes = weighted(job, place, GROUPS_EXPECTATION, sums)
    again = {"large", "3"}
    assert {device: reads[digest] for device, digest in job.members.items()} == {
        device: 1 + (device in again) for device in parts
    }
    assert list(sums.refused) == ["invalid"]
    devices, stated = ["0", "1", "2", "4", "large"], np.array([[20] * 3] * 4 + [[400, 20, 20]])
    shares = WHOLE * counted_scatter(stated) / stated.sum(axis=1)
    of_classes = WHOLE * counted_images(stated) / stated
    expected = no_rows(num_classes=3, size=FEATURE_MAP.size)
    for device, share, of_class in sorted(zip(devices, shares, of_classes, strict=True), reverse=True):
        moments = submitted_moments(parts[device], GROUPS_EXPECTATION, FEATURE_MAP)
        expected = add(expected, moments, factor=int(share), class_factors=of_class.astype(np.int64))
    for name in ("counts", "sums", "second_moment", "class_counts", "class_sums"):
        np.testing.assert_array_equal(getattr(total, name), getattr(expected, name))
    assert total.rows == round(expected.rows / WHOLE)
    in_classes = stated * of_classes.astype(np.int64) / WHOLE
    np.testing.assert_array_equal(np.sort(counted_in_classes, axis=0), np.sort(in_classes, axis=0))


def test_what_is_kept_of_devices_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summaries of one cohort, whatever the number of devices; an outlier is found in its cohort."""
    monkeypatch.setattr(outlier_detection, "COHORT", 8)
    kept, most = WeakSet[DeviceSummary](), 0

    def watched(part: Prototypes) -> DeviceSummary:
        nonlocal most
        kept.add(summary := summarized(part))
        most = max(most, len(kept))
        return summary

    monkeypatch.setattr(job_module, "summarized", watched)
    parts = {f"{device:03}": groups_of(*images(device, 40)) for device in range(15)}
    features, labels = images(40, 40)
    parts["flipped"] = groups_of(np.roll(features, 40, axis=0), labels)
    job, place = job_on(tmp_path, parts, GROUPS_EXPECTATION)
    assert list(added(job, place, GROUPS_EXPECTATION).quarantined) == ["flipped"]
    assert most == 8


@pytest.mark.parametrize(("devices", "sizes"), [(1, [1]), (500, [500]), (501, [251, 250]), (1200, [400] * 3)])
def test_cohorts_change_with_each_head(devices: int, sizes: list[int]) -> None:
    """So that devices that cooperate cannot arrange to be most of one."""
    names = [str(device) for device in range(devices)]
    cohorts = [outlier_detection.cohorts_of(names, version=version) for version in (1, 2)]
    assert [len(cohort) for cohort in cohorts[0]] == sizes
    assert sorted(name for cohort in cohorts[0] for name in cohort) == sorted(names)
    assert (cohorts[0] == cohorts[1]) == (len(sizes) == 1)


def test_few_images_of_a_class_are_named(tmp_path: Path) -> None:
    features, labels = images(0)
    few = np.concatenate([np.flatnonzero(labels < 2), np.flatnonzero(labels == 2)[:3]])
    result, _ = made(tmp_path, {"a": sums_of(features[few], labels[few])})
    assert result.few_prototypes == {"fox": 3}


def test_other_map_makes_no_head(tmp_path: Path) -> None:
    """A library of another version may draw other random numbers."""
    manifest = SINGLE_EXPECTATION.manifest
    assert manifest.statistics is not None
    other = msgspec.structs.replace(manifest.statistics.map, digest=bytes(32))
    changed = msgspec.structs.replace(
        manifest, statistics=msgspec.structs.replace(manifest.statistics, map=other)
    )
    with pytest.raises(ProtofleetError, match="expected the task's map"):
        made(tmp_path, {"a": sums_of(*images(0))}, Expectation(bytes(32), changed, FEATURE_MAP.size))


def test_hostile_second_moment_is_refused() -> None:
    noise = to_tensor(np.random.default_rng(0).integers(0, 256, 100).astype(np.uint8))
    hostile = msgspec.structs.replace(sums_of(*images(0)), tensors={"second_moment": noise})
    with pytest.raises(Refused, match="zlib"):
        submitted_moments(hostile, SINGLE_EXPECTATION, FEATURE_MAP)
