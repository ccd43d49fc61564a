"""Failures of heads in the programs that predict, counted in a file for each head.

A head is a graph from outside, and it can crash the program that runs it. The count is written before a head is tried
and deleted after it worked. A program that opens a head reads the counts, also while no service runs.
"""

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from edge_client.store.app_files import FOLDER, read_file, write_file
from edge_client.store.disk_space import require_space_for_records
from protocol.errors import RuntimeMissing, StateError
from protocol.storage.blobstore import state_errors, sync
from protocol.storage.folder_lock import FolderLock

MAX_FAILURES = 3
"""Failures in a row after which a head is not used; power loss counts as well."""

LOCK_WAIT_S = 0.1
"""`failures` of another program holds the lock for a moment."""

_Starts = Annotated[int, msgspec.Meta(ge=0)]


class HeadTrials:
    """Starts of each head since it last worked, in a state folder; of several programs at once with it, one counts."""

    def __init__(self, state: Path) -> None:
        self._folder = state / FOLDER / "trials"

    def create(self) -> None:
        """Create the folder; raises StateError if that fails."""
        with state_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    def failures(self, key: bytes) -> int:
        """Return how often in a row a head has failed; a trial that still runs does not count."""
        starts = self._starts(key)
        return starts - 1 if starts and self._new_lock(key).is_taken() else starts

    @contextlib.contextmanager
    def count(self, key: bytes) -> Iterator[None]:
        """Count the body, which opens and runs a head, as a failure until it has worked.

        Its errors count as its crashes do, except those that are not the head's, and an end by the user. Nothing is
        counted on a disk that is read-only or full: the deletion of the count might fail.
        """
        lock = self._new_lock(key)
        before = self._begin(key, lock)
        try:
            try:
                yield
            except (StateError, RuntimeMissing, KeyboardInterrupt, SystemExit):
                if before is not None:
                    self._write(key, before)
                raise
            if before is not None:
                self._write(key, 0)
        finally:
            lock.release()

    def keep_only(self, keys: Collection[bytes]) -> None:
        """Delete the counts and locks of all other heads."""
        names = {key.hex() for key in keys}
        with contextlib.suppress(OSError):
            for file in self._folder.iterdir():
                if file.stem not in names and not file.name.startswith("."):  # one that is being written
                    file.unlink()

    def _begin(self, key: bytes, lock: FolderLock) -> int | None:
        """Count a start, and return the number of earlier ones; None if it is not counted."""
        with contextlib.suppress(StateError):
            require_space_for_records(self._folder)
            if lock.take(wait_s=LOCK_WAIT_S):
                before = self._starts(key)
                self._write(key, before + 1)
                return before
        return None

    def _starts(self, key: bytes) -> int:
        starts: int | None = read_file(self._folder / key.hex(), _Starts)
        return starts or 0

    def _write(self, key: bytes, starts: int) -> None:
        file = self._folder / key.hex()
        if starts:
            write_file(file, starts)
            return
        with state_errors(file):
            file.unlink(missing_ok=True)
            sync(self._folder)

    def _new_lock(self, key: bytes) -> FolderLock:
        """Return the lock that a program holds while it tries a head; a thread needs one of its own."""
        return FolderLock(self._folder, f"{key.hex()}.lock")
