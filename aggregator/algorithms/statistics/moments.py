"""Sums of mapped features over devices: counts, class sums and second moments, in integers and therefore exact."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.feature_map import FeatureMap
from protocol.errors import ProtofleetError
from protocol.statistics.integer_rows import triangle_size
from protocol.statistics.row_sums import RowSums
from protocol.statistics.second_moment import from_triangle

ROUNDING = 1e-10
"""Negative eigenvalue of a scatter, relative to the sum of all squares, that rounding explains."""

WHOLE = 2**16
"""The factor of a device that counts fully: factors are integers, so that sums stay exact up to 8e9 images."""


@dataclass(frozen=True)
class Moments:
    """The sums that a ridge regression needs of rows (n, D), each of one class and with a weight, its images.

    A device has one factor in the sums of the scatter and one for each class in the sums of the class means: where its
    images of a class are limited, its scatter stays. The scatter of rows with such factors is never negative.

    Attributes:
        rows: how many rows there are.
        counts: int64 (C,), the images of each class in the scatter: the sum of the weights.
        sums: int64 (C, D), the sum of the weighted rows of each class in the scatter.
        second_moment: int64 (D (D + 1) / 2,), the upper triangle, by rows, of the sum of w r r' over all rows r.
        class_counts: int64 (C,), the images of each class in its mean.
        class_sums: int64 (C, D), the sum of the weighted rows of each class in its mean.
    """

    rows: int
    counts: NDArray[np.int64]
    sums: NDArray[np.int64]
    second_moment: NDArray[np.int64]
    class_counts: NDArray[np.int64]
    class_sums: NDArray[np.int64]

    @property
    def size(self) -> int:
        """D, the length of a row."""
        return int(self.sums.shape[1])


def no_rows(*, num_classes: int, size: int) -> Moments:
    """Return the moments of no rows of a length."""
    counts, sums = np.zeros(num_classes, np.int64), np.zeros((num_classes, size), np.int64)
    return Moments(0, counts, sums, np.zeros(triangle_size(size), np.int64), counts, sums.copy())


def add(
    total: Moments, part: Moments, *, factor: int = 1, class_factors: NDArray[np.int64] | None = None
) -> Moments:
    """Return the total with a part of the same shape added; its large arrays are reused.

    The part counts `factor` times in the scatter, and in each class's mean as often as `class_factors` (C,), or
    `factor`.

    Laws: the order does not matter, parts of a part add up to it, and a factor of -1 takes away what was added.
    """
    of_class = np.full(len(part.counts), factor) if class_factors is None else class_factors
    np.add(total.second_moment, factor * part.second_moment, out=total.second_moment)
    np.add(total.sums, factor * part.sums, out=total.sums)
    np.add(total.class_sums, of_class[:, None] * part.class_sums, out=total.class_sums)
    return dataclasses.replace(
        total,
        rows=total.rows + factor * part.rows,
        counts=total.counts + factor * part.counts,
        class_counts=total.class_counts + of_class * part.class_counts,
    )


def moments_of(
    rows: NDArray[np.integer], labels: NDArray[np.integer], weights: NDArray[np.integer], *, num_classes: int
) -> Moments:
    """Return the moments of rows (n, D), integers of at most 127, of classes (n,), with weights (n,) of at least 1."""
    sums = RowSums(rows.shape[1])
    for label in np.unique(labels):
        mine = labels == label
        sums.add(int(label), rows[mine], weights[mine])
    return of_all_classes(len(rows), *sums.result(), num_classes=num_classes)


def of_all_classes(
    rows: int,
    labels: NDArray[np.integer],
    counts: NDArray[np.integer],
    sums: NDArray[np.integer],
    second_moment: NDArray[np.int64],
    *,
    num_classes: int,
) -> Moments:
    """Return the moments of rows in p of the C classes: their labels (p,), counts (p,) and sums (p, D)."""
    every_count = np.zeros(num_classes, np.int64)
    every_sum = np.zeros((num_classes, sums.shape[1]), np.int64)
    every_count[labels], every_sum[labels] = counts, sums
    return Moments(rows, every_count, every_sum, second_moment, every_count, every_sum)


def within_scatter(total: Moments) -> NDArray[np.float64]:
    """Return the sum of the squared deviations of the rows from their class's mean, (D, D)."""
    square = from_triangle(total.second_moment, total.size).astype(np.float64)
    means = total.sums / np.maximum(total.counts, 1)[:, None]
    square -= (means * total.counts[:, None]).T @ means
    return square


def require_image_lengths(part: Moments, feature_map: FeatureMap) -> None:
    """Raise ProtofleetError if rows are longer than the map makes those of images, in the mean of a class or of all.

    Sums of longer ones would decide the scatter of the fleet.
    """
    images = np.maximum(part.counts, 1)
    for block, longest in feature_map.longest:
        of_classes = np.linalg.norm(part.sums[:, block].astype(np.float64), axis=1) / images
        mean_square = float(_diagonal(part)[block].sum()) / max(1, int(part.counts.sum()))
        length = max(float(of_classes.max()), math.sqrt(max(0.0, mean_square)))
        if length > longest:
            raise ProtofleetError(
                f"no images have such sums: expected rows no longer than {longest:.0f}, got {length:.0f}"
            )


def require_possible(part: Moments) -> None:
    """Raise ProtofleetError if the scatter within classes is negative in a direction: that of no rows is.

    Such moments would cancel the scatter of other devices.
    """
    scatter = within_scatter(part)
    allowed = ROUNDING * squares_of(part)
    scatter.flat[:: part.size + 1] += allowed or 1.0
    try:
        np.linalg.cholesky(scatter)
    except np.linalg.LinAlgError as error:
        raise ProtofleetError("no images have such sums: a scatter within classes is negative") from error


def squares_of(part: Moments) -> float:
    """Return the sum of the squares of all values."""
    return float(_diagonal(part).sum())


def _diagonal(part: Moments) -> NDArray[np.int64]:
    """Return the sum of the squares of each value (D,)."""
    rows = np.arange(part.size)
    diagonal: NDArray[np.int64] = part.second_moment[rows * part.size - rows * (rows - 1) // 2]
    return diagonal


def class_means(total: Moments) -> NDArray[np.float64]:
    """Return the mean row of each class (C, D); zeros for a class without images."""
    return total.class_sums / np.maximum(total.class_counts, 1)[:, None]


def factors(stated: NDArray[np.int64], counted: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many parts of WHOLE count, of any shape, given the images that are stated, and those that count."""
    return (WHOLE * np.minimum(counted / np.maximum(stated, 1), 1.0)).astype(np.int64)
