"""Arrays that may be in files, of which the operating system keeps in memory what fits, and loops over their rows."""

import math
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from protocol.errors import ProtofleetError

IN_MEMORY_BYTES = 128 * 2**20
"""Size up to which an array stays in memory."""

BLOCK_ROWS = 4096
"""Rows that are computed with at once: what a computation adds to memory does not depend on the number of rows."""


def blocks(rows: int) -> Iterator[slice]:
    """Yield slices of BLOCK_ROWS rows that together are all of them."""
    for start in range(0, rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, rows))


def is_in_file(array: NDArray[Any]) -> bool:
    return isinstance(array.base, np.memmap | mmap.mmap)


class Arrays:
    """Makes arrays: in memory, or, beyond IN_MEMORY_BYTES, in unnamed files of a folder that end with the arrays.

    What is computed has the same bits in either place. Without a folder, all arrays are in memory.
    """

    def __init__(self, folder: Path | None = None, *, in_memory_bytes: int | None = None) -> None:
        self._folder = folder
        self._limit = IN_MEMORY_BYTES if in_memory_bytes is None else in_memory_bytes
        self._kept_bytes = 0
        self._chunk = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an array whose values are not set.

        Raises:
            ProtofleetError: the folder has no room for it, or cannot be written.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if self._folder is None or size <= self._limit:
            return np.empty(shape, dtype)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # Without room for it now, a later write into the array would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
                return np.memmap(file, dtype, mode="r+", shape=shape).view(np.ndarray)
        except OSError as error:
            raise ProtofleetError(
                f"a training needs {size / 1e9:.1f} GB in {self._folder}: {error.strerror or error}"
            ) from error

    def keep(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return equal values; those after the first IN_MEMORY_BYTES that are kept are in files.

        Raises:
            ProtofleetError: as `empty`.
        """
        self._kept_bytes += values.nbytes
        if self._folder is None or self._kept_bytes <= self._limit:
            return values
        if len(self._chunk) < values.nbytes:
            # As large as all before: the number of open files is that of doublings.
            self._chunk = self.empty((max(self._kept_bytes, self._limit + 1),), np.uint8)
        part, self._chunk = np.split(self._chunk, [values.nbytes])
        stored = part.view(np.float32).reshape(values.shape)
        stored[...] = values
        return stored

    def rows(self, values: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
        """Return some rows of an array, by their numbers or by a mask, as `values[rows]`."""
        numbers = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        chosen = self.empty((len(numbers), *values.shape[1:]), values.dtype)
        for block in blocks(len(numbers)):
            chosen[block] = values[numbers[block]]
        return chosen
