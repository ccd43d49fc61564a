"""Sums of images by the Gaussian mechanism with discrete noise (`protocol.statistics.noisy_sums`). Pure."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.privacy.discrete_gaussian import discrete_gaussian
from edge_client.privacy.noise_key import subkey
from protocol.errors import PrivacyRefused
from protocol.statistics.integer_rows import MAX_VALUE, triangle_size
from protocol.statistics.noisy_sums import UNITS, deviations
from protocol.statistics.second_moment import add_products, to_triangle


@dataclass(frozen=True, kw_only=True)
class NoisySums:
    """Counts and sums with noise, which are not of any images."""

    counts: NDArray[np.int64]
    """Images of each class in units of 1 / UNITS, (C,)."""
    sums: NDArray[np.int64]
    """Sums of the rows of each class in units of 1 / UNITS, (C, D)."""
    second_moment: NDArray[np.int64]
    """The upper triangle of the sum of all rows' products, by rows, (D (D + 1) / 2,)."""


def noisy_sums(
    rows: NDArray[np.integer],
    labels: NDArray[np.integer],
    *,
    classes: int,
    noise_multiplier: float,
    key: bytes,
) -> NoisySums:
    """Return the sums of rows (n, D) of classes (n,), each row clipped, with noise.

    Args:
        rows: integers from -127 to 127; each depends on its image only.
        labels: from 0 to C - 1.
        classes: C.
        noise_multiplier: z.
        key: 32 random bytes from the operating system, used for this release only.

    Raises:
        PrivacyRefused: an argument is out of range.
    """
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise PrivacyRefused("the noise must be above 0: nothing is uploaded")
    if rows.ndim != 2 or rows.shape[:1] != labels.shape:
        raise PrivacyRefused("expected one row for each image: nothing is uploaded")
    size, short = rows.shape[1], clipped(rows)
    matrix = np.zeros((size, size), np.int64)
    add_products(matrix, short)
    sums = np.zeros((classes, size), np.int64)
    np.add.at(sums, labels, short)
    scale = deviations(noise_multiplier)
    is_square = np.zeros(triangle_size(size), np.bool_)
    is_square[np.cumsum([0, *range(size, 1, -1)])] = True
    triangle = to_triangle(matrix)
    triangle[is_square] += _noise(key, b"squares", size, scale["squares"])
    triangle[~is_square] += _noise(key, b"products", len(triangle) - size, scale["products"])
    counts = UNITS * np.bincount(labels, minlength=classes)
    noise = _noise(key, b"sums", classes * size, scale["sums"]).reshape(classes, size)
    return NoisySums(
        counts=counts + _noise(key, b"counts", classes, scale["counts"]),
        sums=UNITS * sums + noise,
        second_moment=triangle,
    )


def clipped(rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return rows of which none is longer than MAX_VALUE; longer ones are shortened and rounded towards zero."""
    whole = rows.astype(np.int64)
    squares = (whole**2).sum(axis=1)
    is_long = squares > MAX_VALUE**2
    # Rounding up the length, and towards zero, leaves no row too long.
    lengths = np.ceil(np.sqrt(squares[is_long].astype(np.float64))).astype(np.int64) + 1
    long = whole[is_long] * MAX_VALUE
    whole[is_long] = np.sign(long) * (np.abs(long) // lengths[:, None])
    return whole


def _noise(key: bytes, name: bytes, count: int, deviation: float) -> NDArray[np.int64]:
    return discrete_gaussian(subkey(key, name), count, variance=math.ceil(deviation**2))
