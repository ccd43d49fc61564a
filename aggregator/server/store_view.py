"""The part of the store that verdicts about uploads depend on, as the intake reads it."""

import time

from aggregator.coordination import rounds
from aggregator.storage.store import Store
from aggregator.storage.stored_values import IntakeHeads, IntakeTask, RoundRequest
from aggregator.storage.submissions import SubmissionRecord

REQUEST_S = 10.0
"""Seconds between two requests to publish the open round again."""


class StoreView:
    """The served task's heads and submissions; call `refresh` first in each transaction."""

    def __init__(self, store: Store, task: IntakeTask) -> None:
        self._store = store
        self._task = task
        self._data_version = -1
        self._change = store.newest_change()
        self._request_s = 0.0
        self.heads = IntakeHeads(task.digest, 0, frozenset(), frozenset())
        """The heads as the aggregator has stored them last; it sets them here itself, in its own process."""
        self.deleted: set[str] = set()
        """Devices whose submissions another process has deleted; the caller clears it."""

    def refresh(self) -> bool:
        """Read what other processes have changed; returns False if another task is served. Raises StateError."""
        if (version := self._store.database.data_version()) == self._data_version:
            return True
        if self._store.facts.get(IntakeTask) != self._task:
            return False
        heads = self._store.facts.get(IntakeHeads)
        if heads is not None and heads.task == self._task.digest:
            self.heads = heads
        newest = self._store.newest_change()
        self.deleted |= self._store.submissions.deleted(self._task.digest, since=self._change)
        self._change, self._data_version = newest, version
        return True

    def submission(self, device: str) -> SubmissionRecord | None:
        """Return a device's stored submission; raises StateError if it cannot be read."""
        return self._store.submissions.get(self._task.digest, device)

    def judge(self, record: SubmissionRecord, stored: SubmissionRecord | None) -> rounds.SubmissionVerdict:
        """Judge a submission by the device's stored one."""
        counted = stored.entry if stored is not None else None
        return rounds.judged(
            record.entry, counted, head_version=self.heads.newest, settings=self._task.settings
        )

    def request_round(self) -> None:
        """Ask the aggregator to publish the open round again, but not for each device that needs it."""
        if (now_s := time.monotonic()) >= self._request_s:
            self._request_s = now_s + REQUEST_S
            self._store.facts.put(RoundRequest(self._store.clock.now_s()))
