"""Sums of images by the Gaussian mechanism: counts, class sums and second moment, in integers. Pure.

**Adjacency.** Two sets of images are neighbors if one has one image more, in one class. Its row r has D integers and
is no longer than R = 127.

**Released** at once: of each class 1 count and D sums, and of all rows the D (D + 1) / 2 products, each with discrete
Gaussian noise. The image changes one count by 1, one class's sums by r, and the products by r_i r_j. Where the noise of
a value has the standard deviation s_i, what matters is the sum of its squared changes, each divided by s_i^2. With

    s = z sqrt(2 + w^2):  s / w for counts, s R for sums, s R^2 for squares, s R^2 / sqrt(2) for other products

it is at most (w^2 + |r|^2 / R^2 + (sum_i r_i^4 + 2 sum_{i<j} r_i^2 r_j^2) / R^4) / s^2 <= (w^2 + 2) / s^2 = 1 / z^2,
as the products' sum is |r|^4. With Gaussian noise, one release would be one Gaussian event of noise multiplier z, also
if it is rounded: integers plus rounded noise are rounded integers plus noise, which is post-processing.

**Discrete noise** P instead of rounded Gaussian noise R costs `discreteness`. For an integer k of variance v,

    R(k) / P(k) = (1 + 2 sum_j e^(-2 pi^2 v j^2)) int_{-1/2}^{1/2} cosh(k t / v) e^(-t^2 / 2 v) dt

lies between e^(-1 / 23 v), as cosh is at least 1, and e^(k^2 / 24 v^2) for v >= 10, as sinh(a) / a <= e^(a^2 / 6).
Hence P <= e^A R with A = sum_i 1 / (23 v_i) over all values, and R <= e^B P except with a probability beta under R, by
which sum_i k_i^2 / (24 v_i^2) exceeds B: the tail of weighted chi-squared values (Laurent, Massart 2000, lemma 1). What
is (epsilon, delta) private with R is (epsilon + A + B, e^A delta + e^(A + epsilon) beta) private with P, and A and B of
several releases add up. Counts and sums are released in units of 1 / 64 and 1 / 8, so that all variances are large.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.privacy.noise import subkey
from protocol.errors import PrivacyRefused
from protocol.statistics.second_moment import MAX_VALUE, add_products, to_triangle, triangle_size
from research.privacy.discrete_gaussian import discrete_gaussian

COUNT_WEIGHT = 0.2
"""w: counts tolerate more noise than sums, and get less of the budget."""

COUNT_UNITS, SUM_UNITS = 64, 8
"""Integers for one image in a count, and for 1 in a sum of rows."""

TAIL = 80.0
"""-log(beta)."""


@dataclass(frozen=True, kw_only=True)
class NoisySums:
    """Counts and sums with noise, which are not of any images."""

    counts: NDArray[np.int64]
    """Images of each class in units of 1 / COUNT_UNITS, (C,)."""
    sums: NDArray[np.int64]
    """Sums of the rows of each class in units of 1 / SUM_UNITS, (C, D)."""
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
    counts = COUNT_UNITS * np.bincount(labels, minlength=classes)
    noise = _noise(key, b"sums", classes * size, deviations["sums"]).reshape(classes, size)
    return NoisySums(
        counts=counts + _noise(key, b"counts", classes, deviations["counts"]),
        sums=SUM_UNITS * sums + noise,
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


def discreteness(noise_multiplier: float, *, classes: int, size: int) -> float:
    """Return A + B: by how much epsilon of one release exceeds that of the Gaussian mechanism, at most.

    It is infinite where a variance is below 10. Delta of all releases together is at most e^(sum of A + B) times that
    of the Gaussian mechanism, plus e^(epsilon - TAIL) for each.
    """
    values = {
        "counts": classes, "sums": classes * size, "squares": size, "products": size * (size - 1) // 2
    }  # fmt: skip
    variances = {kind: deviation**2 for kind, deviation in _deviations(noise_multiplier).items()}
    if min(variances.values()) < 10:
        return math.inf
    pairs = [(count, 1 / (24 * variances[kind])) for kind, count in values.items()]
    total = math.fsum(count * each for count, each in pairs)
    squares = math.fsum(count * each * each for count, each in pairs)
    tail = total + 2 * math.sqrt(TAIL * squares) + 2 * TAIL * max(each for _, each in pairs)
    # |k| <= |x| + 1/2 of the rounded x, and so k^2 <= 17/16 x^2 + 17/4.
    return 24 / 23 * total + 17 / 16 * tail + 24 * 17 / 4 * squares


def products_deviation(noise_multiplier: float) -> float:
    """Return the standard deviation of the noise of a product of two values."""
    return _deviations(noise_multiplier)["products"]


def _deviations(noise_multiplier: float) -> dict[str, float]:
    """Return the standard deviation of the noise of each kind of value, in its units."""
    unit = noise_multiplier * math.sqrt(2 + COUNT_WEIGHT**2)
    square = unit * MAX_VALUE**2
    return {
        "counts": COUNT_UNITS * unit / COUNT_WEIGHT,
        "sums": SUM_UNITS * unit * MAX_VALUE,
        "squares": square,
        "products": square / math.sqrt(2),
    }


def _noise(key: bytes, name: bytes, count: int, deviation: float) -> NDArray[np.int64]:
    return discrete_gaussian(subkey(key, name), count, variance=math.ceil(deviation**2))
