"""The coordinator of another process, which knows of submissions and evaluations what is in the store."""

import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace

from aggregator.coordination import rounds
from aggregator.heads.accepted_submissions import AcceptedSubmissions
from aggregator.storage.store import Store
from aggregator.storage.stored_values import IntakeHeads, IntakeTask, RoundRequest
from aggregator.storage.submissions import SubmissionRecord
from protocol.errors import BlobLost
from protocol.wire.messages import Evaluation

REQUEST_S = 10.0
"""Seconds between two requests to publish the open round again."""

VERIFY_S = 60.0
"""Seconds for which a verified blob is used without being read as a whole again."""


class StoreCoordinator:
    """Implements `Coordinator` with the store: what it decides is what the coordinator would have decided.

    Call `refresh` first in each transaction.
    """

    def __init__(self, store: Store, task: IntakeTask, accepted: AcceptedSubmissions) -> None:
        self._store = store
        self._task = task
        self._accepted = accepted
        self._data_version = -1
        self._change = store.newest_change()
        self._heads = IntakeHeads(task.digest, 0, frozenset(), frozenset())
        self._verified_s: dict[bytes, float] = {}
        self._request_s = 0.0
        self.deleted: set[str] = set()
        """Devices whose submissions were deleted; the caller clears it."""

    def refresh(self) -> bool:
        """Read what has changed; returns False if another task is served. Raises StateError."""
        if (version := self._store.data_version()) == self._data_version:
            return True
        if self._store.facts.get(IntakeTask) != self._task:
            return False
        heads = self._store.facts.get(IntakeHeads)
        if heads is not None and heads.task == self._task.digest:
            self._heads = heads
        newest = self._store.newest_change()
        self.deleted |= self._store.submissions.deleted(self._task.digest, since=self._change)
        self._change, self._data_version = newest, version
        return True

    @property
    def newest_head(self) -> int:
        """The version of the newest head; with rounds, also the number of the open round."""
        return self._heads.newest

    @property
    def retained_heads(self) -> AbstractSet[int]:
        """The versions of the heads whose evaluations matter."""
        return self._heads.retained

    @property
    def served(self) -> AbstractSet[bytes]:
        """Digests of the blobs that devices may request."""
        return self._heads.served

    def prepare(self, digest: bytes, payload: bytes) -> None:
        """Start to store a payload, which the transaction that accepts it then need not wait for."""
        self._accepted.prepare(digest, payload)

    def submit(self, record: SubmissionRecord, payload: bytes) -> rounds.SubmissionVerdict:
        """Judge a submission by the device's stored one, and store it if it counts; raises StateError."""
        stored = self._store.submissions.get(self._task.digest, record.device)
        verdict = rounds.judged(
            record.entry,
            stored.entry if stored is not None else None,
            head_version=self.newest_head,
            settings=self._task.settings,
        )
        if verdict.verdict == "new":
            self._accepted.add(replace(record, entry=verdict.counted_entry or record.entry), payload)
        return verdict

    def evaluate(self, device: str, evaluation: Evaluation) -> None:
        """Do nothing: the coordinator reads the evaluation once it is stored."""

    def repeat_round(self) -> None:
        """Ask the coordinator to publish the open round again, but not for each device that asks."""
        if (now_s := time.monotonic()) >= self._request_s:
            self._request_s = now_s + REQUEST_S
            self._store.facts.put(RoundRequest(self._store.clock.now_s()))

    def verify(self, digests: Iterable[bytes]) -> None:
        """Verify blobs that are sent, and report one that is missing or damaged; raises StateError for it."""
        for digest in digests:
            if (now_s := time.monotonic()) >= self._verified_s.get(digest, 0.0):
                try:
                    self._store.blobs.verified_path(digest)
                except BlobLost:
                    self._store.report_lost(digest)
                    raise
                self._verified_s[digest] = now_s + VERIFY_S
