"""Intake of device uploads.

A disk that cannot be written stops the intake and nothing else: receipts ask devices to keep their uploads and try
again, until there is space and a trial write succeeds.
"""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator

from aggregator.intake import intake_status
from aggregator.intake.intake_status import IntakeStatus
from aggregator.intake.open_uploads import OpenUploads
from aggregator.intake.validation import Refused
from aggregator.storage.store import Store
from protocol.errors import StateError
from protocol.log import event
from protocol.storage.blobstore import state_errors
from protocol.wire.messages import Frame, Receipt

log = logging.getLogger(__name__)

UNFINISHED_S = 24 * 3600.0
"""Seconds without a frame after which an upload is deleted."""

TRIAL_S = 3.0
"""Seconds between trials of a stopped intake."""

TRIAL_BYTES = 64 * 1024

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
    """The uploads of devices, of at most `max_bytes`, until they are whole."""

    def __init__(self, store: Store, *, max_bytes: int) -> None:
        self._store = store
        self._folder = store.folder
        self._max_bytes = max_bytes
        self.status = IntakeStatus()
        """Its status."""
        self._is_known = False
        """Why the intake is still stopped is logged."""
        self._trial_s = self._expiry_s = self._check_s = 0.0
        intake_status.create(self._folder)
        self._open = self._begin()

    def _begin(self) -> OpenUploads:
        """Delete the files of unfinished uploads: devices send again what has no receipt."""
        folder = self._folder / "incoming"
        with state_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
        return OpenUploads(folder=folder, max_bytes=self._max_bytes, holds=self._store.holds)

    @property
    def is_stopped(self) -> bool:
        return self.status.stopped_s is not None

    def count_refusal(self, device: str, refused: Refused) -> None:
        """Count a refused message for `aggregator status`; log the first of its device and reason."""
        reason, detail = refused.reason, refused.detail[:MAX_DETAIL]
        if self._store.refusals.count(device, reason=reason, detail=detail, now_s=time.time()):
            event(log, logging.WARNING, "message refused", device=device, reason=reason, detail=detail)

    def take(self, device: str, frame: Frame) -> Receipt | bytes | None:
        """Add a frame as `OpenUploads.take` does."""
        if not self.is_stopped:
            return self._open.take(device, frame, now_s=time.monotonic())
        if frame.offset + len(frame.data) < frame.size_bytes:
            return None
        self._store.database.check_file()  # what can still be read may be lost
        if self._store.holds(device, frame.digest):
            return Receipt(digest=frame.digest, status="received")
        detail = "the aggregator cannot store anything at the moment"
        return Receipt(digest=frame.digest, status="refused", reason="no_space", detail=detail)

    def drop(self, devices: Iterable[str]) -> None:
        """Delete the unfinished uploads of devices, whose submissions an operator has deleted."""
        for device in devices:
            self._open.drop_device(device)

    def stop(self, error: StateError) -> None:
        """Stop the intake, because something could not be stored.

        Unfinished uploads are deleted: they may be what fills the disk.
        """
        if self.is_stopped:
            log.debug("%s", error)
            return
        self._trial_s = time.monotonic() + TRIAL_S
        self._is_known = False
        text = "intake stopped: free space, fix permissions, or restore the database or object store"
        event(log, logging.ERROR, text, reason=error)
        self._open.clear()
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
            for device, digest in self._open.expire(now_s - UNFINISHED_S):
                event(log, logging.INFO, "unfinished upload deleted", device=device, digest=digest)
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
        size_bytes = min(size_bytes, self._max_bytes, MAX_ROOM_BYTES)
        trial = self._folder / ".trial"
        with state_errors(trial):
            disk = shutil.disk_usage(self._folder)
            if disk.total and disk.free < size_bytes:  # some file systems say 0
                raise StateError(
                    f"not enough disk space in {self._folder}: {size_bytes / 1e6:.1f} MB needed, "
                    f"{disk.free / 1e6:.1f} MB available"
                )
            try:
                with trial.open("wb") as file:
                    file.write(bytes(TRIAL_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                trial.unlink(missing_ok=True)
        self._store.database.check_writable()
        self._store.blobs.check_writable()

    def _resume(self) -> bool:
        self._trial_s = time.monotonic() + TRIAL_S
        try:
            with state_errors(self._folder):
                room_bytes = int(shutil.disk_usage(self._folder).total * ROOM_SHARE)
            self.check_writable(room_bytes)
            self._store.database.check()
            self._open = self._begin()
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
