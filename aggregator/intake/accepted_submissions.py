"""Submissions that were accepted in a batch of messages: stored together, and logged once they are durable."""

import logging

from aggregator.coordination.round_state import Settings
from aggregator.rates import DeviceEvents
from aggregator.storage.background import WriteBatch
from aggregator.storage.blobs import FolderBlobs
from aggregator.storage.store import Store
from aggregator.storage.stored_values import UnusedBytes
from aggregator.storage.submissions import SubmissionRecord

log = logging.getLogger(__name__)

SUBMISSION_ACCEPTED = "submission accepted"
"""The event that a device's submission is stored."""


class AcceptedSubmissions:
    """The submissions of a batch, to one task."""

    def __init__(self, task: bytes, settings: Settings, store: Store) -> None:
        self._task = task
        self._settings = settings
        self._store = store
        self._device_log = DeviceEvents(log)
        self._to_log: list[SubmissionRecord] = []
        self._writing = WriteBatch()
        self._prepared: dict[bytes, int] = {}
        """Digests and sizes of the payloads."""
        self._replaced_bytes = 0

    def prepare(self, digest: bytes, payload: bytes) -> None:
        """Start to store a payload, which the transaction that accepts it then need not wait for.

        Raises StateError if it cannot be stored.
        """
        if digest not in self._prepared:
            self._prepared[digest] = len(payload)
            self._store.blobs.put_in_batch(payload, digest=digest, batch=self._writing)

    def add(
        self, record: SubmissionRecord, payload: bytes, *, replaced: SubmissionRecord | None = None
    ) -> None:
        """Store a submission in place of its device's `replaced` one; raises StateError if it cannot be stored."""
        digest = record.entry.digest
        self.prepare(digest, payload)
        if isinstance(
            self._store.blobs, FolderBlobs
        ):  # another program may have deleted it since `prepare` found it
            self._store.blobs.put_in_batch(payload, digest=digest, batch=self._writing)
        self._store.submissions.put(self._task, record)
        self._replaced_bytes += replaced.size_bytes if replaced is not None else 0
        self._to_log.append(record)

    def flush(self) -> None:
        """Make the payloads durable; raises StateError if they cannot be stored."""
        self._writing.finish()

    def count_unused(self) -> None:
        """Count the bytes of payloads that do not count, or no more, in the transaction that stores the others."""
        counting = {record.entry.digest for record in self._to_log}
        refused = sum(size for digest, size in self._prepared.items() if digest not in counting)
        if unused := self._replaced_bytes + refused:
            before = self._store.facts.get(UnusedBytes) or UnusedBytes()
            self._store.facts.put(UnusedBytes(before.total + unused))

    def log(self) -> None:
        """Log the submissions, which are durable now."""
        records = self._to_log
        self._clear()
        for record in records:
            self._device_log.event(
                *(logging.INFO, SUBMISSION_ACCEPTED),
                device=record.device,
                round=record.entry.round if self._settings.rounds is not None else None,
                prototypes=record.prototypes,
                images=record.images,
                bytes=record.size_bytes,
            )

    def discard(self) -> None:
        """Forget the submissions after a failed write."""
        self._clear()
        self._writing.discard()

    def _clear(self) -> None:
        self._to_log, self._prepared, self._replaced_bytes = [], {}, 0
