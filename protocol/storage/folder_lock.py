"""A folder that belongs to one program at a time, told by a lock that ends with the process, however it ends.

A process number in a file would not do: numbers are used again, and in every container the first is 1.
"""

import fcntl
import time
from pathlib import Path
from typing import IO

from protocol.storage.blobstore import state_errors

PATIENCE_S = 0.5
"""Who looks whether a folder is taken holds its lock for a moment."""


class FolderLock:
    """The lock of a folder.

    Args:
        folder: what is to belong to one program.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "lock"
        self._held: IO[bytes] | None = None

    def take(self) -> bool:
        """Take the folder for as long as this process lives; returns whether it was free.

        Raises:
            StateError: the folder cannot be written.
        """
        with state_errors(self._file):
            held = self._file.open("ab")
        deadline = time.monotonic() + PATIENCE_S
        while not _lock(held, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                held.close()
                return False
            time.sleep(0.02)
        self._held = held
        return True

    def release(self) -> None:
        """Leave the folder to others."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def is_taken(self) -> bool:
        """Whether a program holds the folder, this one included.

        Raises:
            StateError: the folder cannot be read.
        """
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
