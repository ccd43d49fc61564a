"""Submissions that were accepted in a batch of messages: stored together, and logged once they are durable."""

import logging
from functools import partial

from aggregator.coordination.round_state import State
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.retention import needed_blobs
from aggregator.tasks.task_preparation import Task
from protocol.log import DeviceEvents
from protocol.storage.blobstore import WriteBatch

log = logging.getLogger(__name__)

SUBMISSION_ACCEPTED = "submission accepted"
"""The event that a device's submission is stored."""

MAX_REPLACED_BYTES = 512 * 1024**2
"""Size of replaced submissions at which their blobs are deleted, since a device can upload all day."""


class AcceptedSubmissions:
    """The submissions of a batch."""

    def __init__(self, task: Task, store: Store) -> None:
        self._task = task
        self._store = store
        self._device_log = DeviceEvents(log)
        self._to_log: list[partial[None]] = []
        self._writing = WriteBatch()
        self._replaced_bytes = 0

    def add(self, record: SubmissionRecord, payload: bytes, before: State) -> None:
        """Store a submission to the state before it; raises StateError if it cannot be stored."""
        self._store.blobs.put_in_batch(payload, digest=record.entry.digest, batch=self._writing)
        if record.device in before.submissions:
            self._replaced_bytes += record.size_bytes
        self._store.submissions.put(self._task.digest, record)
        settings = self._task.file.settings
        log_it = partial(
            self._device_log.event,
            *(logging.INFO, SUBMISSION_ACCEPTED),
            device=record.device,
            round=record.entry.round if settings.rounds is not None else None,
            prototypes=record.prototypes,
            images=record.images,
            bytes=record.size_bytes,
            devices=devices_after(record.device, before),
            quorum=settings.quorum,
        )
        self._to_log.append(log_it)

    def flush(self) -> None:
        """Make the payloads durable; raises StateError if they cannot be stored."""
        self._writing.finish()

    def log(self) -> None:
        """Log the submissions, which are durable now."""
        to_log, self._to_log = self._to_log, []
        for log_each in to_log:
            log_each()

    def discard(self) -> None:
        """Forget the submissions after a failed write."""
        self._to_log.clear()
        self._writing.discard()

    def delete_replaced(self) -> None:
        """Delete the blobs of replaced submissions once they are large."""
        if self._replaced_bytes > MAX_REPLACED_BYTES:
            self._replaced_bytes = 0
            self._store.blobs.keep_only(needed_blobs(self._task, self._store))


def devices_after(device: str, before: State) -> int:
    """Return the number of devices that are not quarantined and have submitted, without looking at all of them."""
    submitted, quarantined = before.submissions, before.decisions.quarantined
    total = len(submitted) + (device not in submitted)
    return total - sum(each in submitted or each == device for each in quarantined)
