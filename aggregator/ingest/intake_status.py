"""The intake's status for `aggregator status`, written even when the disk is full.

The file gets its room when the aggregator starts, and is overwritten in place, which needs no more.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from protocol.storage.blobstore import state_errors, write_atomically

_BYTES = 4096
_NAME = "intake.json"


class Stopped(msgspec.Struct, frozen=True):
    """The intake is stopped: nothing can be stored, since a time in unix seconds, for a reason."""

    since_s: float
    reason: str


def create(folder: Path) -> None:
    """Create the file in the state directory, for an intake that works.

    Raises:
        StateError: the disk is full, or the folder cannot be written.
    """
    write_atomically(folder / _NAME, _padded(None))


def write(folder: Path, stopped: Stopped | None) -> None:
    """Overwrite the status; None if the intake works.

    Raises:
        StateError: the file is gone or cannot be written.
    """
    with state_errors(folder / _NAME), (folder / _NAME).open("r+b") as file:
        file.write(_padded(stopped))
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Stopped | None:
    """Return the status; None if the intake works, or the file is missing or damaged."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / _NAME).read_bytes(), type=Stopped | None)
    return None


def _padded(stopped: Stopped | None) -> bytes:
    """Return JSON of constant size."""
    if stopped is not None:
        stopped = Stopped(stopped.since_s, stopped.reason[: _BYTES // 8])
    return msgspec.json.encode(stopped).ljust(_BYTES - 1) + b"\n"
