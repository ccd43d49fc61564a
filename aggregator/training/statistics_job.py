"""The job that solves for a head from sums: `python -m aggregator.training.statistics_job JOB.json`.

It reads the submissions twice, one in memory at a time: how much each counts depends on all of them. Of groups of
images it keeps the prototypes, as FedTC's job does, to find outliers.
"""

import dataclasses
import time

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.statistics.feature_map import BLOCK, FeatureMap
from aggregator.algorithms.statistics.moments import (
    WHOLE,
    Moments,
    add,
    factors,
    moments_of,
    no_rows,
    of_all_classes,
    require_image_lengths,
    require_possible,
)
from aggregator.algorithms.statistics.ridge import TEMPERATURE, solve
from aggregator.graphs.head_export import head_to_onnx, map_to_onnx, max_difference
from aggregator.ingest.validation import Expectation, Prototypes, Refused, check_statistics
from aggregator.training.head_job import MAX_ONNX_DIFFERENCE
from aggregator.training.jobs import (
    FEW_PROTOTYPES,
    Result,
    StatisticsJob,
    checked_parts,
    report_progress,
    run_as_program,
)
from aggregator.training.outlier_detection import Judgment, judge
from aggregator.training.robust_training_set import half_of
from aggregator.training.weights import counted_totals
from protocol.errors import MalformedMessage, ProtofleetError
from protocol.statistics.second_moment import decode
from protocol.wire.codec import digest_of
from protocol.wire.messages import Submission


@dataclasses.dataclass(frozen=True)
class Checked:
    """The parts of all valid submissions that are kept.

    Attributes:
        images: each device's images of each class, int64 (C,).
        rows: each device's rows of each class (C,): groups, or images where these are not grouped.
        groups: each device's prototypes, half of them with half the memory; empty if they are not compared.
        invalid: devices whose submission is refused, with reasons.
    """

    images: dict[str, NDArray[np.int64]]
    rows: dict[str, NDArray[np.int64]]
    groups: dict[str, Prototypes]
    invalid: dict[str, str]


def run(job: StatisticsJob) -> Result:
    """Solve for a head, verify its ONNX file, and write it. The same submissions in any order make the same bytes.

    Raises:
        ProtofleetError: the submissions give no head, or ONNX Runtime computes something else.
    """
    manifest, feature_map = job.manifest(), job.feature_map
    expectation = Expectation(bytes.fromhex(job.task), manifest, feature_map.size)
    graph = map_to_onnx(feature_map, num_classes=len(manifest.classes))
    if manifest.statistics is None or manifest.statistics.map.digest != digest_of(graph):
        raise ProtofleetError("expected the task's map, got another one: restart the aggregator")
    started_s = time.perf_counter()
    checked = check_all(job, expectation)
    judgment = Judgment({})
    if checked.groups:
        judgment = judge(
            checked.groups,
            classes=manifest.classes,
            false_alarm_rate=job.robust.false_alarm_rate,
            released=job.released,
        )
    total, shares = added(job, expectation, checked, excluded=set(judgment.quarantined))
    report_progress({"prototypes": total.rows})
    ridge = solve(total)
    figures = {
        "loss": ridge.error,
        "strength": ridge.strength,
        "degrees_of_freedom": ridge.degrees_of_freedom,
        "temperature": TEMPERATURE,
        "limited_devices": float(sum(share < WHOLE for share in shares)),
    }
    if job.half_memory:
        figures["half_memory"] = 1.0
    seconds = time.perf_counter() - started_s
    head = head_to_onnx([ridge.layer], metadata=job.metadata(manifest, figures), feature_map=feature_map)
    difference = _max_difference(job, ridge.layer, head)
    job.write_head(head, manifest)
    included = [rows for device, rows in checked.rows.items() if device not in judgment.quarantined]
    numbers = dict(zip(manifest.classes, np.sum(included, axis=0).tolist(), strict=True))
    return Result(
        prototypes=total.rows,
        metrics={**figures, "seconds": seconds, "onnx_max_difference": difference},
        quarantined={**checked.invalid, **judgment.quarantined},
        warning=judgment.warning,
        few_prototypes={name: number for name, number in numbers.items() if 0 < number < FEW_PROTOTYPES},
    )


def check_all(job: StatisticsJob, expectation: Expectation) -> Checked:
    """Check all submissions; raises Refused if none is valid."""

    def check(submission: Submission) -> tuple[NDArray[np.int64], NDArray[np.int64], Prototypes | None]:
        images = submitted_moments(submission, expectation, job.feature_map).counts
        if submission.tensors:
            return images, images, None
        labels = check_statistics(submission, expectation)[1]
        rows = np.bincount(labels, minlength=len(images))
        if not job.robust.detect_outliers:
            return images, rows, None
        groups = _groups(submission, expectation)
        return images, rows, half_of(groups) if job.half_memory else groups

    parts, invalid = checked_parts(job.submissions(), check)
    return Checked(
        {device: images for device, (images, _, _) in parts.items()},
        {device: rows for device, (_, rows, _) in parts.items()},
        {device: groups for device, (_, _, groups) in parts.items() if groups is not None},
        invalid,
    )


def added(
    job: StatisticsJob, expectation: Expectation, checked: Checked, *, excluded: set[str]
) -> tuple[Moments, list[int]]:
    """Return the sum over all devices, and how many parts of WHOLE of each count."""
    devices = [device for device in checked.images if device not in excluded]
    stated = np.array([checked.images[device] for device in devices])
    counted = counted_totals(stated, multiple=job.robust.max_multiple)
    shares = dict(zip(devices, factors(stated.sum(axis=1).tolist(), counted.tolist()), strict=True))
    total = no_rows(num_classes=len(expectation.manifest.classes), size=expectation.prototype_size)
    for device, submission in job.submissions():
        if device in shares:
            total = add(
                total, submitted_moments(submission, expectation, job.feature_map), factor=shares[device]
            )
    return dataclasses.replace(total, rows=max(1, round(total.rows / WHOLE))), list(shares.values())


def submitted_moments(submission: Submission, expectation: Expectation, feature_map: FeatureMap) -> Moments:
    """Return the moments of one device; raises Refused unless they can be those of images."""
    values, labels, counts = check_statistics(submission, expectation)
    classes = len(expectation.manifest.classes)
    labels, counts = labels.astype(np.int64), counts.astype(np.int64)
    if not submission.tensors:
        return moments_of(feature_map.shortened(values), labels, counts, num_classes=classes)
    try:
        second_moment = decode(submission.tensors["second_moment"], counts, values)
    except MalformedMessage as error:
        raise Refused("malformed", str(error)) from error
    moments = of_all_classes(int(counts.sum()), labels, counts, values, second_moment, num_classes=classes)
    try:
        require_image_lengths(moments, feature_map)
        require_possible(moments)
    except ProtofleetError as error:
        raise Refused("implausible", str(error)) from error
    return moments


def _groups(submission: Submission, expectation: Expectation) -> Prototypes:
    """Return the means of groups of images, of which a row is as far from its class's mean as one image."""
    rows, labels, counts = check_statistics(submission, expectation)
    values = rows.astype(np.float32)
    weights = counts.astype(np.float32)
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        blocks = [mine[at : at + BLOCK] for at in range(0, len(mine), BLOCK)]
        mean = (
            np.array([weights[block] @ values[block] for block in blocks]).sum(axis=0) / weights[mine].sum()
        )
        for block in blocks:
            values[block] = mean + (values[block] - mean) / np.sqrt(weights[block])[:, None]
    return Prototypes(values, labels.astype(np.int64), counts.astype(np.int64))


def _max_difference(job: StatisticsJob, layer: Dense, head: bytes) -> float:
    features = np.random.default_rng(0).exponential(size=(256, job.feature_size)).astype(np.float32)
    difference = max_difference([layer], head, features, job.feature_map)
    if not difference <= MAX_ONNX_DIFFERENCE:
        raise ProtofleetError(
            f"the head in ONNX Runtime differs by {difference:.3g}, more than {MAX_ONNX_DIFFERENCE}: not published"
        )
    return difference


if __name__ == "__main__":
    run_as_program(StatisticsJob, run)
