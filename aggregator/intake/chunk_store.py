"""Unfinished transfers on the disk: a file of bytes for each, and an index of the ranges that are durable.

The index is written after the bytes, so it never lists what a power cut can lose. A file is named by its device and
the payload's digest: the bytes at an offset are always the same, and may be written again at any time. All of it may
be deleted; devices then send again.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from shutil import disk_usage

import msgspec

from aggregator.intake.assembly import Assembly
from aggregator.intake.reassembly import Key, Transfer
from aggregator.storage.background import submit
from protocol.errors import StateError
from protocol.log import event
from protocol.storage.blobstore import state_errors, sync
from protocol.storage.database import Database
from protocol.wire.transfer import Ranges

log = logging.getLogger(__name__)

_MIGRATIONS = (
    """
    CREATE TABLE transfers (
        device TEXT NOT NULL, digest BLOB NOT NULL, size_bytes INTEGER NOT NULL, seen_s REAL NOT NULL,
        ranges BLOB NOT NULL, PRIMARY KEY (device, digest)
    ) STRICT, WITHOUT ROWID;
    """,
)
TRIAL_BYTES = 64 * 1024

_MAX_BUFFERS = 512
"""Buffers in one system call, which takes 1024."""

Piece = tuple[int, bytes]
"""An offset and bytes."""


class ChunkStore:
    """The file `incoming.sqlite`, replaced if damaged, and the folder `incoming` in the aggregator's state directory.

    Every method raises StateError if the disk cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "incoming"
        with state_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
        file = folder / "incoming.sqlite"
        self._index = Database(file, program="aggregator run", migrations=_MIGRATIONS, is_cache=True)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="incoming")

    def close(self) -> None:
        self._pool.shutdown()
        self._index.close()

    def load(self) -> list[Transfer]:
        """Return the unfinished transfers, by the time of their last frame; delete what cannot be continued."""
        found, lost = [], []
        rows = self._index.read(
            "SELECT device, digest, size_bytes, seen_s, ranges FROM transfers ORDER BY seen_s"
        )
        for device, digest, size_bytes, seen_s, encoded in rows:
            key, ranges = (device, digest), _decode(encoded)
            if ranges and self._reaches(key, ranges[-1][1]):
                found.append(Transfer(key, Assembly(digest, size_bytes, stored=ranges), seen_s, ranges))
            else:
                lost.append(key)
        if lost:
            event(log, logging.WARNING, "unfinished uploads lost: devices send again", uploads=len(lost))
            self.commit([], lost)
        names = {self._path(each.key).name for each in found}
        with state_errors(self._folder):
            for file in self._folder.iterdir():
                if file.name not in names:
                    file.unlink()
        return found

    def read(self, key: Key, ranges: Ranges) -> list[Piece]:
        """Return the bytes of a transfer's ranges, in order."""
        if not ranges:
            return []
        found = []
        with state_errors(self._path(key)), self._path(key).open("rb") as file:
            for start, stop in ranges:
                file.seek(start)
                found.append((start, file.read(stop - start)))
        return found

    def commit(self, arrived: Sequence[Transfer], ended: Sequence[Key]) -> None:
        """Store the new bytes of transfers, and delete transfers: all durable when this returns, or none of it.

        Several files are written and synced in little more time than one.
        """
        paths = [self._path(each.key) for each in arrived]
        with state_errors(self._folder):
            has_new = not all(path.exists() for path in paths)
            written = [
                submit(self._pool, _write, path, each.assembly.fresh)
                for path, each in zip(paths, arrived, strict=True)
            ]
            wait(written)
            for done in written:
                done.result()
            if has_new:
                sync(self._folder)
        rows = [
            (*each.key, each.assembly.size_bytes, each.seen_s, msgspec.msgpack.encode(each.assembly.ranges()))
            for each in arrived
        ]
        with self._index.transaction() as index:
            index.executemany("DELETE FROM transfers WHERE device = ? AND digest = ?", ended)
            index.executemany("INSERT OR REPLACE INTO transfers VALUES (?, ?, ?, ?, ?)", rows)
        for path in {self._path(key) for key in ended}.difference(paths):
            with contextlib.suppress(OSError):  # `load` deletes it
                path.unlink()

    def check_writable(self, size_bytes: int) -> None:
        """Raise StateError unless so many bytes are free, and TRIAL_BYTES can be written."""
        path = self._folder / ".trial"
        with state_errors(path):
            self._folder.mkdir(exist_ok=True)
            disk = disk_usage(self._folder)
            if disk.total and disk.free < size_bytes:  # some file systems say 0
                raise StateError(
                    f"not enough disk space in {self._folder}: {size_bytes / 1e6:.1f} MB needed, "
                    f"{disk.free / 1e6:.1f} MB available"
                )
            try:
                _write(path, [(0, bytes(TRIAL_BYTES))])
            finally:
                path.unlink(missing_ok=True)
        self._index.check_writable()

    def make_room(self, size_bytes: int) -> None:
        """Delete the transfer without a frame for longest, unless `check_writable` succeeds; its device sends again."""
        try:
            self.check_writable(size_bytes)
        except StateError:
            with state_errors(self._folder):
                for file in sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime)[:1]:
                    file.unlink()

    def _path(self, key: Key) -> Path:
        device, digest = key
        return self._folder / f"{device}-{digest.hex()}"

    def _reaches(self, key: Key, stop: int) -> bool:
        path = self._path(key)
        return path.is_file() and path.stat().st_size >= stop


def _decode(encoded: bytes) -> Ranges:
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.msgpack.decode(encoded, type=Ranges)
    return ()


def _write(path: Path, pieces: Sequence[Piece]) -> None:
    """Write pieces at their offsets, durably; the file is created if missing."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for offset, buffers in contiguous(pieces):
            written = os.pwritev(handle, buffers, offset)
            rest = memoryview(b"".join(buffers))[written:] if written < sum(map(len, buffers)) else b""
            while rest:  # a full disk raises at the second attempt only
                more = os.pwrite(handle, rest, offset + written)
                written, rest = written + more, rest[more:]
        os.fsync(handle)
    finally:
        os.close(handle)


def contiguous(pieces: Sequence[Piece]) -> Iterator[tuple[int, list[bytes]]]:
    """Group pieces by adjacency, up to `_MAX_BUFFERS` in a group; yields each group's offset and bytes."""
    begin, stop, buffers = 0, -1, list[bytes]()
    for offset, data in sorted(pieces):
        if offset != stop or len(buffers) == _MAX_BUFFERS:
            if buffers:
                yield begin, buffers
            begin, buffers = offset, []
        buffers.append(data)
        stop = offset + len(data)
    if buffers:
        yield begin, buffers
