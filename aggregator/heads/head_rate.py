"""The rate of trainings, `limits.heads_per_hour`: however often devices upload, heads are made no faster."""

import logging

from aggregator.config.schema import Limits
from aggregator.rates import TokenBuckets
from aggregator.storage.store import Store
from aggregator.storage.stored_values import TrainingTokens
from aggregator.tasks.task_preparation import Task
from protocol.log import event

log = logging.getLogger(__name__)

HOUR_S = 3600.0


class HeadRate:
    """A bucket with a token for each training of a task without rounds; restarts do not fill it."""

    def __init__(self, task: Task, store: Store) -> None:
        self._store = store
        self._task = task.digest
        self._is_unlimited = task.file.settings.rounds is not None
        self._tokens = _tokens(store, task.file.limits)

    def count(self) -> bool:
        """Count a training that starts now; returns False if no other may start for now. Raises StateError."""
        now_s = self._store.clock.now_s()
        if self._is_unlimited:
            return True
        if self._tokens.take(self._task, now_s=now_s) and (left := self._tokens.left(self._task)):
            self._store.facts.put(TrainingTokens(self._task, *left))
        wait_s = self._tokens.wait_s(self._task, now_s=now_s)
        if wait_s:
            limit = "limits.heads_per_hour reached: raise it if the fleet needs more heads"
            event(log, logging.WARNING, limit, next_training_in_s=wait_s)
        return not wait_s

    def may_train(self) -> bool:
        """Return True if another training may start now."""
        return self._is_unlimited or not self._tokens.wait_s(self._task, now_s=self._store.clock.now_s())


def limited_until_s(store: Store, task: bytes, limits: Limits) -> float | None:
    """Return the time (unix seconds) of the next training if `limits.heads_per_hour` is reached, else None."""
    now_s = store.clock.now_s()
    wait_s = _tokens(store, limits).wait_s(task, now_s=now_s)
    return store.clock.unix_s(now_s + wait_s) if wait_s else None


def _tokens(store: Store, limits: Limits) -> TokenBuckets[bytes]:
    stored = store.facts.get(TrainingTokens)
    return TokenBuckets(
        capacity=limits.heads_per_hour,
        per_s=limits.heads_per_hour / HOUR_S,
        left={stored.task: (stored.left, stored.at_s)} if stored is not None else {},
    )
