"""Counts, class sums and second moment with discrete Gaussian noise: units, deviations, and what a release costs. Pure.

**Adjacency.** Two sets of images are neighbors if one has one image more, in one class. Its row r has D integers and
is no longer than R = 127.

**Released** at once: of each class 1 count and D sums, and of all rows the D (D + 1) / 2 products, each with discrete
Gaussian noise. The image changes one count by 1, one class's sums by r, and the products by r_i r_j. Where the noise of
a value has the standard deviation s_i, what matters is the sum of its squared changes, each divided by s_i^2. With

    s = z sqrt(2 + w^2):  s / w for counts, s R for sums, s R^2 for squares, s R^2 / sqrt(2) for other products

it is at most (w^2 + |r|^2 / R^2 + (sum_i r_i^4 + 2 sum_{i<j} r_i^2 r_j^2) / R^4) / s^2 <= (w^2 + 2) / s^2 = 1 / z^2,
as the products' sum is |r|^4. With Gaussian noise, one release would be one Gaussian event of noise multiplier z, also
if it is rounded: integers plus rounded noise are rounded integers plus noise, which is post-processing.

**Persons.** If the unit is a person, of whom at most k rows count, neighbors differ in up to k rows r_a of any classes.
Which rows of a person count depends on that person's images alone, so that no other person's rows change. The counts
change by n_c, whose squares sum to at most (sum_c n_c)^2 = k^2, the class sums by sums of n_c rows, no longer than
n_c R, and the products by sum_a r_a r_a', no longer than k R^2. So the sum of squared changes is at most
k^2 (w^2 + 2) / s^2 = k^2 / z^2, which k equal rows of length R reach: k times the change of one row. A multiplier of z
for a person is one of k z for a row. `rows_changed` has other pairs of units: one image of a person with more than k
adds its row and can displace another one; where an image was the unit, all images of a person counted, k at most.

**Discrete noise** P instead of rounded Gaussian noise R costs `discreteness`. For an integer k of variance v,

    R(k) / P(k) = (1 + 2 sum_j e^(-2 pi^2 v j^2)) int_{-1/2}^{1/2} cosh(k t / v) e^(-t^2 / 2 v) dt

lies between e^(-1 / 23 v), as cosh is at least 1, and e^(k^2 / 24 v^2) for v >= 10, as sinh(a) / a <= e^(a^2 / 6).
Hence P <= e^A R with A = sum_i 1 / (23 v_i) over all values, and R <= e^B P except with a probability beta under R, by
which sum_i k_i^2 / (24 v_i^2) exceeds B: the tail of weighted chi-squared values (Laurent, Massart 2000, lemma 1). What
is (epsilon, delta) private with R is (epsilon + A + B, e^A delta + e^(A + epsilon) beta) private with P, and A and B of
several releases add up. Counts and sums are released in units of 1 / 64, so that all variances are large.

**Noise of several devices.** With a second operator, only the sum of the releases of at least h honest devices is seen,
each with noise of z / sqrt(h). A sum of h discrete Gaussians of variance v is the discrete Gaussian of variance h v up
to a factor of e^(+-t), t = 10 sum_{k<h} e^(-2 pi^2 v k / (k + 1)) (Kairouz, Liu and Steinke 2021, theorem 9). With v >=
10, t is below h e^-95 for each value, which the rounding up of `discreteness` covers.
"""

import math
from collections.abc import Mapping

from protocol.statistics.gaussian_privacy import epsilon_of
from protocol.statistics.integer_rows import MAX_VALUE, triangle_size

COUNT_WEIGHT = 0.2
"""w: counts tolerate more noise than sums, and get less of the budget."""

UNITS = 64
"""Integers for one image in a count, and for 1 in a sum of rows."""

TAIL = 120.0
"""-log(beta)."""

MAX_DISCRETENESS = 2e-3
"""A + B that every release is charged with, whatever it is; a release with more is refused."""

ENOUGH = 10
"""Images of each class without which a head is poor, in multiples of `hidden_images`."""

MOST_EPSILON = 80.0
"""Epsilon above which none is computed."""


def deviations(noise_multiplier: float) -> dict[str, float]:
    """Return the standard deviation of the noise of each kind of value, in its units, for a z."""
    unit = noise_multiplier * math.sqrt(2 + COUNT_WEIGHT**2)
    square = unit * MAX_VALUE**2
    return {
        "counts": UNITS * unit / COUNT_WEIGHT,
        "sums": UNITS * unit * MAX_VALUE,
        "squares": square,
        "products": square / math.sqrt(2),
    }


def share_of_noise(noise_multiplier: float, *, honest: int) -> float:
    """Return the noise multiplier of one of `honest` devices whose noise together has this one."""
    return noise_multiplier / math.sqrt(honest)


def rows_changed(*, counted: int | None, images_per_person: int | None) -> int:
    """Return the rows in which the release differs if one unit is added: a person, or an image where that is None.

    `counted` is how many images of one person the release counts at most; None if it counts all.
    """
    if counted is None:
        return images_per_person or 1
    return 2 if images_per_person is None else counted


def unit_in_words(images_per_person: int | None) -> str:
    """Return what a privacy loss is about, as a text."""
    if not images_per_person:
        return "one image"
    if images_per_person == 1:
        return "one person, of whom one image counts"
    return f"one person, of whom at most {images_per_person} images count"


def hidden_images(noise_multiplier: float, *, devices: float) -> int:
    """Return how many images of a class are as large as the noise of so many devices."""
    return math.ceil(deviations(noise_multiplier)["counts"] / UNITS * math.sqrt(devices))


def released_values(*, classes: int, size: int) -> dict[str, int]:
    """Return how many values of each kind a release has, for C classes and rows of D values."""
    return {
        "counts": classes,
        "sums": classes * size,
        "squares": size,
        "products": triangle_size(size) - size,
    }


def discreteness(noise_multiplier: float, *, classes: int, size: int, honest: int = 1) -> float:
    """Return A + B of a release of `honest` devices together; it is infinite where a device's variance is below 10."""
    values = released_values(classes=classes, size=size)
    variances = {kind: deviation**2 for kind, deviation in deviations(noise_multiplier).items()}
    if min(variances.values()) < 10 * honest:
        return math.inf
    pairs = [(count, 1 / (24 * variances[kind])) for kind, count in values.items()]
    total = math.fsum(count * each for count, each in pairs)
    squares = math.fsum(count * each * each for count, each in pairs)
    tail = total + 2 * math.sqrt(TAIL * squares) + 2 * TAIL * max(each for _, each in pairs)
    # |k| <= |x| + 1/2 of the rounded x, and so k^2 <= 17/16 x^2 + 17/4.
    return 24 / 23 * total + 17 / 16 * tail + 24 * 17 / 4 * squares


def epsilon_of_sums(releases: Mapping[float, int], *, delta: float) -> float:
    """Return an upper bound of epsilon of adaptively chosen releases of the same images.

    `releases` are their numbers by noise multiplier. It is infinite where the noise is too little to compute one.
    """
    number = sum(releases.values())
    slack = MAX_DISCRETENESS * number
    gaussian_delta = (delta - number * math.exp(MOST_EPSILON + slack - TAIL)) * math.exp(-slack)
    if gaussian_delta <= 0:
        return math.inf
    epsilon = slack + epsilon_of(releases, delta=gaussian_delta)
    return epsilon if epsilon <= MOST_EPSILON else math.inf
