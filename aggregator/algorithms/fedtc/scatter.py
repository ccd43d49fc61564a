"""The scatter of features within the classes of devices that have principal prototypes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.arrays import blocks


@dataclass(frozen=True, eq=False)
class Scatter:
    """The scatter within the classes of each of K devices.

    That of a device is the sum of its rows' outer products and its diagonal, of as many images as its prototypes have.

    Attributes:
        rows: float32 (k, L), of all devices.
        devices: (k,), the device of each row, ascending.
        diagonals: float32 (K, L).
        in_means: (m,), how many images of each prototype count in the mean of its class.
    """

    rows: NDArray[np.float32]
    devices: NDArray[np.intp]
    diagonals: NDArray[np.float32]
    in_means: NDArray[np.float64]

    @property
    def size(self) -> int:
        """The number of values."""
        return self.rows.size + self.diagonals.size

    def of_device(self, device: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return a device's rows and its diagonal."""
        return self.rows[slice(*np.searchsorted(self.devices, (device, device + 1)))], self.diagonals[device]

    def squares(self) -> NDArray[np.float64]:
        """Return the diagonal of each device's scatter, (K, L)."""
        squares = self.diagonals.astype(np.float64)
        for block in blocks(len(self.rows)):
            np.add.at(squares, self.devices[block], self.rows[block].astype(np.float64) ** 2)
        return squares

    def traces(self) -> NDArray[np.float64]:
        """Return the trace of each device's scatter, (K,)."""
        traces: NDArray[np.float64] = self.diagonals.sum(axis=1, dtype=np.float64)
        for block in blocks(len(self.rows)):
            of_rows = (self.rows[block].astype(np.float64) ** 2).sum(axis=1)
            traces += np.bincount(self.devices[block], of_rows, minlength=len(traces))
        return traces
