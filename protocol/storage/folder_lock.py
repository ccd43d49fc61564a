"""A lock on a folder, which the kernel releases when the process ends, however it ends.

A process id in a file would not do: ids are reused, and the first one in every container is 1.
"""

import fcntl
import time
from pathlib import Path
from typing import IO

from protocol.storage.blobstore import state_errors

TAKE_TIMEOUT_S = 0.5
"""`is_taken` of another process holds the lock for a moment."""


class FolderLock:
    """A lock file in a folder that one program may hold at a time; raises StateError if it cannot be used."""

    def __init__(self, folder: Path, name: str = "lock") -> None:
        self._file = folder / name
        self._held: IO[bytes] | None = None

    def take(self, *, wait_s: float = TAKE_TIMEOUT_S) -> bool:
        """Lock the folder until `release` or the end of the process; returns whether it was free."""
        with state_errors(self._file):
            held = self._file.open("ab")
        deadline = time.monotonic() + wait_s
        with state_errors(self._file):
            while not _lock(held, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    held.close()
                    return False
                time.sleep(0.02)
        self._held = held
        return True

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    @property
    def is_held(self) -> bool:
        return self._held is not None

    def is_taken(self) -> bool:
        """Return whether a program, this one included, holds the lock."""
        if not self._file.exists():
            return False
        with state_errors(self._file), self._file.open("rb") as file:
            return not _lock(file, fcntl.LOCK_SH)


def _lock(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
