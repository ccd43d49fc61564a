"""Statistics of integer rows: counts, class sums and second moment, or one row for each group of images. Pure."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from protocol.errors import GraphRefused
from protocol.statistics.second_moment import EXACT_ROWS, MAX_VALUE, add_products, to_triangle


class RowSums:
    """Counts, class sums and second moment of rows that are added piece by piece.

    Law: any order of the rows and any division into pieces gives the same integers, and so does the sum over devices
    however the rows are divided over them. Memory grows with D**2 and the classes, not with the rows.
    """

    def __init__(self, size: int) -> None:
        self._matrix = np.zeros((size, size), np.int64)
        self._counts: dict[int, int] = {}
        self._sums: dict[int, NDArray[np.int64]] = {}
        self._pending: list[NDArray[np.int8]] = []

    def add(self, label: int, rows: NDArray[np.int8]) -> None:
        """Add rows int8 (n, D) of a class."""
        if not len(rows):
            return
        self._counts[label] = self._counts.get(label, 0) + len(rows)
        self._sums[label] = rows.sum(axis=0, dtype=np.int64) + self._sums.get(label, 0)
        self._pending.append(rows)
        if sum(map(len, self._pending)) >= EXACT_ROWS:
            self._add_products()

    def result(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int32], NDArray[np.int64]]:
        """Return the p classes with rows in ascending order, their counts (p,), sums (p, D), and the triangle."""
        self._add_products()
        labels = sorted(self._counts)
        counts = np.array([self._counts[label] for label in labels], np.uint32)
        sums = np.array([self._sums[label] for label in labels], np.int32).reshape(-1, len(self._matrix))
        return np.array(labels, np.uint32), counts, sums, to_triangle(self._matrix)

    def _add_products(self) -> None:
        if self._pending:
            add_products(self._matrix, np.concatenate(self._pending))
            self._pending = []


def to_rows(projection: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return projections float32 (n, D) as int8; raises GraphRefused unless they are integers from -127 to 127."""
    rounded = np.rint(projection)
    if not (np.abs(projection) <= MAX_VALUE).all() or (rounded != projection).any():
        raise GraphRefused(
            f"expected integers from -{MAX_VALUE} to {MAX_VALUE} from the project graph, got others: the task's map "
            "of features cannot be used"
        )
    return rounded.astype(np.int8)


def group_rows(
    pieces: Iterable[NDArray[np.int8]], numbers: NDArray[np.intp], *, size: int
) -> tuple[NDArray[np.int8], NDArray[np.uint32]]:
    """Return one row for each group of a class's images, int8 (m, D), and the images in each, uint32 (m,).

    A group's row is m + sqrt(n) (g - m), rounded and clipped: g is the mean of its n rows, m that of the whole class.
    Taken n times each, these rows have the scatter of single images about the class's mean.

    Args:
        pieces: the rows of the class's images, int8 (any, D) each.
        numbers: the number of each image's group, (n,); every number from 0 to m - 1 is there.
        size: D.
    """
    counts = np.bincount(numbers)
    sums = np.zeros((len(counts), size), np.int64)
    start = 0
    for rows in pieces:
        np.add.at(sums, numbers[start : start + len(rows)], rows)
        start += len(rows)
    if not len(counts):
        return sums.astype(np.int8), counts.astype(np.uint32)
    mean = sums.sum(axis=0) / len(numbers)
    made = np.empty(sums.shape, np.int8)
    for number, (total, count) in enumerate(zip(sums, counts.tolist(), strict=True)):
        row = mean + math.sqrt(count) * (total / count - mean)
        made[number] = np.clip(np.rint(row), -MAX_VALUE, MAX_VALUE)
    return made, counts.astype(np.uint32)
