"""What releases cost together, by dp-accounting, which is imported when a task asks for it and not before."""

import functools
import math
from collections.abc import Mapping

from protocol.errors import PrivacyRefused

NO_ACCOUNTANT = (
    "the task asks for differential privacy, and this device has no accountant: "
    "pip install 'protofleet[privacy]'"
)

MOST_LOSS = 50.0
"""Sum of 1 / z^2 of all releases, beyond which epsilon is above 40 at any delta allowed, and is not worked out."""


def epsilon_of(releases: Mapping[float, int], *, delta: float) -> float:
    """Epsilon of Gaussian releases of the same images, whatever each was chosen by (composition of privacy losses).

    Args:
        releases: how many there were of each noise multiplier.
        delta: at which epsilon holds.

    Returns:
        An upper bound; infinite where too little noise makes it pointless to ask.

    Raises:
        PrivacyRefused: dp-accounting is not installed.
    """
    try:
        import dp_accounting.pld  # noqa: F401 - what is remembered of earlier answers is not an accountant
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
