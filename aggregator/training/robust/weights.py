"""How much each device counts: no more than a multiple of the median device. Pure.

A device states how many images it has, and the aggregator cannot verify it. So a device's images count up to a
multiple of those of the median device (`[robust]` max_multiple), and where a class's images are added up, as in rounds
and sums, of a class up to as many times those of the median device that has the class. Of a class, or a fleet, of
SHARED_BY devices none counts more than one part of PARTS: outlier detection finds little among so few devices, of which
one would otherwise have more than half. The rest of them does not count. With the multiple 0 all images count.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aggregator.config.schema import MAX_MULTIPLE
from aggregator.ingest.validation import Prototypes

PARTS = 4
"""Parts of a class, or of all images, of which a device counts at most one."""

SHARED_BY = 5
"""Devices that a class, or a fleet, needs for that."""

MIN_DEVICES = 3
"""Devices with a class, or in a fleet, that a median needs to outweigh one of them."""


def limited(parts: Sequence[Prototypes], *, multiple: float = MAX_MULTIPLE) -> list[Prototypes]:
    """Return one part per device whose prototypes state at most the device's images of their class that count."""
    return [
        replace(part, counts=np.minimum(part.counts, np.maximum(row.astype(np.int64), 1)[part.labels]))
        for part, row in zip(parts, counted_images(_images(parts), multiple=multiple), strict=True)
    ]


def prototype_weights(
    parts: Sequence[Prototypes], *, multiple: float = MAX_MULTIPLE
) -> list[NDArray[np.float64]]:
    """Return the weights of each part's prototypes (m,), alike within a part and 1 on average over all parts.

    They limit a device's images of all classes together. How much a device moves a class is limited by the distance of
    its mean (`limited_means`). Weights for each class would leave few prototypes that count, where
    one device has most images of a class.
    """
    totals = _images(parts).sum(axis=1)
    counted = _limited(totals, multiple) if multiple else totals
    factors = counted / np.maximum(totals, 1)
    mean = float(np.repeat(factors, [len(part.labels) for part in parts]).mean())
    return [np.full(len(part.labels), factor / mean) for part, factor in zip(parts, factors, strict=True)]


def counted_images(images: NDArray[np.number], *, multiple: float = MAX_MULTIPLE) -> NDArray[np.float64]:
    """Return the images of each device and class (K, C) that count, of those stated (K, C).

    Laws: the order of devices does not matter; what a device states beyond the limit changes nothing.
    """
    if not multiple:
        return images.astype(np.float64)
    columns = _within_totals(images, multiple).T
    return np.array([_limited(column, multiple) for column in columns]).reshape(columns.shape).T


def counted_totals(images: NDArray[np.number], *, multiple: float = MAX_MULTIPLE) -> NDArray[np.float64]:
    """Return the images of each device (K,) that count, of those stated (K, C), where one number is for all classes.

    What devices have in common, such as the scatter within classes, is limited like a class that all of them have.
    """
    counted = counted_images(images, multiple=multiple).sum(axis=1)
    return _limited(counted, multiple) if multiple else counted


def _images(parts: Sequence[Prototypes]) -> NDArray[np.float64]:
    """Return the images of each device and class (K, C)."""
    classes = 1 + max(int(part.labels.max(initial=-1)) for part in parts)
    return np.array([np.bincount(part.labels, part.counts, minlength=classes) for part in parts], np.float64)


def _within_totals(images: NDArray[np.number], multiple: float) -> NDArray[np.float64]:
    """Return the images (K, C) without those beyond the limit of a device; its largest classes lose them."""
    most = median_limit(images.sum(axis=1), multiple)
    return np.array([np.minimum(row, _level(row.astype(np.float64), most)) for row in images], np.float64)


def _limited(images: NDArray[np.float64], multiple: float) -> NDArray[np.float64]:
    """Return the images (K,), of one class or of all, that count."""
    limited = np.minimum(images, median_limit(images, multiple))
    if np.count_nonzero(limited) < SHARED_BY:
        return limited
    descending = np.sort(limited)[::-1]
    # With the first few at the level, it is one part of all; the last one applies always.
    levels = [float(descending[above:].sum()) / (PARTS - above) for above in range(PARTS)]
    level = next(each for each, most in zip(levels, descending, strict=False) if most <= each)
    return np.minimum(limited, level)


def median_limit(values: NDArray[np.number], multiple: float) -> float:
    """Return a multiple of the lower median of all devices' values (K,), without zeros; infinity for few devices."""
    present = np.sort(values[values > 0])
    if len(present) < MIN_DEVICES:
        return np.inf
    return multiple * float(present[(len(present) - 1) // 2])


def _level(images: NDArray[np.float64], most: float) -> float:
    """Return the limit for each class (C,) at which the classes together have so many images, if they have more."""
    if images.sum() <= most:
        return np.inf
    ascending = np.sort(images)
    levels = (most - (np.cumsum(ascending) - ascending)) / np.arange(len(images), 0, -1)
    return float(levels[np.argmax(levels <= ascending)])
