"""Sums of images by the Gaussian mechanism: counts, class sums and second moment, in integers. Pure.

**Adjacency.** Two sets of images are neighbors if one has one image more, in one class. Its row r has D integers and
is no longer than R = 127.

**Released** at once: of each class 1 count and D sums, and of all rows the D (D + 1) / 2 products, each with discrete
Gaussian noise. The image changes one count by 1, one class's sums by r, and the products by r_i r_j. Where the noise of
a value has the standard deviation s_i, what matters is the sum of its squared changes, each divided by s_i^2. With

    s = z sqrt(2 + w^2):  s / w for counts, s R for sums, s R^2 for squares, s R^2 / sqrt(2) for other products

it is at most (w^2 + |r|^2 / R^2 + (sum_i r_i^4 + 2 sum_{i<j} r_i^2 r_j^2) / R^4) / s^2 <= (w^2 + 2) / s^2 = 1 / z^2,
as the products' sum is |r|^4: one release is one Gaussian event of noise multiplier z. This bounds the moments of the
privacy loss by those of the Gaussian mechanism (Canonne, Kamath and Steinke 2020, theorem 14).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.privacy.discrete_gaussian import discrete_gaussian
from edge_client.privacy.noise import subkey
from protocol.errors import PrivacyRefused
from protocol.statistics.second_moment import MAX_VALUE, add_products, to_triangle, triangle_size

COUNT_WEIGHT = 0.2
"""w: counts tolerate more noise than sums, and get less of the budget."""


@dataclass(frozen=True, kw_only=True)
class NoisySums:
    """Counts and sums with noise, which are not of any images."""

    counts: NDArray[np.int64]
    """Images of each class, (C,)."""
    sums: NDArray[np.int64]
    """Sums of the rows of each class, (C, D)."""
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
    deviations = _deviations(noise_multiplier)
    is_square = np.zeros(triangle_size(size), np.bool_)
    is_square[np.cumsum([0, *range(size, 1, -1)])] = True
    triangle = to_triangle(matrix)
    triangle[is_square] += _noise(key, b"squares", size, deviations["squares"])
    triangle[~is_square] += _noise(key, b"products", len(triangle) - size, deviations["products"])
    return NoisySums(
        counts=np.bincount(labels, minlength=classes) + _noise(key, b"counts", classes, deviations["counts"]),
        sums=sums + _noise(key, b"sums", classes * size, deviations["sums"]).reshape(classes, size),
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


def products_deviation(noise_multiplier: float) -> float:
    """Return the standard deviation of the noise of a product of two values."""
    return _deviations(noise_multiplier)["products"]


def _deviations(noise_multiplier: float) -> dict[str, float]:
    """Return the standard deviation of the noise of each kind of value."""
    unit = noise_multiplier * math.sqrt(2 + COUNT_WEIGHT**2)
    square = unit * MAX_VALUE**2
    return {
        "counts": unit / COUNT_WEIGHT,
        "sums": unit * MAX_VALUE,
        "squares": square,
        "products": square / math.sqrt(2),
    }


def _noise(key: bytes, name: bytes, count: int, deviation: float) -> NDArray[np.int64]:
    return discrete_gaussian(subkey(key, name), count, variance=math.ceil(deviation**2))
