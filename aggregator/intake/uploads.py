"""Intake of device uploads, which needs a disk with room for one."""

import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from aggregator.intake.open_uploads import OpenUploads
from aggregator.intake.validation import Refused
from aggregator.storage import stop_reason
from aggregator.storage.store import Store
from protocol.errors import StateError, ThreadFailed
from protocol.log import event
from protocol.storage.blobstore import state_errors
from protocol.threads import start_thread
from protocol.wire.messages import Frame, Receipt

log = logging.getLogger(__name__)

UNFINISHED_S = 24 * 3600.0
"""Seconds without a frame after which an upload is deleted."""

TRIAL_BYTES = 64 * 1024

EXPIRY_S = 60.0
"""Seconds between searches for uploads that were given up."""

SEARCH_S = 600.0
"""Seconds between searches for damage in the database: each takes 1 ms per MB, on a thread of its own."""

MAX_ROOM_BYTES = 64 * 1024**2
"""Free space that a start needs, whatever is the size of an upload."""

ROOM_SHARE = 0.05
"""Share of the disk that a start needs, if that is less."""

MAX_DETAIL = 500


def missing_room(folder: Path, max_bytes: int) -> str:
    """Return what a state directory lacks for an upload; empty if there is room. Raises StateError."""
    free, needed = _free_and_needed(folder, max_bytes)
    return "" if free >= needed else f"{needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB available"


def _free_and_needed(folder: Path, max_bytes: int) -> tuple[float, int]:
    """Return the free bytes of a state directory's disk, and those that a start needs."""
    with state_errors(folder):
        disk = shutil.disk_usage(folder)
    needed = min(max_bytes, MAX_ROOM_BYTES, int(disk.total * ROOM_SHARE))
    return disk.free if disk.total else math.inf, needed  # some file systems say 0


class Uploads:
    """The uploads of devices, of at most `max_bytes`, until they are whole.

    `on_failure` is called from a thread that has failed; it must only enqueue the failure. Raises StateError if there
    is no room for an upload: the program ends, and is started again after a while.
    """

    def __init__(self, store: Store, *, max_bytes: int, on_failure: Callable[[ThreadFailed], None]) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._on_failure = on_failure
        self._expiry_s = self._search_s = 0.0
        self._search = threading.Thread()
        """The last search for damage; at first one that was never started."""
        self._open = self._begin()
        self._require_room()
        stop_reason.create(store.folder)

    def _begin(self) -> OpenUploads:
        """Delete the files of unfinished uploads: devices send again what has no receipt."""
        folder = self._store.folder / "incoming"
        with state_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
        return OpenUploads(
            folder=folder, max_bytes=self._max_bytes, holds=self._store.holds, room=self._file_room
        )

    def _file_room(self) -> float:
        """Return the bytes by which files may grow so that the next start has room."""
        free, needed = _free_and_needed(self._store.folder, self._max_bytes)
        return free - needed

    def _require_room(self) -> None:
        """Raise StateError unless there is room for an upload, also in the database."""
        folder = self._store.folder
        if missing := missing_room(folder, self._max_bytes):
            raise StateError(f"not enough disk space in {folder}: {missing}")
        trial = folder / ".trial"
        with state_errors(trial):
            try:
                with trial.open("wb") as file:
                    file.write(bytes(TRIAL_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                trial.unlink(missing_ok=True)
        self._store.database.check_writable()
        self._store.blobs.check_writable()

    def count_refusal(self, device: str, refused: Refused) -> None:
        """Count a refused message for `aggregator status`; log the first of its device and reason."""
        reason, detail = refused.reason, refused.detail[:MAX_DETAIL]
        if self._store.refusals.count(device, reason=reason, detail=detail, now_s=time.time()):
            event(log, logging.WARNING, "message refused", device=device, reason=reason, detail=detail)

    def take(self, device: str, frame: Frame) -> Receipt | bytes | None:
        """Add a frame as `OpenUploads.take` does."""
        return self._open.take(device, frame, now_s=time.monotonic())

    def drop(self, device: str) -> None:
        """Delete the unfinished uploads of a device, whose submissions an operator has deleted."""
        self._open.drop_device(device)

    def tick(self) -> None:
        """Let time pass; raises StateError if the database cannot be relied on."""
        now_s = time.monotonic()
        self._store.database.check_file()
        if now_s >= self._search_s and not self._search.is_alive():
            self._search_s = now_s + SEARCH_S
            run = self._store.database.search_damage
            self._search = start_thread(run, name="search for damage", on_failure=self._on_failure)
        if now_s >= self._expiry_s:
            self._expiry_s = now_s + EXPIRY_S
            for device, digest in self._open.expire(now_s - UNFINISHED_S):
                event(log, logging.INFO, "unfinished upload deleted", device=device, digest=digest)
