"""When the next head is made, and of which submissions. Pure.

Without rounds, a collection is open while there are submissions, of any age, that no head was made of. With rounds, it
holds the submissions to the open round, whose number is the version of the newest head: closing round r makes head
r + 1. A collection closes when

- with rounds, every device that can be expected has submitted,
- or `grace_s` has passed since `quorum` devices submitted (`retrain_after` once there is a head, without rounds),
- or `deadline_s` has passed since the first submission, if `min_devices` have submitted by then, else as soon as
  they have.

Without rounds, a device that the newest head excluded as an outlier closes a collection only `JUDGED_AGAIN_S` after
its last submission, to be judged again.

The head is then planned: of the newest submission of each device that counts, in whatever order they have arrived, so
that the same submissions give the same training set. Later ones belong to the next collection. A training that has
failed is repeated after a delay that grows with each failure, or at once with other submissions.

Times are elapsed seconds, of a clock that is never set back.
"""

import math
from dataclasses import dataclass
from typing import Literal

from aggregator.coordination.round_state import Settings, is_over

JUDGED_AGAIN_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Collection:
    """The open collection in figures."""

    version: int = 0
    """The version of the newest head, 0 if there is none; with rounds, also the number of the open round."""
    count: int = 0
    """Devices that have submitted."""
    first_s: float = math.inf
    """When the first of them has."""
    wanted_s: float = math.inf
    """When the last of `wanted_devices` has."""
    outlier_s: float = math.inf
    """When the first of the devices has that the newest head excluded, which wait to be judged again."""
    missing: int | None = None
    """Devices without which a round is not complete, and that have not submitted; None if it cannot be complete."""
    must_retrain: bool = False
    """The newest head was made of submissions that no longer count."""


def wanted_devices(version: int, settings: Settings) -> int:
    """Return the number of devices with which the open collection closes, or its grace period begins."""
    return settings.retrain_after if version and settings.rounds is None else settings.quorum


def closes_at_s(collection: Collection, settings: Settings) -> float:
    """Return when the collection closes at the latest; infinity if it waits for more devices."""
    closes_s = collection.outlier_s + JUDGED_AGAIN_S
    if collection.count >= max(settings.min_devices, 1):
        closes_s = min(closes_s, collection.first_s + settings.deadline_s)
        if settings.grace_s:
            closes_s = min(closes_s, collection.wanted_s + settings.grace_s)
    return closes_s


def is_due(collection: Collection, now_s: float, settings: Settings) -> bool:
    """Return True if the collection closes now."""
    if is_over(collection.version, settings):
        return False
    if collection.must_retrain or now_s >= closes_at_s(collection, settings):
        return True
    # Whatever the time.
    wanted = wanted_devices(collection.version, settings)
    return (collection.count >= wanted and not settings.grace_s) or _is_complete(collection, settings)


def _is_complete(collection: Collection, settings: Settings) -> bool:
    """Return True if no further device can be expected."""
    needed = settings.quorum if settings.devices is None else 0
    return collection.missing == 0 and collection.count >= needed


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The planned head, as far as decisions depend on it."""

    is_running: bool = False
    """A training makes it now."""
    retry_s: float = 0.0
    """When it is trained; later than now after a failure."""
    is_outdated: bool = False
    """Other submissions count than those that it is planned of."""


Decision = Literal["wait", "plan", "train"]


def decide(
    collection: Collection, plan: Plan | None, *, now_s: float, is_rate_limited: bool, settings: Settings
) -> Decision:
    """Return whether to plan the next head, also in place of one that has failed, or to train the planned one.

    With `is_rate_limited`, so many heads were trained lately that only a revocation starts another training.
    """
    if plan is not None and plan.is_running:
        return "wait"
    if plan is not None and not plan.is_outdated:
        return "train" if now_s >= plan.retry_s else "wait"
    is_allowed = collection.must_retrain or not is_rate_limited
    return "plan" if is_allowed and is_due(collection, now_s, settings) else "wait"
