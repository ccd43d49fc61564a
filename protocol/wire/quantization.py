"""Prototypes in one byte a value: 256 equal steps between the lowest and the highest value of each feature. Pure."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.wire.codec import to_tensor

STEPS = 255

ROWS = 256
"""Rows that are converted at a time."""

RANGE = "range"
"""The tensor of a submission that has the lowest and the highest values."""


def quantize(values: NDArray[np.float16]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Return values (m, L), m at least 1, as integers from 0 to 255 (m, L), and each feature's range (2, L).

    Law: `dequantize` returns the values with an error of at most half a step.
    """
    limits = np.stack([values.min(axis=0), values.max(axis=0)])
    low, step = _low_and_step(limits)
    divisor = np.where(step > 0, step, 1)
    integers = np.empty(values.shape, np.uint8)
    for start in range(0, len(values), ROWS):  # a device has little memory
        rows = slice(start, start + ROWS)
        integers[rows] = np.rint((values[rows] - low) / divisor)
    return integers, limits


def dequantize(values: NDArray[np.uint8], limits: NDArray[np.float16]) -> NDArray[np.float32]:
    """Return the values (m, L) of integers (m, L) and the range (2, L)."""
    low, step = _low_and_step(limits)
    restored = values * step
    restored += low
    return restored


def prototype_fields(values: NDArray[Any]) -> dict[str, Any]:
    """Return the fields `prototypes` and `tensors` of a submission of FedTC with these prototypes, float16 (m, L)."""
    integers, limits = quantize(values)
    return {"prototypes": to_tensor(integers), "tensors": {RANGE: to_tensor(limits)}}


def _low_and_step(limits: NDArray[np.float16]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    low, high = limits.astype(np.float32)
    return low, (high - low) / STEPS
