"""Submissions that the disk has lost: they count no longer, and their devices are asked for them again."""

import logging
import time
from collections.abc import Mapping

from aggregator.storage.store import Store
from aggregator.tasks.task_preparation import Task
from protocol.log import event
from protocol.wire.messages import Receipt

log = logging.getLogger(__name__)

REQUEST_S = 30.0
"""Seconds between requests: a device may be offline."""


class LostSubmissions:
    """The lost submissions of a task."""

    def __init__(self, task: Task, store: Store) -> None:
        self._task = task.digest
        self._store = store
        self._request_s = 0.0

    def remove(self, lost: Mapping[str, bytes]) -> None:
        """Delete submissions whose blobs are missing or damaged; raises StateError."""
        if not lost:
            return
        with self._store.transaction():
            for device, digest in lost.items():
                stored = self._store.submissions.get(self._task, device)
                if stored is not None and stored.entry.digest == digest:
                    self._store.submissions.delete(device, self._task)
                    self._store.submissions.add_lost(self._task, device, digest, now_s=time.time())
        for device, digest in lost.items():
            text = "submission lost from disk, requesting it again: check the disk"
            event(log, logging.ERROR, text, device=device, digest=digest)
        self._request_s = 0.0

    def requests(self) -> list[tuple[str, Receipt]]:
        """Return the devices to ask now, and what to send them: a device answers with the query of an upload."""
        now_s = time.monotonic()
        if now_s < self._request_s:
            return []
        self._request_s = now_s + REQUEST_S
        return [
            (each.device, Receipt(digest=bytes.fromhex(each.sha256), status="missing"))
            for each in self._store.submissions.lost(self._task)
        ]
