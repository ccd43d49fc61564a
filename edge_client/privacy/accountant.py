"""The privacy loss of several releases, by dp-accounting, which is imported only for tasks that need it.

Gaussian releases compose exactly, also if each depends on the ones before it: those of multipliers z1, ..., zn are one
of multiplier z with 1 / z^2 = 1 / z1^2 + ... + 1 / zn^2 (Dong, Roth, Su 2022, corollary 3.3). However many multipliers
there are, the accountant therefore computes one release.
"""

import functools
import math
from collections.abc import Mapping

from protocol.errors import PrivacyRefused, pip_command

NO_ACCOUNTANT = (
    f"the task asks for differential privacy, and this device has no accountant: {pip_command('privacy')}"
)

ROUNDING = 1e-12
"""Share by which the one multiplier is made smaller, for the rounding of the sum and of the root."""

MOST_LOSS = 50.0
"""Sum of 1 / z^2 of all releases above which epsilon exceeds 40 at any allowed delta, and is not computed."""


def epsilon_of(releases: Mapping[float, int], *, delta: float) -> float:
    """Return an upper bound of epsilon of adaptively chosen Gaussian releases of the same images.

    `releases` are their numbers by noise multiplier. It is infinite where the noise is too little to compute one.

    Raises:
        PrivacyRefused: dp-accounting is not installed.
    """
    try:
        import dp_accounting.pld  # noqa: F401 - the cache below must not answer without an accountant
    except ImportError as error:
        raise PrivacyRefused(NO_ACCOUNTANT) from error
    if not all(math.isfinite(multiplier) and multiplier > 0 for multiplier in releases):
        return math.inf
    loss = math.fsum(times / multiplier / multiplier for multiplier, times in releases.items())
    if loss > MOST_LOSS:
        return math.inf
    return _epsilon(loss**-0.5 * (1 - ROUNDING), delta) if loss else 0.0


@functools.lru_cache(maxsize=64)
def _epsilon(multiplier: float, delta: float) -> float:
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    accountant.compose(GaussianDpEvent(multiplier))
    epsilon = float(accountant.get_epsilon(delta))
    return math.inf if math.isnan(epsilon) else epsilon
