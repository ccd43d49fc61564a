"""The training set of a head, pure: the prototypes of several submissions as one labeled data set.

A device's mean of a class that is too far from the others' is moved to the distance that is expected of an honest
device: outlier detection finds few wrong devices among few, and here such a device stays in use.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.arrays import Arrays
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.config.schema import Robust
from aggregator.coordination.bounds import (
    MAX_MULTIPLE,
    MEAN_DISTANCE,
    SUM_DISTANCE,
    device_factors,
    is_common,
    limiting_factors,
)
from aggregator.coordination.minimums import MEDIAN_DEVICES
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.outlier_detection import (
    COHORT,
    MAX_MALICIOUS,
    SIMILAR,
    Judgment,
    cohorts_of,
    is_mislabeled,
    joined_judgment,
    judge,
)
from aggregator.training.robust.outlier_statistics import (
    TINY,
    ClassMeans,
    DeviceSummary,
    class_means,
    distances,
    summaries,
)
from aggregator.training.robust.scatter import scatter_set
from aggregator.training.robust.weights import (
    Counting,
    counting,
    limited,
    prototype_weights,
    stated_images,
)

ROWS = 256
"""Devices that are compared with all at once."""


def limited_means(parts: Sequence[Prototypes]) -> list[Prototypes]:
    """Return one part per device, in which no mean of a class is farther from the median than expected.

    All prototypes that a device has of a class move together, straight towards the coordinate-wise median of the
    devices' means. Devices that resemble another one stay, as in another place (`explained`), and so do classes of
    fewer than MEDIAN_DEVICES devices.
    """
    cohorts = np.array_split(np.arange(len(parts)), math.ceil(len(parts) / COHORT))
    return [part for cohort in cohorts for part in _limited_means([parts[at] for at in cohort])]


def _limited_means(parts: Sequence[Prototypes]) -> list[Prototypes]:
    named = {f"{number:06}": part for number, part in enumerate(parts)}
    classes = list(_compared(summaries(named), MEAN_DISTANCE))
    medians = {label: one.median for label, one, _ in classes}
    changed: dict[str, Prototypes] = {}
    for label, one, factors in classes:
        far = np.flatnonzero(factors < 1)
        for at in far[~explained(one, far, label, medians)].tolist():
            device = one.devices[at]
            move = ((factors[at] - 1) * one.deviations[at]).astype(np.float32)
            changed[device] = _moved(changed.get(device, named[device]), label, move)
    return [changed.get(device, part) for device, part in named.items()]


def _moved(part: Prototypes, label: int, move: NDArray[np.float32]) -> Prototypes:
    """Return a device's prototypes, with the prototypes of one class moved."""
    values, block = part.values + (part.labels == label)[:, None] * move, part.block
    if block is not None:
        block = replace(block, means=block.means + (block.labels == label)[:, None] * move)
    return replace(part, values=values, block=block)


def distance_factors(parts: Mapping[str, DeviceSummary], *, classes: int) -> dict[str, NDArray[np.float64]]:
    """Return how much each device's sum of each class counts (C,), for devices that do not count fully.

    Sums are integers and cannot be moved. A device whose mean is SUM_DISTANCE times as far from the median as expected
    or farther has the effect on the class of one at that distance, whether or not other devices resemble it.
    """
    factors_of: dict[str, NDArray[np.float64]] = {}
    for label, one, factors in _compared(parts, SUM_DISTANCE):
        for at in np.flatnonzero(factors < 1).tolist():
            factors_of.setdefault(one.devices[at], np.ones(classes))[label] = factors[at]
    return factors_of


def _compared(
    parts: Mapping[str, DeviceSummary], multiple: float
) -> Iterator[tuple[int, ClassMeans, NDArray[np.float64]]]:
    """Yield each class of MEDIAN_DEVICES devices and more, its means, and what brings them to a distance (K,).

    That is a multiple of the distance from the median that is expected of an honest device.
    """
    for label in sorted({label for part in parts.values() for label in part.classes}):
        one = class_means(parts, label)
        if len(one.devices) >= MEDIAN_DEVICES:
            yield label, one, limiting_factors(np.sqrt(np.maximum(distances(one).ratios, TINY)), multiple)


def explained(
    one: ClassMeans, devices: NDArray[np.intp], label: int, medians: dict[int, NDArray[np.float64]]
) -> NDArray[np.bool_]:
    """Return for some devices (k,) of a class whether their distance from the median may be that of another place.

    Such a device is much nearer to another device than both are to the median. Where those that it resembles are fewer
    than a third of the devices, they may all be malicious: then its mean must not be much nearer to another class.
    """
    deviations = one.deviations
    squares = (deviations**2).sum(axis=1)
    alike = np.zeros(len(devices), dtype=np.int64)
    for start in range(0, len(devices), ROWS):  # all pairs at once would take much memory in a large fleet
        rows = devices[start : start + ROWS]
        sums = squares[rows, None] + squares
        near = sums - 2 * deviations[rows] @ deviations.T < SIMILAR * sums / 2
        alike[start : start + ROWS] = near.sum(axis=1)
    return np.array(
        [
            number > 1 and (number >= MAX_MALICIOUS * len(squares) or not is_mislabeled(mean, label, medians))
            for number, mean in zip(alike, one.means[devices], strict=True)
        ],
        dtype=np.bool_,
    )


def judged_set(
    parts: Mapping[str, Prototypes],
    *,
    classes: Sequence[str],
    widths: Sequence[int] = (),
    robust: Robust,
    released: Collection[str] = (),
    version: int = 0,
    arrays: Arrays | None = None,
) -> tuple[TrainingSet, Judgment, Counting]:
    """Return the prototypes that a head of these devices is made of, the outliers among them, and what counts.

    `widths` is an attribute of `TrainingSet`. Devices in `released` are not quarantined. The devices of a large fleet
    are compared in cohorts, which each `version` of the head draws anew. Arrays of all prototypes are made by `arrays`,
    in memory if it is None.

    Raises:
        ProtofleetError: the data cannot be trained on.
    """
    cohorts, judgment = cohorts_of(parts, version=version), Judgment({})
    if robust.detect_outliers:
        judgment = joined_judgment(
            judge(
                summaries({device: parts[device] for device in cohort}),
                classes=classes,
                false_alarm_rate=robust.false_alarm_rate / len(cohorts),
                released=released,
            )
            for cohort in cohorts
        )
    in_order = itertools.chain.from_iterable(cohorts)
    used = {name: parts[name] for name in in_order if name not in judgment.quarantined}
    data = combine(
        list(used.values()),
        num_classes=len(classes),
        max_multiple=robust.max_multiple,
        disputed=judgment.disputed,
        arrays=arrays,
    )
    images = dict(zip(used, stated_images(list(used.values()), len(classes)), strict=True))
    return (
        replace(data, widths=widths),
        judgment,
        counting(images, classes, multiple=robust.max_multiple),
    )


def pool(parts: Sequence[Prototypes], arrays: Arrays | None = None) -> Prototypes:
    """Concatenate the prototypes of several submissions (FedTC section 3.1, before eq. 5), in an array of `arrays`."""
    shape = (sum(len(part.labels) for part in parts), *parts[0].values.shape[1:])
    return Prototypes(
        np.concatenate([part.values for part in parts], out=(arrays or Arrays()).empty(shape)),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.counts for part in parts]),
    )


def combine(
    parts: Sequence[Prototypes],
    *,
    num_classes: int,
    max_multiple: float = MAX_MULTIPLE,
    disputed: Collection[int] = (),
    arrays: Arrays | None = None,
) -> TrainingSet:
    """Return the training set of one part per device, with little influence of devices that differ from the others.

    No device weighs more than `max_multiple` times the median device, and no mean of a class is farther from the
    others' than is expected (`limited_means`); with 0, neither is limited.

    If a device has principal prototypes, the batches of all devices are brought to this form (`scatter_set`).

    The prototypes are in an array of `arrays`; in memory if it is None.
    """
    arrays = arrays or Arrays()
    if any(part.block is not None for part in parts):
        data = scatter_set(
            limited_means(parts) if max_multiple else parts,
            num_classes=num_classes,
            factors=device_factors(stated_images(parts), multiple=max_multiple),
            max_multiple=max_multiple,
            arrays=arrays,
        )
        return replace(data, common=_common(parts, data.labels, data.counted_images, disputed))
    weights = np.concatenate(prototype_weights(parts, multiple=max_multiple))
    parts = limited(parts, multiple=max_multiple)
    pooled = pool(limited_means(parts) if max_multiple else parts, arrays)
    return TrainingSet(
        *(pooled.values, pooled.labels, pooled.counts, num_classes),
        weights=weights,
        common=_common(parts, pooled.labels, weights, disputed),
        devices=np.repeat(np.arange(len(parts)), [len(part.labels) for part in parts]),
        arrays=arrays,
    )


def _common(
    parts: Sequence[Prototypes],
    labels: NDArray[np.integer],
    weights: NDArray[np.float64],
    disputed: Collection[int],
) -> NDArray[np.bool_]:
    """Return the prototypes (m,) of classes that may decide what all classes share, which disputed ones may not."""
    devices = np.bincount(np.concatenate([np.unique(part.every[0]) for part in parts]))[labels]
    return is_common(labels, np.where(np.isin(labels, list(disputed)), 0, devices), weights)
