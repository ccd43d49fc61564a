"""Why `serve` has stopped, for `aggregator status` and `/readyz`: written even when the disk is full.

The file `intake.json` gets its room when the aggregator starts, and is overwritten in place, which needs no more.
"""

import contextlib
import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from aggregator.storage.stored_values import UnixSeconds
from protocol.storage.blobstore import state_errors, write_atomically

_BYTES = 4096
_NAME = "intake.json"


class StopReason(msgspec.Struct, frozen=True):
    """Since when uploads cannot be stored, and why; empty while they can."""

    stopped_s: Annotated[UnixSeconds | None, Meta(description="Since when uploads cannot be stored.")] = None
    reason: str = ""


def create(folder: Path) -> None:
    """Create the file in the state directory; raises StateError if the disk is full or cannot be written."""
    write_atomically(folder / _NAME, _padded(StopReason()))


def write(folder: Path, stopped: StopReason) -> None:
    """Overwrite the reason; raises StateError if the file is gone or cannot be written."""
    with state_errors(folder / _NAME), (folder / _NAME).open("r+b") as file:
        file.write(_padded(stopped))
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path, *, is_running: bool = False) -> StopReason:
    """Return the reason; an empty one if the file is missing or damaged.

    A running aggregator whose filesystem has become read-only cannot write it: it has stopped since the last write.
    """
    found = StopReason()
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        found = msgspec.json.decode((folder / _NAME).read_bytes(), type=StopReason)
    if found.stopped_s is None and is_running:
        with contextlib.suppress(OSError):
            if os.statvfs(folder).f_flag & os.ST_RDONLY:
                written_s = max(file.stat().st_mtime for file in folder.iterdir())
                return StopReason(
                    written_s, "the filesystem is read-only: check the disk, and mount it for writing"
                )
    return found


def _padded(stopped: StopReason) -> bytes:
    """Return JSON of constant size."""
    bounded = StopReason(stopped.stopped_s, stopped.reason[: _BYTES // 8])
    return msgspec.json.encode(bounded).ljust(_BYTES - 1) + b"\n"
