"""Counts, class sums and second moment of integer rows, added up exactly."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.statistics.second_moment import EXACT_ROWS, add_products, to_triangle


class RowSums:
    """Counts, class sums and second moment of rows (n, D) that are added piece by piece.

    Laws: any order of the rows and any division into pieces gives the same integers, and so does the sum over devices
    however the rows are divided over them; a row of weight w is w rows. Memory grows with D**2 and the classes, not
    with the rows.
    """

    def __init__(self, size: int) -> None:
        self._matrix = np.zeros((size, size), np.int64)
        self._counts: dict[int, int] = {}
        self._sums: dict[int, NDArray[np.int64]] = {}
        self._pending: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def add(self, label: int, rows: NDArray[Any], weights: NDArray[Any] | None = None) -> None:
        """Add rows (n, D) of a class, integers from -127 to 127, with weights (n,) of at least 1; None for ones."""
        if not len(rows):
            return
        weights = np.ones(len(rows), np.int64) if weights is None else weights.astype(np.int64)
        self._counts[label] = self._counts.get(label, 0) + int(weights.sum())
        self._sums[label] = weights @ rows + self._sums.get(label, 0)
        self._pending.append((rows, weights))
        if sum(len(rows) for rows, _ in self._pending) >= EXACT_ROWS:
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
            rows, weights = (np.concatenate(arrays) for arrays in zip(*self._pending, strict=True))
            add_products(self._matrix, rows, weights if (weights != 1).any() else None)
            self._pending = []
