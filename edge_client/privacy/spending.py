"""The privacy loss of a device's releases together, in the unit of the newest. Pure."""

import math
from collections import Counter
from collections.abc import Sequence

from edge_client.config import Settings
from edge_client.store.privacy_ledger import Release
from edge_client.store.stored_values import PrivacySpent
from protocol.statistics.noisy_sums import epsilon_of_sums, rows_changed, share_of_noise

MOST = 1e6
"""Stored in place of an infinite epsilon, which JSON lacks."""


def total_epsilon(releases: Sequence[Release], *, delta: float) -> float:
    """Return epsilon of all releases together; it is infinite where it is not computed.

    It is for one unit of the newest release, a person or an image, whatever the unit of the others. It is conditional
    if `is_conditional`.
    """
    return _epsilon(releases, [each.noise_multiplier for each in releases], delta=delta)


def local_epsilon(releases: Sequence[Release], *, delta: float) -> float:
    """Return epsilon of this device's noise alone: what holds although a second operator helps the aggregator.

    It is infinite if the share of a release's noise is unknown, as an earlier version has not recorded it.
    """
    shares = [
        share_of_noise(each.noise_multiplier, honest=each.honest) if each.honest else 0.0 for each in releases
    ]
    return _epsilon(releases, shares, delta=delta)


def is_conditional(releases: Sequence[Release]) -> bool:
    """Return whether `total_epsilon` holds only if a second operator is honest."""
    return any(each.honest != 1 for each in releases)


def spent_by(
    releases: Sequence[Release],
    *,
    delta: float,
    settings: Settings | None,
    max_epsilon: float = 0.0,
    adopted: int = 0,
) -> PrivacySpent:
    """Return what releases cost, with the limits of the device's owner; `max_epsilon` 0 takes that of the owner."""
    local = local_epsilon(releases, delta=delta)
    return PrivacySpent(
        epsilon=0.0 if adopted else total_epsilon(releases[-1:], delta=delta),
        total_epsilon=min(total_epsilon(releases, delta=delta), MOST),
        delta=delta,
        releases=len(releases),
        max_epsilon=max_epsilon or (settings.max_epsilon if settings else None) or 0.0,
        conditional=is_conditional(releases),
        local_epsilon=local if math.isfinite(local) else None,
        max_local_epsilon=settings.max_local_epsilon if settings else None,
        adopted=adopted,
        images_per_person=releases[-1].images_per_person if releases else None,
    )


def _epsilon(releases: Sequence[Release], noise: Sequence[float], *, delta: float) -> float:
    """Return epsilon of releases with so much noise for one row each."""
    unit = releases[-1].images_per_person if releases else None
    rows = [rows_changed(counted=each.images_per_person, images_per_person=unit) for each in releases]
    multipliers = Counter(value / number for value, number in zip(noise, rows, strict=True))
    return epsilon_of_sums(multipliers, delta=delta)
