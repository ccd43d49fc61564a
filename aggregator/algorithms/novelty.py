"""The novelty of an image: 1 minus the greatest cosine of its features to a class mean. Pure.

A Mahalanobis distance is no better on real images, and worse with few images of a class (docs/adr/0070-novelty.md).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.head import MIN_LENGTH
from aggregator.algorithms.fedtc.training_set import TrainingSet
from protocol.wire.messages import CONFIDENCE_BINS

FALSE_ALARMS = 0.01
"""Share of the images of known classes that may exceed the threshold."""


@dataclass(frozen=True)
class ClassDirections:
    """The directions that an image of a known class may have.

    Attributes:
        units: float32 (K, L), the mean of each class with images, times the factors, of unit length.
        factors: float32 (L,), which bring the features of several backbones to one scale; None for one backbone.
    """

    units: NDArray[np.float32]
    factors: NDArray[np.float32] | None = None

    def novelty(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the novelty (n,), from 0 to 2, of rows (n, L)."""
        if self.factors is not None:
            rows = rows * self.factors
        lengths = np.maximum(np.linalg.norm(rows, axis=1), MIN_LENGTH)
        return np.asarray(1 - (rows @ self.units.T).max(axis=1) / lengths, np.float32)


def class_directions(
    means: NDArray[np.floating], factors: NDArray[np.float32] | None = None
) -> ClassDirections:
    """Return the directions of the means (K, L) of the classes that have images."""
    scaled = means.astype(np.float64) * (1 if factors is None else factors)
    units = scaled / np.maximum(np.linalg.norm(scaled, axis=1, keepdims=True), MIN_LENGTH)
    return ClassDirections(units.astype(np.float32), factors)


def directions_of(data: TrainingSet) -> ClassDirections:
    """Return the directions of the classes that have prototypes."""
    scales = data.factors() if len(data.widths) > 1 else None
    return class_directions(data.centers[np.unique(data.labels)], scales)


def novelty_threshold(images: NDArray[np.float64]) -> float:
    """Return the novelty above which an image is of no known class, from held-out images in each bin, not all zero.

    Of further images of the known classes, at most FALSE_ALARMS are above it on average, or one of n + 1 with n < 99
    images (Vovk, Gammerman and Shafer, "Algorithmic learning in a random world", 2005), if novelty is spread evenly
    within a bin. `images` is (CONFIDENCE_BINS,); fractions are allowed.
    """
    allowed = max(FALSE_ALARMS * (images.sum() + 1) - 1, 0.0)
    above = np.cumsum(images[::-1])[::-1]
    highest = int(np.flatnonzero(above > allowed)[-1])
    share = (allowed - (above[highest] - images[highest])) / images[highest]
    return float((highest + 1 - share) / CONFIDENCE_BINS)
