"""How many of the images that a device states count. Pure.

The aggregator cannot verify how many images a device has. Of all images together a device counts at most a multiple of
the median device (`[robust]` max_multiple) and, among SHARED_BY devices or more, at most FLEET_SHARE of the fleet. Its
images of each class then count in proportion, and where the images of a class are added up, as in rounds and class
sums, at most `class_share` of the class. With the multiple 0 all images count.

`python -m research poisoned-statistics` measures what attackers and honest fleets lose by these limits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.moments import WHOLE
from aggregator.config.schema import MAX_MULTIPLE
from aggregator.intake.validation import Prototypes

FLEET_SHARE = 1 / 4
"""Share of all images that one device supplies at most."""

SHARED_BY = 5
"""Devices that a class, or a fleet, needs for shares of it to be limited."""

EQUAL_SHARES = 4
"""Equal shares of a class, each of one device, that one device supplies at most, within CLASS_SHARES."""

CLASS_SHARES = 1 / 4, 2 / 5
"""Least and greatest limit of the share of a class that one device supplies."""

SHOWN_LIMITS = 10
"""Limits that are described, of those that cost the most images."""

MIN_DEVICES = 3
"""Devices with a class, or in a fleet, that a median needs to outweigh one of them."""


def limited(parts: Sequence[Prototypes], *, multiple: float = MAX_MULTIPLE) -> list[Prototypes]:
    """Return one part per device whose prototypes state at most the device's images of their class that count."""
    return [
        replace(part, counts=np.minimum(part.counts, np.maximum(row.astype(np.int64), 1)[part.labels]))
        for part, row in zip(parts, counted_images(stated_images(parts), multiple=multiple), strict=True)
    ]


def prototype_weights(
    parts: Sequence[Prototypes], *, multiple: float = MAX_MULTIPLE
) -> list[NDArray[np.float64]]:
    """Return the weights of each part's prototypes (m,), alike within a part and 1 on average over all parts.

    They limit a device's images of all classes together. How much a device moves a class is limited by the distance of
    its mean (`limited_means`). Weights for each class would leave few prototypes that count, where
    one device has most images of a class.
    """
    factors = device_factors(parts, multiple=multiple)
    mean = float(np.repeat(factors, [len(part.labels) for part in parts]).mean())
    return [np.full(len(part.labels), factor / mean) for part, factor in zip(parts, factors, strict=True)]


def device_factors(parts: Sequence[Prototypes], *, multiple: float = MAX_MULTIPLE) -> NDArray[np.float64]:
    """Return how much each image of each device counts (K,), at most 1."""
    images = stated_images(parts)
    factors: NDArray[np.float64] = counted_totals(images, multiple=multiple) / np.maximum(
        images.sum(axis=1), 1
    )
    return factors


def counted_totals(images: NDArray[np.number], *, multiple: float = MAX_MULTIPLE) -> NDArray[np.float64]:
    """Return how many images of each device (K,) count of those that it states (K, C), of all classes together.

    Laws: the order of devices does not matter; what a device states beyond the limit changes nothing.
    """
    totals: NDArray[np.float64] = images.sum(axis=1).astype(np.float64)
    if not multiple:
        return totals
    return within_share(np.minimum(totals, median_limit(totals, multiple)), FLEET_SHARE)


def counted_images(images: NDArray[np.number], *, multiple: float = MAX_MULTIPLE) -> NDArray[np.float64]:
    """Return how many images of each device and class (K, C) count of those stated (K, C), in the sum of a class."""
    if not multiple:
        return images.astype(np.float64)
    factors = counted_totals(images, multiple=multiple) / np.maximum(images.sum(axis=1), 1)
    counted: NDArray[np.float64] = images * factors[:, None]
    for label, devices in enumerate(np.count_nonzero(images, axis=0).tolist()):
        counted[:, label] = within_share(counted[:, label], class_share(devices))
    return counted


def counted_scatter(images: NDArray[np.number], *, multiple: float = MAX_MULTIPLE) -> NDArray[np.float64]:
    """Return how many images of each device (K,) count in the scatter, which all classes share, of those stated (K, C).

    They are those that count in the sums of classes, within FLEET_SHARE of the fleet's.
    """
    counted: NDArray[np.float64] = counted_images(images, multiple=multiple).sum(axis=1)
    return within_share(counted, FLEET_SHARE) if multiple else counted


@dataclass(frozen=True)
class Counting:
    """How many images a head is made of.

    Attributes:
        images: those that its devices state.
        counted: those that count.
        limited: a device and a description for each limit that applied, the most costly first.
    """

    images: int
    counted: int
    limited: tuple[tuple[str, str], ...] = ()


def counting(
    images: Mapping[str, NDArray[np.number]],
    classes: Sequence[str],
    *,
    multiple: float,
    of_classes: NDArray[np.float64] | None = None,
) -> Counting:
    """Return how many images count of those that each device states (C,).

    `of_classes` are those that count in the sum of each class (K, C), at most `counted_images`; None if classes have no
    sums.
    """
    stated = np.array(list(images.values()), np.float64).reshape(len(images), -1)
    totals, of_devices = counted_totals(stated, multiple=multiple), stated.sum(axis=1)
    lost: list[tuple[float, str, str]] = []

    def limit(device: str, counted: float, given: float, of: str, rule: str) -> None:
        if round(counted) < given:
            lost.append(
                (counted - given, device, f"counts as {counted:.0f} of {given:.0f} images{of} ({rule})")
            )

    median = f"{multiple:g} times the median device's"
    for device, counted, given in zip(images, totals, of_devices, strict=True):
        is_median = np.isclose(counted, median_limit(of_devices, multiple))
        limit(device, counted, given, "", median if is_median else f"{FLEET_SHARE:.0%} of the fleet's")
    final = totals.sum()
    if of_classes is not None:
        within = stated * (totals / np.maximum(of_devices, 1))[:, None]
        shares = counted_images(stated, multiple=multiple)
        final = of_classes.sum()
        rounding = 0.5 + stated / WHOLE
        for row, label in zip(*np.nonzero(of_classes < within - rounding), strict=True):
            is_far = of_classes[row, label] < shares[row, label] - rounding[row, label]
            share = class_share(int(np.count_nonzero(stated[:, label])))
            rule = "far from the other devices' mean" if is_far else f"{share:.0%} of the class"
            of = f" of class {classes[label]!r}"
            limit(list(images)[row], of_classes[row, label], stated[row, label], of, rule)
    described = [(device, text) for _, device, text in sorted(lost)]
    more = [("", f"{len(described) - SHOWN_LIMITS} more limits")] if len(described) > SHOWN_LIMITS else []
    return Counting(int(of_devices.sum()), round(float(final)), (*described[:SHOWN_LIMITS], *more))


def class_share(devices: int) -> float:
    """Return the share of a class on so many devices that one of them supplies at most."""
    least, most = CLASS_SHARES
    return min(max(EQUAL_SHARES / max(devices, 1), least), most)


def stated_images(parts: Sequence[Prototypes], classes: int = 0) -> NDArray[np.float64]:
    """Return the images of each device and class (K, C); with so many classes, at least."""
    stated = [part.every for part in parts]
    classes = max(classes, *(1 + int(labels.max(initial=-1)) for labels, _ in stated))
    return np.array([np.bincount(labels, counts, minlength=classes) for labels, counts in stated], np.float64)


def within_share(images: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Return the images (K,), of one class or of all, of which no device has more than a share of what is returned.

    Fewer than SHARED_BY devices keep all.
    """
    if np.count_nonzero(images) < SHARED_BY:
        return images
    descending = np.sort(images)[::-1]
    # With the first few at the level, it is the share of all; the last one applies always.
    levels = [float(descending[above:].sum()) / (1 / share - above) for above in range(math.ceil(1 / share))]
    level = next(each for each, most in zip(levels, descending, strict=False) if most <= each)
    return np.minimum(images, level)


def median_limit(values: NDArray[np.number], multiple: float) -> float:
    """Return a multiple of the lower median of all devices' values (K,), without zeros; infinity for few devices."""
    present = np.sort(values[values > 0])
    if len(present) < MIN_DEVICES:
        return np.inf
    return multiple * float(present[(len(present) - 1) // 2])
