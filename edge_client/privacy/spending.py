"""The privacy loss of a device's releases together. Pure."""

from collections import Counter
from collections.abc import Iterable

from edge_client.store.privacy_ledger import Release
from protocol.statistics.noisy_sums import epsilon_of_sums, share_of_noise


def total_epsilon(releases: Iterable[Release], *, delta: float) -> float:
    """Return epsilon of all releases together; it is infinite where it is not computed.

    It is conditional if `is_conditional`.
    """
    return epsilon_of_sums(Counter(each.noise_multiplier for each in releases), delta=delta)


def local_epsilon(releases: Iterable[Release], *, delta: float) -> float:
    """Return epsilon of this device's noise alone: what holds although a second operator helps the aggregator.

    It is infinite if the share of a release's noise is unknown, as an earlier version has not recorded it.
    """
    shares = Counter(
        share_of_noise(each.noise_multiplier, honest=each.honest) if each.honest else 0.0 for each in releases
    )
    return epsilon_of_sums(shares, delta=delta)


def is_conditional(releases: Iterable[Release]) -> bool:
    """Return whether `total_epsilon` holds only if a second operator is honest."""
    return any(each.honest != 1 for each in releases)
