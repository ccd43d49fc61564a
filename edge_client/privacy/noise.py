"""Noise that is unpredictable without its key: SHAKE-256 of a secret key, as normal or Laplacian values.

The same key gives the same noise, and another key independent noise. numpy's generators are not used here: their
output can be predicted from a part of it.
"""

import hashlib
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edge_client.privacy.noise_key import KEY_BYTES


def gaussian(key: bytes, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return independent normal values of standard deviation 1 (Box and Muller 1958), float64 of `shape`."""
    size = math.prod(shape)
    pairs = (size + 1) // 2
    first, second = _uniform(key, (2, pairs))
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * math.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size].reshape(shape)


def laplace(key: bytes, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return independent Laplacian values of scale 1 (standard deviation sqrt(2)), float64 of `shape`."""
    first, second = _uniform(key, (2, *shape))
    made: NDArray[np.float64] = np.log(first) - np.log(second)
    return made


NOISES: dict[str, Callable[[bytes, tuple[int, ...]], NDArray[np.float64]]] = {
    "gaussian": gaussian,
    "laplace": laplace,
}
"""The distributions by their names on the wire."""


def _uniform(key: bytes, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return independent uniform values above 0 and up to 1 in steps of 2^-53, float64 of `shape`."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"expected a key of {KEY_BYTES} bytes, got {len(key)}")
    stream = hashlib.shake_256(key).digest(8 * math.prod(shape))
    steps = np.frombuffer(stream, "<u8").reshape(shape) >> np.uint64(11)
    return (steps.astype(np.float64) + 1) * 2.0**-53
