"""The privacy loss of Gaussian releases in closed form, rounded up; device and aggregator compute the same. Pure.

With noise of standard deviation z times the sensitivity, a release is (epsilon, delta) private if and only if

    Phi(m / 2 - epsilon / m) - e^epsilon Phi(-m / 2 - epsilon / m) <= delta,  m = 1 / z

(Balle and Wang, ICML 2018, theorem 8). Gaussian releases compose exactly, also if each depends on the ones before it:
those of multipliers z1, ..., zn are one with m^2 = 1 / z1^2 + ... + 1 / zn^2 (Dong, Roth and Su 2022, corollary 3.3).
"""

import bisect
import math
from collections.abc import Mapping
from typing import Protocol

MOST_LOSS = 50.0
"""m^2 above which epsilon exceeds 40 at any delta that a device accepts, and is not computed."""

STEPS = 1000
"""Noise multipliers are multiples of 1/1000, so that the task's identity does not depend on the last bits."""

_ROUNDING = 1e-12
"""More than the relative error of each term: 38 standard deviations of 2^-53, squared, and that of the C library."""


class Cost(Protocol):
    """Returns epsilon of releases, by noise multiplier, at a delta."""

    def __call__(self, releases: Mapping[float, int], *, delta: float) -> float: ...


def epsilon_of(releases: Mapping[float, int], *, delta: float) -> float:
    """Return an upper bound of epsilon of adaptively chosen Gaussian releases of the same images.

    `releases` are their numbers by noise multiplier. It is infinite where the noise is too little to compute one.
    """
    if not all(math.isfinite(multiplier) and multiplier > 0 for multiplier in releases):
        return math.inf
    loss = math.fsum(times / multiplier / multiplier for multiplier, times in releases.items())
    if not loss <= MOST_LOSS:
        return math.inf
    m = math.sqrt(loss) * (1 + _ROUNDING)
    low, high = 0.0, loss / 2 + m * math.sqrt(-2 * math.log(delta))  # by concentrated differential privacy
    if not loss or _delta(0.0, m) <= delta:
        return 0.0
    while high - low > _ROUNDING * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _delta(middle, m) <= delta else (middle, high)
    return high


def noise_multiplier(epsilon: float, delta: float, *, cost: Cost = epsilon_of, rows: int = 1) -> float:
    """Return the smallest multiple of 1/STEPS that makes one release (epsilon, delta) private by its cost.

    It is for one row, of which neighboring data sets differ in so many.
    """
    steps = range(2**40)
    return (
        bisect.bisect_left(
            steps, True, lo=1, key=lambda z: cost({z / STEPS / rows: 1}, delta=delta) <= epsilon
        )
        / STEPS
    )


def _delta(epsilon: float, m: float) -> float:
    """Return an upper bound of delta."""
    first, second = _normal(m / 2 - epsilon / m), math.exp(epsilon) * _normal(-m / 2 - epsilon / m)
    return (1 + _ROUNDING) * first - (1 - _ROUNDING) * second


def _normal(value: float) -> float:
    """Return Phi, the distribution function of the standard normal distribution."""
    return math.erfc(-value / math.sqrt(2)) / 2
