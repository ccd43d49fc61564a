"""Free space on the device's disk: what a task ships, and what is computed for it, leave a reserve.

The reserve is for what a device must be able to write at any time: records, receipts and evaluations, and for the other
programs of the machine.
"""

import sys
from pathlib import Path
from shutil import disk_usage

from edge_client.core.state import MissingSpace
from protocol.errors import StateError
from protocol.storage.blobstore import state_errors

RESERVE_SHARE = 0.05
"""Share of the disk that stays free."""

MAX_RESERVE_BYTES = 1024**3

RECORD_BYTES = 1024**2
"""Space without which nothing is begun: a count might be written, and its deletion not."""

_MB = 1_000_000


class DiskAlmostFull(StateError):
    """Something is not written because it would use the reserve; space may be freed."""

    def __init__(self, missing: MissingSpace) -> None:
        super().__init__(missing.reason)
        self.missing = missing


def free_bytes(folder: Path) -> int:
    """Return how many bytes may be written below a folder; negative if the reserve is in use.

    Raises:
        StateError: the folder cannot be read.
    """
    with state_errors(folder):
        disk = disk_usage(folder)
    if not disk.total:
        return sys.maxsize  # a file system that does not say
    return disk.free - min(int(disk.total * RESERVE_SHARE), MAX_RESERVE_BYTES)


def require_space_for_records(folder: Path) -> None:
    """Raise DiskAlmostFull if there is too little space for RECORD_BYTES, the reserve included."""
    with state_errors(folder):
        disk = disk_usage(folder)
    if disk.total and disk.free < RECORD_BYTES:
        require_space(folder, RECORD_BYTES, what="records")


def require_space(folder: Path, needed_bytes: int, *, what: str) -> None:
    """Raise DiskAlmostFull if writing so many bytes below a folder would use the reserve."""
    free = free_bytes(folder)
    if needed_bytes > free:
        needed, available = -(-needed_bytes // _MB), max(0, free) // _MB
        reason = (
            f"not enough disk space for {what}: {needed:,} MB needed, {available:,} MB available "
            f"({RESERVE_SHARE:.0%} of the disk, at most 1 GiB, stays free): free space on the device"
        )
        raise DiskAlmostFull(MissingSpace(folder, needed_bytes, reason))
