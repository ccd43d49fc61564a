"""Sums of mapped features over devices: counts, class sums and second moments, in integers and therefore exact."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
"""Rows that are multiplied at once."""

WHOLE = 256
"""The factor of a device that counts fully: factors are integers, so that sums stay exact."""


@dataclass(frozen=True)
class Moments:
    """What a ridge regression needs of rows (n, D), each of one class and with a weight, its number of images.

    Attributes:
        rows: how many rows there are.
        counts: int64 (C,), the images of each class: the sum of the weights.
        sums: int64 (C, D), the sum of the weighted rows of each class.
        second_moment: int64 (D (D + 1) / 2,), the upper triangle, by rows, of the sum of w r r' over all rows r.
    """

    rows: int
    counts: NDArray[np.int64]
    sums: NDArray[np.int64]
    second_moment: NDArray[np.int64]

    @property
    def size(self) -> int:
        """D, the length of a row."""
        return self.sums.shape[1]


def no_rows(*, num_classes: int, size: int) -> Moments:
    """Return the moments of no rows of a length."""
    return Moments(
        0,
        np.zeros(num_classes, np.int64),
        np.zeros((num_classes, size), np.int64),
        np.zeros(size * (size + 1) // 2, np.int64),
    )


def add(total: Moments, part: Moments, *, factor: int = 1) -> Moments:
    """Return the total with a part of the same shape added, `factor` times; its large arrays are reused.

    Laws: the order does not matter, parts of a part add up to it, and a factor of -1 takes away what was added.
    """
    np.add(total.second_moment, factor * part.second_moment, out=total.second_moment)
    np.add(total.sums, factor * part.sums, out=total.sums)
    return Moments(
        total.rows + factor * part.rows,
        total.counts + factor * part.counts,
        total.sums,
        total.second_moment,
    )


def moments_of(
    rows: NDArray[np.integer], labels: NDArray[np.integer], weights: NDArray[np.integer], *, num_classes: int
) -> Moments:
    """Return the moments of rows (n, D), integers of at most 127, of classes (n,), with weights (n,) of at least 1."""
    size = rows.shape[1]
    total = no_rows(num_classes=num_classes, size=size)
    np.add.at(total.counts, labels, weights.astype(np.int64))
    square = np.zeros((size, size))
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        block = rows[part].astype(np.float64)
        weighted = block * weights[part, None]
        # Integers of which float64 adds 2^53 exactly.
        square += weighted.T @ block
        np.add.at(total.sums, labels[part], weighted.astype(np.int64))
    total.second_moment[:] = square[np.triu_indices(size)]
    return Moments(len(rows), total.counts, total.sums, total.second_moment)


def within_scatter(total: Moments) -> NDArray[np.float64]:
    """Return the sum of the squared deviations of the rows from their class's mean, (D, D)."""
    size = total.size
    square = np.zeros((size, size))
    square[np.triu_indices(size)] = total.second_moment
    square += np.triu(square, 1).T
    means = class_means(total)
    square -= (means * total.counts[:, None]).T @ means
    return square


def class_means(total: Moments) -> NDArray[np.float64]:
    """Return the mean row of each class (C, D); zeros for a class without images."""
    return total.sums / np.maximum(total.counts, 1)[:, None]


def factors(stated: Sequence[int], counted: Sequence[float]) -> list[int]:
    """Return how many 256ths of each device's moments count, given its images, and those of them that count."""
    return [
        int(WHOLE * min(1.0, number / images)) if images else 0
        for images, number in zip(stated, counted, strict=True)
    ]
