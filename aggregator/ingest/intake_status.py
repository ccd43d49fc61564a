"""Whether the aggregator takes what devices upload, for who looks from outside: told even when the disk is full.

The file gets its room when the aggregator starts and is overwritten in place, which needs no more of the disk.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from protocol.storage.blobstore import state_errors, write_atomically

_BYTES = 4096
_NAME = "intake.json"


class Stopped(msgspec.Struct, frozen=True):
    """Intake is stopped: nothing can be stored."""

    since_s: float
    """Unix seconds."""
    reason: str


def begin(folder: Path) -> None:
    """Make room for notices in the state folder, and say that all is well.

    Raises:
        StateError: the disk is full, or the folder cannot be written.
    """
    write_atomically(folder / _NAME, _padded(None))


def tell(folder: Path, stopped: Stopped | None) -> None:
    """Say that intake is stopped, or that it is not.

    Raises:
        StateError: the file is gone or cannot be written.
    """
    with state_errors(folder / _NAME), (folder / _NAME).open("r+b") as file:
        file.write(_padded(stopped))
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Stopped | None:
    """What was said last; None if all is well, or nothing was said."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / _NAME).read_bytes(), type=Stopped | None)
    return None


def _padded(stopped: Stopped | None) -> bytes:
    """The same number of bytes, whatever there is to say."""
    if stopped is not None:
        stopped = Stopped(stopped.since_s, stopped.reason[: _BYTES // 8])
    return msgspec.json.encode(stopped).ljust(_BYTES - 1) + b"\n"
