"""Intake of device uploads: frames are durable, in batches, before any of them is acknowledged.

A disk that cannot be written stops the intake and nothing else: receipts ask devices to keep their uploads and try
again, until there is space and a trial write succeeds.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from shutil import disk_usage

from aggregator.intake import intake_status
from aggregator.intake.chunk_store import ChunkStore
from aggregator.intake.intake_status import IntakeStatus
from aggregator.intake.reassembly import Complete, Reassembly
from aggregator.intake.validation import Refused
from aggregator.storage.store import Store
from protocol.errors import StateError
from protocol.log import event
from protocol.storage.blobstore import state_errors
from protocol.wire.messages import Frame, Receipt

log = logging.getLogger(__name__)

TRIAL_S = 3.0
"""Seconds between trials of a stopped intake."""

EXPIRY_S = 60.0
"""Seconds between searches for uploads that were given up."""

CHECK_S = 600.0
"""Seconds between searches for damage in the database, which takes 1 ms per MB."""

MAX_ROOM_BYTES = 64 * 1024**2
"""Free space that resumes a stopped intake, whatever is the size of an upload."""

ROOM_SHARE = 0.05
"""Share of the disk whose space resumes the intake, if that is less."""

MAX_DETAIL = 500


class Uploads:
    """The uploads of devices, of at most `max_bytes`, until they are complete.

    An unfinished one is deleted after `unfinished_s` seconds without a frame. Raises StateError like `commit`.
    """

    def __init__(self, store: Store, *, max_bytes: int, unfinished_s: float) -> None:
        self._store = store
        self._folder = store.folder
        self._max_bytes = max_bytes
        self._unfinished_s = unfinished_s
        self._chunks = ChunkStore(self._folder)
        self.status = IntakeStatus()
        """Its status."""
        self._is_known = False
        """Why the intake is still stopped is logged."""
        self._trial_s = self._expiry_s = self._check_s = 0.0
        intake_status.create(self._folder)
        self._reassembly = self._load()

    def _load(self) -> Reassembly:
        """Continue the transfers on the disk, without those that were accepted meanwhile."""
        transfers, now_s = self._chunks.load(), self._store.clock.now_s()
        for each in transfers:
            each.seen_s = min(each.seen_s, now_s)  # the files may be newer than the database
        reassembly = Reassembly(
            max_bytes=self._max_bytes,
            holds=self._store.holds,
            transfers=transfers,
            read=self._chunks.read,
        )
        self._chunks.commit([], reassembly.ended)
        reassembly.settle()
        return reassembly

    @property
    def is_stopped(self) -> bool:
        return self.status.stopped_s is not None

    def close(self) -> None:
        self._chunks.close()

    def count_refusal(self, device: str, refused: Refused) -> None:
        """Count a refused message for `aggregator status`; log the first of its device and reason."""
        reason, detail = refused.reason, refused.detail[:MAX_DETAIL]
        if self._store.refusals.count(device, reason=reason, detail=detail, now_s=time.time()):
            event(log, logging.WARNING, "message refused", device=device, reason=reason, detail=detail)

    def take(self, device: str, frame: Frame) -> Receipt | Complete | None:
        """Add a frame as `Reassembly.take` does; the ranges of a receipt are durable once `commit` has returned."""
        if not self.is_stopped:
            return self._reassembly.take(device, frame, now_s=self._store.clock.now_s())
        if frame.offset + len(frame.data) < frame.size_bytes:
            return None
        self._store.database.check_file()  # what can still be read may be lost
        if self._store.holds(device, frame.digest):
            return Receipt(digest=frame.digest, status="received")
        detail = "the aggregator cannot store anything at the moment"
        return Receipt(digest=frame.digest, status="refused", reason="no_space", detail=detail)

    def commit(self) -> None:
        """Make all frames durable that were taken.

        Raises StateError if the disk cannot be written. Call `stop`: then none of these frames counts as arrived.
        """
        arrived, ended = self._reassembly.pending(), self._reassembly.ended
        if not self.is_stopped and (arrived or ended):
            self._chunks.commit(arrived, ended)
            self._reassembly.settle()

    def drop(self, devices: Iterable[str]) -> None:
        """Delete the unfinished uploads of devices, whose submissions an operator has deleted."""
        for device in devices:
            self._reassembly.drop_device(device)
        self.commit()

    def stop(self, error: StateError) -> None:
        """Stop the intake, because something could not be stored."""
        if self.is_stopped:
            log.debug("%s", error)
            return
        self._trial_s = time.monotonic() + TRIAL_S
        self._is_known = False
        text = "intake stopped: free space, fix permissions, or restore the database or object store"
        event(log, logging.ERROR, text, reason=error)
        self._set_status(IntakeStatus(time.time(), str(error)))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Stop the intake if the body cannot store something."""
        try:
            yield
        except StateError as error:
            self.stop(error)

    def tick(self) -> bool:
        """Let time pass; returns True if a stopped intake was resumed just now."""
        now_s = time.monotonic()
        if self.is_stopped:
            return now_s >= self._trial_s and self._resume()
        with self.guard():
            self._check_database(now_s)
        if now_s >= self._expiry_s:
            self._expiry_s = now_s + EXPIRY_S
            for device, digest in self._reassembly.expire(self._store.clock.now_s() - self._unfinished_s):
                event(log, logging.INFO, "unfinished upload deleted", device=device, digest=digest)
            with self.guard():
                self.commit()
        return False

    def _check_database(self, now_s: float) -> None:
        """Raise StateError if the database cannot be relied on: what is acknowledged now would be lost."""
        if now_s < self._check_s:
            self._store.database.check_file()
        else:
            self._check_s = now_s + CHECK_S
            self._store.database.check()

    def check_writable(self, size_bytes: int) -> None:
        """Raise StateError unless there is room for so many bytes, at most an upload's, also in the database."""
        self._chunks.check_writable(self._room(size_bytes))
        self._store.database.check_writable()
        self._store.blobs.check_writable()

    def _room(self, size_bytes: int) -> int:
        return min(size_bytes, self._max_bytes, MAX_ROOM_BYTES)

    def _resume(self) -> bool:
        self._trial_s = time.monotonic() + TRIAL_S
        try:
            with state_errors(self._folder):
                room_bytes = int(disk_usage(self._folder).total * ROOM_SHARE)
            self._chunks.make_room(self._room(room_bytes))  # unfinished uploads may be what fills the disk
            self.check_writable(room_bytes)
            self._store.database.check()
            self._reassembly = self._load()
        except StateError as error:
            if str(error) != self.status.reason:
                level = logging.DEBUG if self._is_known else logging.WARNING
                event(log, level, "intake still stopped", reason=error)
                self._is_known = True
                self._set_status(IntakeStatus(self.status.stopped_s, str(error)))
            return False
        event(log, logging.INFO, "intake resumed")
        self._set_status(IntakeStatus())
        return True

    def _set_status(self, status: IntakeStatus) -> None:
        self.status = status
        try:
            intake_status.write(self._folder, status)
        except StateError as error:
            event(log, logging.WARNING, "intake status not written for `aggregator status`", reason=error)
