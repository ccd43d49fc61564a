"""The privacy loss of several releases, by dp-accounting, which is imported only for tasks that need it."""

import functools
import math
from collections.abc import Mapping

from protocol.errors import PrivacyRefused

NO_ACCOUNTANT = (
    "the task asks for differential privacy, and this device has no accountant: "
    "pip install 'protofleet[privacy]'"
)

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
    if sum(times / multiplier / multiplier for multiplier, times in releases.items()) > MOST_LOSS:
        return math.inf
    return _composed(tuple(sorted(releases.items())), delta)


@functools.lru_cache(maxsize=64)
def _composed(releases: tuple[tuple[float, int], ...], delta: float) -> float:
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    for multiplier, times in releases:
        accountant.compose(GaussianDpEvent(multiplier), times)
    epsilon = float(accountant.get_epsilon(delta))
    return math.inf if math.isnan(epsilon) else epsilon
