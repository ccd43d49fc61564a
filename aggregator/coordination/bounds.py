"""How much one device may count, the same for all algorithms. Pure.

A device states how many images it has and uploads any values: the aggregator can verify neither. Where devices' amounts
are added up, one counts at most a multiple of the median device (`median_limits`) and at most a share of all
(`within_share`). Lengths and distances are brought to limits of the same kind (`limiting_factors`).

`python -m research poisoned-statistics` measures what attackers and honest fleets lose by these limits.
"""

import math

import numpy as np
from numpy.typing import NDArray

from aggregator.coordination.minimums import MEDIAN_DEVICES

COMPARED_DEVICES = 5
"""Devices, in a fleet or of a class, from which one is judged by the others: its share is limited, outliers are found,
and the class may decide what all classes share. Of four devices, two that agree are half."""

MAX_MULTIPLE = 3.0
"""Times the median device's images that a device counts at most, unless the task file has another `max_multiple`.

With 5, two attackers of 20 cost CIFAR-10 4.4 points more; with 10, one attacker of 20 has a third of each class. With
less, honest fleets lose more: their devices differ (ADR 0028).
"""

EQUAL_MULTIPLE = 1.0
"""The same where no other limit follows: the means of `hierarchical`, from which all devices' heads are made directly,
and changes of parameters, whose length and images multiply."""

CLIP_MULTIPLE = 3.0
"""Times the median device's length, or distance from the others, of a prototype in a round, unless the task file has
another `clip_multiple`: honest devices are hardly ever beyond it, and none comes near to another class."""

MEAN_DISTANCE = 1.0
"""Times the expected distance of a device's mean from the others' to which a mean that is farther is moved."""

SUM_DISTANCE = 1.5
"""Times the expected distance beyond which class sums count in part, as integers cannot be moved. Of honest devices in
like places none is there (at most 1.2): their head does not depend on which of them has an image."""

FLEET_SHARE = 1 / 4
"""Share of all images that one device supplies at most, a third of what the others do: of five devices, an equal share
is a fifth."""

EQUAL_SHARES = 4
"""Equal shares of a class, each of one device, that one device supplies at most, within CLASS_SHARES: devices differ
more by class than in all."""

CLASS_SHARES = FLEET_SHARE, 2 / 5
"""Least and greatest limit of the share of a class that one device supplies: below half, it never outweighs the others
together."""

MIN_COMMON_SHARE = 1 / 3
"""Share of all amounts that classes on COMPARED_DEVICES devices need to decide what all classes share: few images would
show it badly."""


def median_limits(
    amounts: NDArray[np.number],
    multiple: float,
    *,
    sets: NDArray[np.integer] | None = None,
    fewest: int = MEDIAN_DEVICES,
) -> NDArray[np.float64]:
    """Return the limit of each amount (n,): a multiple of the lower median of its set (n,), without zeros.

    Devices' amounts differ by orders of magnitude: between the middle two of an even number, the greater would decide.
    In a set of fewer than `fewest`, it is infinity. All amounts are one set if `sets` is None.
    """
    limits, present = np.full(len(amounts), np.inf), np.flatnonzero(amounts > 0)
    positive = amounts[present]
    groups = np.zeros_like(present) if sets is None else sets[present]
    _, rows, members = np.unique(groups, return_inverse=True, return_counts=True)
    middle = np.cumsum(members) - members + (members - 1) // 2
    medians = positive[np.lexsort((positive, rows))][middle]
    limits[present] = np.where(members < fewest, np.inf, multiple * medians)[rows]
    return limits


def limiting_factors(
    amounts: NDArray[np.float64], limits: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """Return what brings amounts, lengths or distances (n,) to at most their limits, at most 1."""
    factors: NDArray[np.float64] = np.minimum(1.0, limits / np.where(amounts > 0, amounts, 1.0))
    return factors


def within_share(images: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Return the images (K,), of one class or of all, of which no device has more than a share of what is returned.

    Fewer than COMPARED_DEVICES devices keep all.
    """
    if np.count_nonzero(images) < COMPARED_DEVICES:
        return images
    descending = np.sort(images)[::-1]
    # With the first few at the level, it is the share of all; the last one applies always.
    levels = [float(descending[above:].sum()) / (1 / share - above) for above in range(math.ceil(1 / share))]
    level = next(each for each, most in zip(levels, descending, strict=False) if most <= each)
    return np.minimum(images, level)


def class_share(devices: int) -> float:
    """Return the share of a class on so many devices that one of them supplies at most."""
    least, most = CLASS_SHARES
    return min(max(EQUAL_SHARES / max(devices, 1), least), most)


def counted_totals(images: NDArray[np.number], *, multiple: float = MAX_MULTIPLE) -> NDArray[np.float64]:
    """Return how many images of each device (K,) count of those that it states (K, C), of all classes together.

    With the multiple 0, here and below, all count.

    Laws: the order of devices does not matter; what a device states beyond the limit changes nothing.
    """
    totals: NDArray[np.float64] = images.sum(axis=1).astype(np.float64)
    if not multiple:
        return totals
    return within_share(np.minimum(totals, median_limits(totals, multiple)), FLEET_SHARE)


def device_factors(images: NDArray[np.number], *, multiple: float = MAX_MULTIPLE) -> NDArray[np.float64]:
    """Return how much each image of each device counts (K,), at most 1, given those that it states (K, C)."""
    factors: NDArray[np.float64] = counted_totals(images, multiple=multiple) / np.maximum(
        images.sum(axis=1), 1
    )
    return factors


def counted_images(images: NDArray[np.number], *, multiple: float = MAX_MULTIPLE) -> NDArray[np.float64]:
    """Return how many images of each device and class (K, C) count of those stated (K, C), in the sum of a class.

    A device's images of each class count in proportion, within its share of the class.
    """
    if not multiple:
        return images.astype(np.float64)
    counted = images.astype(np.float64) * device_factors(images, multiple=multiple)[:, None]
    for label, devices in enumerate(np.count_nonzero(images, axis=0).tolist()):
        counted[:, label] = within_share(counted[:, label], class_share(devices))
    return counted


def counted_scatter(images: NDArray[np.number], *, multiple: float = MAX_MULTIPLE) -> NDArray[np.float64]:
    """Return how many images of each device (K,) count in the scatter, which all classes share, of those stated (K, C).

    They are those that count in the sums of classes, within FLEET_SHARE of the fleet's.
    """
    counted: NDArray[np.float64] = counted_images(images, multiple=multiple).sum(axis=1)
    return within_share(counted, FLEET_SHARE) if multiple else counted


def is_common(
    labels: NDArray[np.integer], devices: NDArray[np.integer], amounts: NDArray[np.floating]
) -> NDArray[np.bool_]:
    """Return the rows (m,) of classes on COMPARED_DEVICES devices, which may decide what all classes share.

    Outlier detection compares these classes. Of others, a single device could decide. All may if one class is left, or
    less than MIN_COMMON_SHARE of the amounts.

    Args:
        labels: (m,), the class of each row.
        devices: (m,), on which each row's class is.
        amounts: (m,), what each row counts.
    """
    common = devices >= COMPARED_DEVICES
    enough = amounts[common].sum() >= MIN_COMMON_SHARE * amounts.sum() and len(np.unique(labels[common])) > 1
    return common if enough else np.ones_like(common)
