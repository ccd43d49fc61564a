"""Submissions that were accepted in a batch of messages: stored together, and logged once they are durable."""

import logging
from typing import Any

from aggregator.coordination.round_state import Settings
from aggregator.notices import SubmissionAccepted
from aggregator.rates import DeviceEvents
from aggregator.storage.background import WriteBatch
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from protocol.log import notify

log = logging.getLogger(__name__)


class AcceptedSubmissions:
    """The submissions of a batch, to one task; `counts_images` as in `ServedTask`."""

    def __init__(self, task: bytes, settings: Settings, store: Store, *, counts_images: bool = False) -> None:
        self._task = task
        self._counted = "images_in_prototypes" if counts_images else "prototypes"
        self._settings = settings
        self._store = store
        self._device_log = DeviceEvents(log)
        self._to_log: list[SubmissionRecord] = []
        self._writing = WriteBatch()
        self._prepared: set[bytes] = set()
        """The digests of their payloads, and of those that do not count."""

    def prepare(self, digest: bytes, payload: bytes) -> None:
        """Start to store a payload, which the transaction that accepts it then need not wait for.

        Raises StateError if it cannot be stored.
        """
        if digest not in self._prepared:
            self._prepared.add(digest)
            self._store.blobs.put_in_batch(payload, digest=digest, batch=self._writing)

    def add(self, record: SubmissionRecord, payload: bytes) -> None:
        """Store a submission in place of its device's earlier one; raises StateError if it cannot be stored."""
        digest = record.entry.digest
        self.prepare(digest, payload)
        self._store.submissions.put(self._task, record)
        self._to_log.append(record)

    def wait(self) -> None:
        """Wait for the payloads that `prepare` stores; raises StateError if one cannot be stored."""
        self._writing.wait()

    def flush(self) -> None:
        """Make the payloads durable; raises StateError if they cannot be stored."""
        self._writing.finish()

    def log(self) -> None:
        """Log the submissions, which are durable now."""
        records, self._to_log, self._prepared = self._to_log, [], set()
        for record in records:
            counted: dict[str, Any] = {self._counted: record.prototypes}
            of_round = record.entry.round if self._settings.rounds is not None else None
            self._device_log.event(
                *(logging.INFO, "submission accepted"),
                device=record.device,
                round=of_round,
                **counted,
                images=record.images,
                bytes=record.size_bytes,
            )
            notify(
                SubmissionAccepted(
                    device=record.device, round=of_round, images=record.images, size_bytes=record.size_bytes
                )
            )
