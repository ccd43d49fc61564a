"""Blocks of devices whose submissions are added one after the other, in this process or by workers of a Ray cluster."""

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.feature_map import BLOCK, FeatureMap, shortened
from aggregator.algorithms.statistics.moments import (
    WHOLE,
    Moments,
    add,
    class_means,
    moments_of,
    no_rows,
    of_all_classes,
    require_image_lengths,
    require_possible,
    squares_of,
)
from aggregator.intake.validation import Expectation, Prototypes, Refused, check_statistics
from aggregator.training.jobs import StatisticsJob
from aggregator.training.robust.outlier_statistics import ClassSummary, DeviceSummary, summarized
from protocol.errors import BlobLost, MalformedMessage, ProtofleetError
from protocol.statistics.second_moment import decode
from protocol.wire.messages import Submission

BLOCK_DEVICES = 100
"""Devices of a block, at most."""


class Surplus(NamedTuple):
    """Parts of WHOLE of a device that do not count: in the scatter, and in each class's mean (C,)."""

    scatter: int
    classes: NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Devices whose submissions are added together."""

    job: StatisticsJob
    expectation: Expectation
    devices: tuple[str, ...] = ()
    ends_cohort: bool = False
    """True for the last block of devices that are compared with each other."""
    surplus: Mapping[str, Surplus] = field(default_factory=dict)
    """Parts of each device that do not count."""

    def alone(self) -> "Block":
        """Return the block for another process: its job has no other members."""
        members = {device: self.job.members[device] for device in self.devices}
        return dataclasses.replace(self, job=msgspec.structs.replace(self.job, members=members))

    def nothing(self) -> Moments:
        classes = len(self.expectation.manifest.classes)
        return no_rows(num_classes=classes, size=self.expectation.prototype_size)


@dataclass
class DeviceFigures:
    """Each device of a block, as far as it is kept: numbers of its rows, no row. `Sums` has those of all devices."""

    images: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    rows: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)
    summaries: dict[str, DeviceSummary] = field(default_factory=dict)
    """For the comparison of devices; empty unless the job compares them."""
    lost: BlobLost | None = None
    """The last submission that is lost."""


Figures = TypeVar("Figures")
Work = Callable[[Block, Moments], tuple[Moments, Figures]]
"""Adds a block to a total, which it may change in place, and returns it with other figures of the block."""


class Engine(Protocol):
    """Adds blocks. Moments are integers modulo 2^64: the order and the place of the additions change no bit."""

    def sum(
        self,
        work: Work[Figures],
        blocks: Iterable[Block],
        total: Moments,
        keep: Callable[[Block, Figures], None],
    ) -> Moments:
        """Return the total with all blocks added; `keep` gets each block's figures, in the order of the blocks."""


class LocalEngine:
    """Adds one block after the other to the same total."""

    def sum(
        self,
        work: Work[Figures],
        blocks: Iterable[Block],
        total: Moments,
        keep: Callable[[Block, Figures], None],
    ) -> Moments:
        for block in blocks:
            total, figures = work(block, total)
            keep(block, figures)
            del figures  # before the next block's are made
        return total


def blocks_of(
    job: StatisticsJob,
    expectation: Expectation,
    cohort: Iterable[str],
    surplus: Mapping[str, Surplus] = types.MappingProxyType({}),
) -> Iterator[Block]:
    left = list(cohort)
    for at in range(0, len(left), BLOCK_DEVICES):
        devices = tuple(left[at : at + BLOCK_DEVICES])
        yield Block(
            job,
            expectation,
            devices,
            ends_cohort=at + BLOCK_DEVICES >= len(left),
            surplus={device: surplus[device] for device in devices if device in surplus},
        )


def add_block(block: Block, total: Moments) -> tuple[Moments, DeviceFigures]:
    """Return the total with the factor WHOLE of each valid submission added, and what is kept of the devices."""
    figures = DeviceFigures()
    try:
        for device, submission in block.job.submissions(block.devices):
            try:
                moments = submitted_moments(submission, block.expectation, block.job.feature_map)
            except Refused as error:
                figures.refused[device] = error
                continue
            total = add(total, moments, factor=WHOLE)
            figures.images[device] = figures.rows[device] = moments.counts
            if not submission.tensors:
                _keep_rows(figures, device, submission, block)
            elif block.job.compares_devices:
                figures.summaries[device] = summary_of(moments)
    except BlobLost as error:
        figures.lost = error
    return total, figures


def _keep_rows(figures: DeviceFigures, device: str, submission: Submission, block: Block) -> None:
    rows, labels, counts = check_statistics(submission, block.expectation)
    figures.rows[device] = np.bincount(labels, minlength=len(figures.images[device]))
    if block.job.compares_devices:
        figures.summaries[device] = summarized(_groups(rows, labels, counts))


def summary_of(part: Moments) -> DeviceSummary:
    """Return the summary of class sums of single images: they have one variance, that within the device's classes.

    As a class has no variance of its own, it counts as one prototype, whose scatter is not compared.
    """
    labels, squares, images = np.flatnonzero(part.counts), squares_of(part), int(part.counts.sum())
    means = class_means(part)
    within = squares - float((part.counts * np.square(means).sum(axis=1)).sum())
    freedom = images - len(labels)
    variance = max(within, 0.0) / freedom if freedom else np.nan
    classes = {
        int(label): ClassSummary(means[label].copy(), float(part.counts[label]), 1.0, variance)
        for label in labels
    }
    return DeviceSummary(classes, float(images), squares / max(images, 1), 1.0)


def subtract_block(block: Block, total: Moments) -> tuple[Moments, None]:
    """Return the total without what does not count of a block's devices; raises BlobLost if some are lost."""
    for device, submission in block.job.submissions(block.devices):
        moments = submitted_moments(submission, block.expectation, block.job.feature_map)
        surplus = block.surplus[device]
        total = add(total, moments, factor=-surplus.scatter, class_factors=-surplus.classes)
    return total, None


def submitted_moments(submission: Submission, expectation: Expectation, feature_map: FeatureMap) -> Moments:
    """Return the moments of one device; raises Refused unless they can be those of images."""
    values, labels, counts = check_statistics(submission, expectation)
    classes = len(expectation.manifest.classes)
    labels, counts = labels.astype(np.int64), counts.astype(np.int64)
    if not submission.tensors:
        return moments_of(shortened(values, feature_map), labels, counts, num_classes=classes)
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


def _groups(
    rows: NDArray[np.integer], labels: NDArray[np.integer], counts: NDArray[np.integer]
) -> Prototypes:
    """Return the means of groups of images, of which a row is as far from its class's mean as one image."""
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
