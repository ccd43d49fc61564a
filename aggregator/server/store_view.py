"""The part of the store that verdicts about uploads depend on, as the intake reads it."""

from dataclasses import dataclass

from aggregator.coordination import rounds
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.task_preparation import Task


@dataclass(frozen=True)
class IntakeHeads:
    """Facts about the heads of the served task that the intake of uploads needs."""

    newest: int = 0
    """The version of the newest head, 0 if there is none; with rounds, also the number of the open round."""
    retained: frozenset[int] = frozenset()
    """The versions of the heads whose evaluations matter."""
    served: frozenset[bytes] = frozenset()
    """Digests of the blobs that devices may request."""


class StoreView:
    """The served task's heads and submissions; call `begin_batch` before each batch of messages."""

    def __init__(self, store: Store, task: Task) -> None:
        self._store = store
        self._task = task.digest
        self._settings = task.file.settings
        self.heads = IntakeHeads()
        """The aggregator sets them."""
        self._submissions: dict[str, SubmissionRecord | None] = {}
        """The submissions that were read or stored in this batch."""

    def begin_batch(self) -> None:
        """Read what has changed since the batch before."""
        self._submissions.clear()

    def submission(self, device: str) -> SubmissionRecord | None:
        """Return a device's stored submission; raises StateError if it cannot be read."""
        if device not in self._submissions:
            self._submissions[device] = self._store.submissions.get(self._task, device)
        return self._submissions[device]

    def put(self, record: SubmissionRecord) -> None:
        """Take note of a submission that this batch stores."""
        self._submissions[record.device] = record

    def judge(self, record: SubmissionRecord, stored: SubmissionRecord | None) -> rounds.SubmissionVerdict:
        """Judge a submission by the device's stored one."""
        counted = stored.entry if stored is not None else None
        return rounds.judged(record.entry, counted, head_version=self.heads.newest, settings=self._settings)
