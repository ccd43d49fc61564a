"""How many of the images that devices state count, in prototypes and in a head's report. Pure.

Of all images together a device counts within the limits of `bounds`. Its images of each class then count in proportion,
and where the images of a class are added up, as in rounds and class sums, within its share of the class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.moments import WHOLE
from aggregator.coordination.bounds import (
    FLEET_SHARE,
    MAX_MULTIPLE,
    class_share,
    counted_images,
    counted_totals,
    device_factors,
    median_limits,
)
from aggregator.intake.validation import Prototypes

SHOWN_LIMITS = 10
"""Limits that are described, of those that cost the most images."""


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
    factors = device_factors(stated_images(parts), multiple=multiple)
    mean = float(np.repeat(factors, [len(part.labels) for part in parts]).mean())
    return [np.full(len(part.labels), factor / mean) for part, factor in zip(parts, factors, strict=True)]


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
    names, final = list(images), totals.sum()
    lost: list[tuple[float, str, str]] = []

    def limit(row: int, counted: float, before: float, of_class: str, rule: str) -> None:
        text = f"counts as {counted:.0f} of {before:.0f} images{of_class} ({rule})"
        lost.append((counted - before, names[row], text))

    is_median = np.isclose(totals, median_limits(of_devices, multiple))
    for row in np.flatnonzero(np.rint(totals) < of_devices).tolist():
        rule = (
            f"{multiple:g} times the median device's"
            if is_median[row]
            else f"{FLEET_SHARE:.0%} of the fleet's"
        )
        limit(row, totals[row], of_devices[row], "", rule)
    if of_classes is not None:
        within = stated * device_factors(stated, multiple=multiple)[:, None]
        shares = counted_images(stated, multiple=multiple)
        final = of_classes.sum()
        rounding = 0.5 + stated / WHOLE
        for row, label in zip(*np.nonzero(of_classes < within - rounding), strict=True):
            is_far = of_classes[row, label] < shares[row, label] - rounding[row, label]
            share = class_share(int(np.count_nonzero(stated[:, label])))
            rule = "far from the other devices' mean" if is_far else f"{share:.0%} of the class"
            limit(row, of_classes[row, label], stated[row, label], f" of class {classes[label]!r}", rule)
    described = [(device, text) for _, device, text in sorted(lost)]
    more = [("", f"{len(described) - SHOWN_LIMITS} more limits")] if len(described) > SHOWN_LIMITS else []
    return Counting(int(of_devices.sum()), round(float(final)), (*described[:SHOWN_LIMITS], *more))


def stated_images(parts: Sequence[Prototypes], classes: int = 0) -> NDArray[np.float64]:
    """Return the images of each device and class (K, C); with so many classes, at least."""
    stated = [part.every for part in parts]
    classes = max(classes, *(1 + int(labels.max(initial=-1)) for labels, _ in stated))
    return np.array([np.bincount(labels, counts, minlength=classes) for labels, counts in stated], np.float64)
