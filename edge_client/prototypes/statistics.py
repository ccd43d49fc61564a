"""Integer rows of mapped features: one for each image, or for each group of images. Pure."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from protocol.errors import GraphRefused
from protocol.statistics.integer_rows import MAX_VALUE


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
