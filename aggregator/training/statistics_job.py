"""The job that solves for a head from sums.

It reads each submission once, one in memory at a time, and adds it. How much each counts depends on all of them:
of those that do not count fully, the rest is subtracted again. Sums of integers are exact, so that the order does not
matter. To compare the devices' means, it keeps a summary of each device, of a cohort at a time.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.novelty import ClassDirections, class_directions
from aggregator.algorithms.statistics.moments import WHOLE, Moments, add, class_means, factors, no_rows
from aggregator.algorithms.statistics.ridge import Ridge, solve
from aggregator.coordination.bounds import counted_images, counted_scatter, is_common
from aggregator.graphs.head_export import map_to_onnx
from aggregator.intake.validation import Expectation, Refused, check_statistics
from aggregator.training.head_job import few_prototypes, write_checked
from aggregator.training.jobs import Result, StatisticsJob, Workspace
from aggregator.training.robust.outlier_detection import SHOWN_WARNINGS, cohorts_of, judge
from aggregator.training.robust.outlier_statistics import DeviceSummary, summarized
from aggregator.training.robust.training_set import distance_factors
from aggregator.training.robust.weights import counting
from aggregator.training.statistics_sums import grouped, submitted_moments, summary_of
from protocol.errors import BlobLost, ProtofleetError
from protocol.wire.codec import digest_of
from protocol.wire.messages import Submission


@dataclasses.dataclass
class Sums:
    """The sum over all devices that were added, and what is kept of each: numbers of its rows, no row.

    Attributes:
        total: the sum, with the factor WHOLE for each device.
        images: each device's images of each class, int64 (C,).
        rows: each device's rows of each class, int64 (C,): groups, or images where these are not grouped.
        far: how much each sum of a class counts (C,), of devices with means far from the others'.
        quarantined: outliers, with reasons.
        warnings: why outliers were not quarantined.
        refused: devices whose submission is invalid.
    """

    total: Moments
    images: dict[str, NDArray[np.int64]] = dataclasses.field(default_factory=dict)
    rows: dict[str, NDArray[np.int64]] = dataclasses.field(default_factory=dict)
    far: dict[str, NDArray[np.float64]] = dataclasses.field(default_factory=dict)
    quarantined: dict[str, str] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    refused: dict[str, Refused] = dataclasses.field(default_factory=dict)


def run(job: StatisticsJob, workspace: Workspace) -> Result:
    """Solve for a head, verify its ONNX file, and write it. The same submissions in any order make the same bytes.

    Raises:
        ProtofleetError: the submissions give no head, or ONNX Runtime computes something else.
    """
    manifest, feature_map = job.manifest(workspace.blobs), job.feature_map
    expectation = Expectation(bytes.fromhex(job.task), manifest, feature_map.size)
    graph = map_to_onnx(feature_map, num_classes=len(manifest.classes))
    if manifest.statistics is None or manifest.statistics.map.digest != digest_of(graph):
        raise ProtofleetError("expected the task's map, got another one: restart the aggregator")
    started_s = time.perf_counter()
    solved = solve_sums(job, workspace, expectation)
    ridge, sums, total = solved.ridge, solved.sums, solved.total
    images = {device: each for device, each in sums.images.items() if device not in sums.quarantined}
    figures = {
        "loss": ridge.error,
        "strength": ridge.strength,
        "degrees_of_freedom": ridge.degrees_of_freedom,
        "temperature": ridge.temperature,
    }
    seconds = time.perf_counter() - started_s
    metrics = write_checked(
        job,
        workspace,
        manifest,
        [ridge.layer],
        figures,
        feature_map=feature_map,
        directions=solved.directions if job.has_novelty else None,
    )
    rows = [each for device, each in sums.rows.items() if device not in sums.quarantined]
    invalid = {device: f"its submission is refused: {error.detail}" for device, error in sums.refused.items()}
    return Result(
        prototypes=total.rows,
        metrics={**metrics, "seconds": seconds},
        quarantined={**invalid, **sums.quarantined},
        warning="; ".join(sums.warnings[:SHOWN_WARNINGS]),
        few_prototypes=few_prototypes(np.sum(rows, axis=0), manifest),
        counting=counting(
            images, manifest.classes, multiple=job.robust.max_multiple, of_classes=solved.counted
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solved:
    """A head of sums, and what it was made of.

    Attributes:
        ridge: the head of a map's rows.
        directions: of the classes, without random features.
        sums: of all devices.
        total: what counts of them.
        counted: the images that count in each device's sum of each class (K, C).
    """

    ridge: Ridge
    directions: ClassDirections
    sums: Sums
    total: Moments
    counted: NDArray[np.float64]


def solve_sums(job: StatisticsJob, workspace: Workspace, expectation: Expectation) -> Solved:
    """Return the head of the job's submissions; raises ProtofleetError if they give none."""
    sums = added(job, workspace, expectation)
    total, counted = weighted(job, workspace, expectation, sums)
    workspace.report({"prototypes": total.rows})
    labels, devices = np.arange(counted.shape[1]), np.count_nonzero(counted, axis=0)
    ridge = solve(total, common=is_common(labels, devices, counted.sum(axis=0)))
    means = class_means(total)[total.class_counts > 0, : job.feature_map.selected]
    return Solved(ridge=ridge, directions=class_directions(means), sums=sums, total=total, counted=counted)


def added(job: StatisticsJob, workspace: Workspace, expectation: Expectation) -> Sums:
    """Read each submission once and add it; find outliers among groups of images, one cohort after the other.

    Raises:
        Refused: no submission is valid.
        BlobLost: after the last one, if some were lost.
    """
    cohorts, classes = cohorts_of(job.members, version=job.version), expectation.manifest.classes
    sums = Sums(no_rows(num_classes=len(classes), size=expectation.prototype_size))
    rate, lost = job.robust.false_alarm_rate / len(cohorts), None
    for cohort in cohorts:
        summaries: dict[str, DeviceSummary] = {}
        try:
            for device, submission in job.submissions(workspace.blobs, cohort):
                _add(device, submission, sums, summaries, job=job, expectation=expectation)
        except BlobLost as error:  # which others are lost is found out as well
            lost = error
        if summaries and lost is None:
            _compare(summaries, sums, job, classes=classes, false_alarm_rate=rate)
    if lost is not None:
        raise lost
    if sums.refused and not sums.images:
        raise next(reversed(sums.refused.values()))
    return sums


def _add(
    device: str,
    submission: Submission,
    sums: Sums,
    summaries: dict[str, DeviceSummary],
    *,
    job: StatisticsJob,
    expectation: Expectation,
) -> None:
    """Add a device's submission to the sums, and to `summaries` if the job compares devices."""
    try:
        moments = submitted_moments(submission, expectation, job.feature_map)
    except Refused as error:
        sums.refused[device] = error
        return
    sums.total = add(sums.total, moments, factor=WHOLE)
    sums.images[device] = sums.rows[device] = moments.counts
    if submission.tensors:
        if job.compares_devices:
            summaries[device] = summary_of(moments)
        return
    rows, labels, counts = check_statistics(submission, expectation)
    sums.rows[device] = np.bincount(labels, minlength=len(moments.counts))
    if job.compares_devices:
        summaries[device] = summarized(grouped(rows, labels, counts))


def _compare(
    summaries: dict[str, DeviceSummary],
    sums: Sums,
    job: StatisticsJob,
    *,
    classes: Sequence[str],
    false_alarm_rate: float,
) -> None:
    """Find outliers and distant means in a cohort."""
    if job.robust.detect_outliers:
        judgment = judge(summaries, classes=classes, false_alarm_rate=false_alarm_rate, released=job.released)
        sums.quarantined |= judgment.quarantined
        sums.warnings += filter(None, [judgment.warning])
    if job.robust.max_multiple:
        others = {device: one for device, one in summaries.items() if device not in sums.quarantined}
        sums.far |= distance_factors(others, classes=len(classes))


def weighted(
    job: StatisticsJob, workspace: Workspace, expectation: Expectation, sums: Sums
) -> tuple[Moments, NDArray[np.float64]]:
    """Return the sum of what counts of each device, and the images that count in its sum of each class (K, C).

    It is that of all, from which the rest is subtracted: only of limited devices and outliers, the submissions are read
    again. What goes beyond int64 in between wraps around, and back again.
    """
    devices = [device for device in sums.images if device not in sums.quarantined]
    stated = np.array([sums.images[device] for device in devices])
    multiple = job.robust.max_multiple
    in_scatter = WHOLE - factors(stated.sum(axis=1), counted_scatter(stated, multiple=multiple))
    near = np.array([sums.far.get(device, np.ones(stated.shape[1])) for device in devices])
    of_classes = factors(stated, counted_images(stated, multiple=multiple) * near)
    in_means = np.where(stated, WHOLE - of_classes, 0)
    all_of_it = (WHOLE, np.full(stated.shape[1], WHOLE))
    surplus = dict.fromkeys(sums.quarantined, all_of_it) | {
        device: (scatter, of_class)
        for device, scatter, of_class in zip(devices, in_scatter.tolist(), in_means, strict=True)
        if scatter or of_class.any()
    }
    total = sums.total
    for device, submission in job.submissions(workspace.blobs, surplus):
        scatter, of_class = surplus[device]
        moments = submitted_moments(submission, expectation, job.feature_map)
        total = add(total, moments, factor=-scatter, class_factors=-of_class)
    return dataclasses.replace(total, rows=max(1, round(total.rows / WHOLE))), stated * of_classes / WHOLE
