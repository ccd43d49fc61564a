"""The rate of trainings, `limits.heads_per_hour`: however often devices upload, heads are made no faster.

Counted are the heads that are stored, by the last training of each; calibrations are none. A training that has failed
is repeated whatever the rate.
"""

import logging

from aggregator.config.limits import Limits
from aggregator.storage.store import Store
from protocol.log import event

log = logging.getLogger(__name__)

HOUR_S = 3600.0


def wait_s(store: Store, task: bytes, limits: Limits) -> float:
    """Return the seconds until the next head may be planned; 0 if it may be now.

    As many heads may be made at once as in an hour; then one from time to time.
    """
    left, before_s, pause_s = float(limits.heads_per_hour), 0.0, HOUR_S / limits.heads_per_hour
    for started_s in store.heads.starts_s(task):
        left = min(left + (started_s - before_s) / pause_s, limits.heads_per_hour) - 1
        before_s = started_s
    left += (store.clock.now_s() - before_s) / pause_s
    return max(0.0, (1 - left) * pause_s)


def log_limit(store: Store, task: bytes, limits: Limits) -> None:
    """Log that the limit is reached, if it is."""
    if left_s := wait_s(store, task, limits):
        limit = "limits.heads_per_hour reached: raise it if the fleet needs more heads"
        event(log, logging.WARNING, limit, next_training_in_s=left_s)


def limited_until_s(store: Store, task: bytes, limits: Limits) -> float | None:
    """Return the time (unix seconds) of the next training if `limits.heads_per_hour` is reached, else None."""
    left_s = wait_s(store, task, limits)
    return store.clock.unix_s(store.clock.now_s() + left_s) if left_s else None
