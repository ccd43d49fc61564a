"""How much each device counts: no more than a multiple of the median device. Pure, and the same for all algorithms.

A device states how many images it has, and the aggregator cannot verify it. So a device's images of a class count up to
MAX_MULTIPLE times those of the median device that has the class, and its images of all classes up to MAX_MULTIPLE times
those of the median device. The rest of them does not count.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aggregator.ingest.validation import Prototypes

MAX_MULTIPLE = 10.0
"""Times the images of the median device that a device's images count at most."""

MIN_DEVICES = 3
"""Devices with a class, or in a fleet, that a median needs to outweigh one of them."""


def limited(parts: Sequence[Prototypes]) -> list[Prototypes]:
    """Return one part per device without the images that do not count.

    Of a class with more images than count, the first prototypes stay, at least one; a single one counts fewer images.
    """
    classes = 1 + max(int(part.labels.max(initial=-1)) for part in parts)
    images = np.array([np.bincount(part.labels, part.counts, minlength=classes) for part in parts])
    counted = counted_images(images)
    return [
        part if (row == stated).all() else _limited(part, row)
        for part, row, stated in zip(parts, counted, images, strict=True)
    ]


def counted_images(images: NDArray[np.number]) -> NDArray[np.float64]:
    """Return the images of each device and class (K, C) that count, of those stated (K, C).

    Laws: the order of devices does not matter; what counts of the others does not grow with what one device states
    beyond the median.
    """
    counted = np.array([np.minimum(column, _limit(column)) for column in images.T], dtype=np.float64).T
    most = _limit(counted.sum(axis=1))
    return np.array([np.minimum(row, _level(row, most)) for row in counted]).reshape(counted.shape)


def _limit(images: NDArray[np.number]) -> float:
    """Return how many images of a device count, by those of all devices (K,)."""
    present = np.sort(images[images > 0])
    if len(present) < MIN_DEVICES:
        return np.inf
    return MAX_MULTIPLE * float(present[(len(present) - 1) // 2])


def _level(images: NDArray[np.float64], most: float) -> float:
    """Return the limit for each class (C,) at which the classes together have so many images, if they have more."""
    if images.sum() <= most:
        return np.inf
    ascending = np.sort(images)
    levels = (most - (np.cumsum(ascending) - ascending)) / np.arange(len(images), 0, -1)
    return float(levels[np.argmax(levels <= ascending)])


def _limited(part: Prototypes, counted: NDArray[np.float64]) -> Prototypes:
    included, counts = np.ones(len(part.labels), dtype=np.bool_), part.counts.copy()
    for label in np.unique(part.labels):
        members = np.flatnonzero(part.labels == label)
        included[members] = np.cumsum(part.counts[members]) <= counted[label]
        included[members[0]] = True
        counts[members[0]] = min(counts[members[0]], max(int(counted[label]), 1))
    return Prototypes(part.values[included], part.labels[included], counts[included], part.tensors)
