"""Files that are missing or damaged: a start writes them again if it can."""

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from aggregator.storage.blobs import Blobs
from aggregator.storage.store import Store
from aggregator.storage.stored_values import LostFiles
from aggregator.sums.stored_lists import TOTALS
from aggregator.tasks.retention import needed_blobs
from aggregator.tasks.task_preparation import Task, prepare_task
from protocol.errors import BlobLost, StateError, ThreadFailed
from protocol.log import event
from protocol.storage.blobstore import file_digest
from protocol.threads import start_thread

log = logging.getLogger(__name__)

VERIFY_S = 60.0
"""Seconds for which a verified file is sent without being read as a whole again."""


def heal(task: Task, store: Store, digests: Collection[bytes]) -> None:
    """Write the files again that are missing or damaged, from copies or as a start does; `status` shows lost ones.

    Raises StateError if they cannot be read or written.
    """
    known = needed_blobs(task, store, set(map(bytes.fromhex, _lost(store))))
    damaged = [digest for digest in {*digests, *known} if not store.blobs.is_whole(digest)]
    for digest in damaged:
        event(log, logging.ERROR, "file missing or damaged on disk", digest=digest)
        _copy_back(store, digest)
    if any(digest not in store.blobs for digest in {*task.blobs, task.digest}.intersection(damaged)):
        prepare_task(task.file, task.backbone_files, store=store)
    lost = [digest for digest in damaged if digest not in store.blobs]
    for digest in damaged:
        if digest in lost:
            event(log, logging.ERROR, "file lost: devices or trainings need it", digest=digest)
        else:
            text = "file restored: check the disk or the object store"
            event(log, logging.WARNING, text, digest=digest)
    _put_lost(store, {digest.hex() for digest in lost})


def _copy_back(store: Store, digest: bytes) -> None:
    folder = store.folder
    files = (*folder.glob("training/*/*"), *folder.glob(f"{TOTALS}/*"))
    for copy in (store.blobs.path(digest), folder / "head.onnx", *files):
        with contextlib.suppress(StateError):
            if file_digest(copy) == digest:
                store.put_file(copy)
                return


def report_damage(task: Task, store: Store, error: BlobLost) -> None:
    """End the program because of a missing or damaged file, unless it is known as lost, or nothing needs it.

    Raises:
        StateError: the next start is to write it again.
    """
    known, digest = _lost(store), error.digest
    if digest.hex() not in known and needed_blobs(task, store, [digest]):
        _put_lost(store, known | {digest.hex()})
        raise StateError(f"{error}: the next start writes it again, if it can")
    event(log, logging.ERROR, "cannot read a file", reason=error)


def note_whole(store: Store, digest: bytes) -> None:
    """Take note of a file that is whole, which was lost perhaps."""
    _put_lost(store, _lost(store) - {digest.hex()})


def _lost(store: Store) -> set[str]:
    return set((store.facts.get(LostFiles) or LostFiles(())).digests)


def _put_lost(store: Store, digests: set[str]) -> None:
    if digests != _lost(store):
        store.facts.put(LostFiles(tuple(sorted(digests))))


@dataclass(frozen=True)
class Verified:
    """A file was read as a whole: it is what its digest says, or `problem` says why it cannot be used."""

    digest: bytes
    problem: StateError | None = None


class VerifiedFiles:
    """The files that devices download, each verified at most `VERIFY_S` before it is sent.

    A thread reads them: a backbone may have hundreds of megabytes. `on_event` gets what it has found.
    """

    def __init__(self, blobs: Blobs, on_event: Callable[[Verified | ThreadFailed], None]) -> None:
        self._blobs = blobs
        self._on_event = on_event
        self._verified_s: dict[bytes, float] = {}
        """The time until which each file counts as verified."""
        self._unread = set[bytes]()
        """Files that the thread is to read."""
        self._queue = queue.SimpleQueue[bytes]()
        start_thread(self._verify, name="verify", on_failure=on_event)

    def is_verified(self, digest: bytes) -> bool:
        """Return True if a file can be sent; otherwise it is read now, and `Verified` follows."""
        if time.monotonic() < self._verified_s.get(digest, 0.0):
            return True
        if digest not in self._unread:
            self._unread.add(digest)
            self._queue.put(digest)
        return False

    def take(self, verified: Verified) -> None:
        """Take note of what the thread has found."""
        self._unread.discard(verified.digest)
        if verified.problem is None:
            self._verified_s[verified.digest] = time.monotonic() + VERIFY_S

    def _verify(self) -> None:
        while True:
            digest = self._queue.get()
            try:
                self._blobs.verified_path(digest)
            except StateError as error:
                self._on_event(Verified(digest, error))
            else:
                self._on_event(Verified(digest))
