"""Exact samples of the discrete Gaussian distribution, from SHAKE-256 of a secret key and in integers throughout. Pure.

"The discrete Gaussian for differential privacy" (Canonne, Kamath and Steinke, NeurIPS 2020), algorithms 1 to 3: an
integer k has probability proportional to exp(-k^2 / (2 v)). Floating point, whose last bits can reveal what the noise
is added to (Mironov 2012), is not used.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edge_client.privacy.noise_key import KEY_BYTES

_WORD = 8
"""Bytes of a random integer that decides one comparison; another follows in the rare case that it does not."""

_BLOCK, _BEGINNING = 2**16, 2**12
"""Bytes of a block, and of the first one that are computed at first: a few values need no more."""


def discrete_gaussian(key: bytes, count: int, *, variance: int) -> NDArray[np.int64]:
    """Return independent samples, int64 (count,), of which the same key gives the same ones.

    Args:
        key: 32 secret bytes, used for one release only.
        count: how many.
        variance: v, from 1 to 2**100; the distribution's variance is v as well, but for v below 1.
    """
    if len(key) != KEY_BYTES or not 1 <= variance < 2**100:
        raise ValueError(f"expected {KEY_BYTES} bytes and a variance of 1 to 2**100")
    random = _Bits(key)
    scale = math.isqrt(variance) + 1
    return np.array([_sample(random, variance, scale) for _ in range(count)], np.int64)


class _Bits:
    """A stream of random bytes, in blocks that are independent for all that is known of SHAKE-256."""

    def __init__(self, key: bytes) -> None:
        self._parts, self._bytes, self._at = _stream(key), b"", 0

    def word(self) -> int:
        """Return a uniform integer from 0 to 2**64 - 1."""
        if self._at == len(self._bytes):
            self._bytes, self._at = next(self._parts), 0
        start, self._at = self._at, self._at + _WORD
        return int.from_bytes(self._bytes[start : self._at], "big")

    def below(self, limit: int) -> int:
        """Return a uniform integer from 0 to `limit` - 1."""
        bits = limit.bit_length()
        while True:
            value = 0
            for _ in range(-(-bits // 64)):
                value = value << 64 | self.word()
            if (value := value >> (-bits % 64)) < limit:
                return value

    def is_true(self, numerator: int, denominator: int) -> bool:
        """Return True with the probability of a fraction from 0 to 1."""
        while True:
            threshold, numerator = divmod(numerator << 64, denominator)
            if (word := self.word()) != threshold:
                return word < threshold


def _stream(key: bytes) -> Iterator[bytes]:
    """Yield the blocks, of which the first one is in two parts."""
    blocks = (hashlib.shake_256(key + number.to_bytes(8, "big")) for number in itertools.count())
    first = next(blocks)
    yield first.digest(_BEGINNING)
    yield first.digest(_BLOCK)[_BEGINNING:]
    for block in blocks:
        yield block.digest(_BLOCK)


def _sample(random: _Bits, variance: int, scale: int) -> int:
    """Return one sample (algorithm 3)."""
    divisor = 2 * variance * scale * scale
    while True:
        value = _laplace(random, scale)
        if _exponential(random, (abs(value) * scale - variance) ** 2, divisor):
            return value


def _laplace(random: _Bits, scale: int) -> int:
    """Return an integer k with a probability proportional to exp(-|k| / scale) (algorithm 2)."""
    while True:
        rest = random.below(scale)
        if not _exponential(random, rest, scale):
            continue
        times = 0
        while _exponential(random, 1, 1):
            times += 1
        value, is_negative = rest + scale * times, random.is_true(1, 2)
        if value or not is_negative:
            return -value if is_negative else value


def _exponential(random: _Bits, numerator: int, denominator: int) -> bool:
    """Return True with the probability exp(-numerator / denominator) (algorithm 1)."""
    while numerator > denominator:
        if not _exponential(random, 1, 1):
            return False
        numerator -= denominator
    step = 1
    while random.is_true(numerator, denominator * step):
        step += 1
    return step % 2 == 1
