"""Noise that nobody outside can guess: a secret key, stretched by SHAKE-256, made normal or Laplacian.

The same key gives the same noise, and another key noise that has nothing to do with it. numpy's generators are left
alone here: what they give can be told from a part of it.
"""

import hashlib
import hmac
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 32

_TO_UNIT = 2.0**-53


def subkey(secret: bytes, *parts: bytes) -> bytes:
    """A key of its own for everything that is named otherwise, 32 bytes; the secret does not follow from it."""
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hmac.digest(secret, digests, "sha256")


def gaussian(key: bytes, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Independent normal values of deviation 1 (Box and Muller 1958), float64 of `shape`."""
    size = math.prod(shape)
    pairs = (size + 1) // 2
    first, second = _uniform(key, (2, pairs))
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * math.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size].reshape(shape)


def laplace(key: bytes, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Independent Laplacian values of scale 1, whose deviation is sqrt(2), float64 of `shape`."""
    first, second = _uniform(key, (2, *shape))
    made: NDArray[np.float64] = np.log(first) - np.log(second)
    return made


NOISES: dict[str, Callable[[bytes, tuple[int, ...]], NDArray[np.float64]]] = {
    "gaussian": gaussian,
    "laplace": laplace,
}
"""By the names that the wire has for them."""


def _uniform(key: bytes, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Independent values above 0 and up to 1 in steps of 2^-53, float64 of `shape`.

    Raises:
        ValueError: the key is too short to be a secret.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"expected a key of {KEY_BYTES} bytes, got {len(key)}")
    stream = hashlib.shake_256(key).digest(8 * math.prod(shape))
    steps = np.frombuffer(stream, "<u8").reshape(shape) >> np.uint64(11)
    return (steps.astype(np.float64) + 1) * _TO_UNIT
