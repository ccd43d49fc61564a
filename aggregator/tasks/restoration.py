"""Stored files that are missing or damaged: what devices and trainings need is written again.

A submission that the disk has lost counts no longer, and its device is asked for it again.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping

from aggregator.storage.store import Store
from aggregator.storage.stored_values import LostFiles
from aggregator.tasks.retention import needed_blobs
from aggregator.tasks.task_preparation import Task, prepare_task
from protocol.errors import BlobLost, ProtofleetError, StateError
from protocol.log import event
from protocol.storage.blobstore import file_digest
from protocol.wire.messages import Receipt

log = logging.getLogger(__name__)


VERIFY_S = 60.0
"""Seconds for which a verified file is used without being read as a whole again, and a lost one counts as lost."""

MAX_EXPORT_PAUSE_S = 3600.0
"""The most seconds between exports that do not restore a blob; the pause is VERIFY_S at first, and doubles."""

POLL_S = 1.0
"""Seconds between queries for reported blobs."""


class Restoration:
    """Verifies the blobs of a task, and writes them again."""

    def __init__(self, task: Task, store: Store) -> None:
        self._task = task
        self._store = store
        self._verified_s: dict[bytes, float] = {}
        """The time until which each blob counts as verified."""
        self._lost_s: dict[bytes, float] = {}
        """The time until which each lost blob counts as lost."""
        self._exports: dict[bytes, tuple[float, float]] = {}
        """The time of the next export for each lost blob, and the pause after that one, seconds."""
        self._poll_s = 0.0
        store.facts.delete(LostFiles)

    def verify(self, digests: Iterable[bytes], *, at_once: bool = False) -> None:
        """Verify the files that this program reads, and restore those that are missing or damaged.

        With `at_once`, also those that were verified, or found lost, a short time ago.

        Raises:
            BlobLost: one cannot be restored.
            StateError: one cannot be read or written.
        """
        for digest in digests:
            now_s = time.monotonic()
            if now_s < self._lost_s.get(digest, 0.0) and not at_once:
                raise BlobLost(digest, f"blob {digest.hex()} is lost")
            if now_s >= self._verified_s.get(digest, 0.0) or at_once:
                try:
                    self._store.blobs.verified_path(digest)
                except BlobLost as error:
                    event(log, logging.ERROR, "blob missing or damaged on disk", reason=error)
                    self.restore([digest])
                    self._store.blobs.verified_path(digest)
                self._verified_s[digest] = now_s + VERIFY_S

    def verify_all(self, digests: Iterable[bytes]) -> None:
        """Verify blobs now; `status` shows those that cannot be restored."""
        for digest in digests:
            with contextlib.suppress(StateError):
                self.verify([digest], at_once=True)

    def tick(self) -> None:
        """Restore what was reported, and try again what could not be restored; raises StateError."""
        if time.monotonic() < self._poll_s:
            return
        self._poll_s = time.monotonic() + POLL_S
        if (reported := self._store.facts.get(LostFiles)) is not None:
            self.restore(map(bytes.fromhex, reported.digests))

    def restore(self, digests: Iterable[bytes]) -> None:
        """Write blobs again that are missing or damaged; `status` shows lost ones.

        Raises StateError if the database cannot be used.
        """
        for digest in digests:
            if time.monotonic() < self._lost_s.get(digest, 0.0):
                continue
            try:
                is_whole = self._store.blobs.is_whole(digest) or self._is_written_again(digest)
            except ProtofleetError as error:  # such as a backbone whose file was deleted
                is_whole = False
                event(log, logging.ERROR, "cannot restore a blob: retrying", digest=digest, reason=error)
            if is_whole or digest not in needed_blobs(self._task, self._store):  # a head that was replaced
                self._lost_s.pop(digest, None)
                self._exports.pop(digest, None)
                continue
            if digest not in self._lost_s:
                event(log, logging.ERROR, "file lost: devices or trainings need it", digest=digest)
            self._lost_s[digest] = time.monotonic() + VERIFY_S
        lost = LostFiles(tuple(sorted(digest.hex() for digest in self._lost_s)))
        if lost != (self._store.facts.get(LostFiles) or LostFiles(())):
            self._store.facts.put(lost)

    def _is_written_again(self, digest: bytes) -> bool:
        """Write a blob again, from a copy of it or as at the start; return False if it is lost."""
        folder = self._store.folder
        for copy in (self._store.blobs.path(digest), folder / "head.onnx", *folder.glob("training/*/*")):
            with contextlib.suppress(StateError):
                if file_digest(copy) == digest:
                    self._store.put_file(copy)
                    break
        task, now_s = self._task, time.monotonic()
        next_s, pause_s = self._exports.get(digest, (now_s, VERIFY_S))
        is_due = digest in {task.digest, *task.blobs} and now_s >= next_s
        if is_due and not self._store.blobs.is_whole(digest):
            self._exports[digest] = (now_s + pause_s, min(2 * pause_s, MAX_EXPORT_PAUSE_S))
            prepare_task(task.file, task.backbone_files, store=self._store)
        if self._store.blobs.is_whole(digest):
            event(log, logging.WARNING, "blob restored: check the disk or the object store", digest=digest)
            return True
        return False


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
