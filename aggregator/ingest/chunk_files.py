"""The bytes of unfinished transfers: a file for each, where they stand as they will in the whole.

A file is named by its device and the digest of the whole, so that what belongs at an offset is always the same: it
may be written again at any time, and nobody has to say where it ends.
"""

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from aggregator.ingest.reassembly import Arrived, Key, Pieces
from protocol.storage.blobstore import state_errors, sync
from protocol.wire.transfer import Ranges

_MOST_AT_ONCE = 512
"""Pieces in one call of the system, which takes 1024."""

Run = tuple[int, Sequence[bytes]]
"""An offset, and what stands there one after the other."""


class Partials:
    """The folder `incoming`.

    Args:
        folder: made if it is not there.

    Raises:
        StateError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="incoming")
        with state_errors(folder):
            folder.mkdir(exist_ok=True)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _path(self, key: Key) -> Path:
        device, digest = key
        return self._folder / f"{device}-{digest.hex()}"

    def write(self, arrived: Sequence[Arrived]) -> None:
        """Write pieces to where they belong, durably; several files in hardly more time than one.

        Raises:
            StateError: some cannot be written; what was there before is untouched.
        """
        paths = [self._path(each.key) for each in arrived]
        with state_errors(self._folder):
            has_new = not all(path.exists() for path in paths)
            written = [
                self._pool.submit(_write, path, list(runs_of(each.pieces)))
                for path, each in zip(paths, arrived, strict=True)
            ]
            wait(written)
            for done in written:
                done.result()
            if has_new:
                sync(self._folder)

    def read(self, key: Key, ranges: Ranges) -> Pieces:
        """What stands at these places.

        Raises:
            StateError: it cannot be read.
        """
        path = self._path(key)
        found = []
        with state_errors(path), path.open("rb") as file:
            for start, stop in ranges:
                file.seek(start)
                found.append((start, file.read(stop - start)))
        return found

    def reaches(self, key: Key, stop: int) -> bool:
        """Whether a transfer's file is as long as that."""
        path = self._path(key)
        return path.is_file() and path.stat().st_size >= stop

    def delete(self, keys: Collection[Key]) -> None:
        """Delete the files of transfers; what cannot be deleted stays until `keep_only`."""
        for key in keys:
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def keep_only(self, keys: Collection[Key]) -> None:
        """Delete every file but those of these transfers.

        Raises:
            StateError: they cannot be deleted.
        """
        names = {self._path(key).name for key in keys}
        with state_errors(self._folder):
            for file in self._folder.iterdir():
                if file.name not in names:
                    file.unlink()

    def try_to_write(self, size_bytes: int) -> None:
        """See whether there is room for so many bytes.

        Raises:
            StateError: there is not.
        """
        path = self._folder / ".trial"
        with state_errors(path):
            self._folder.mkdir(exist_ok=True)
            try:
                _write(path, [(0, [bytes(size_bytes)])])
            finally:
                path.unlink(missing_ok=True)


def runs_of(pieces: Pieces) -> Iterator[Run]:
    """Join pieces that follow each other, up to what is written at once."""
    stop = -1
    run: list[bytes] = []
    begin = 0
    for offset, data in sorted(pieces):
        if offset != stop or len(run) == _MOST_AT_ONCE:
            if run:
                yield begin, run
            begin, run = offset, []
        run.append(data)
        stop = offset + len(data)
    if run:
        yield begin, run


def _write(path: Path, runs: Sequence[Run]) -> None:
    """Write durably into a file, which is made if it is not there."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for offset, run in runs:
            written = os.pwritev(handle, run, offset)
            rest = memoryview(b"".join(run))[written:] if written < sum(map(len, run)) else memoryview(b"")
            while rest:  # a disk that is full says so at the second attempt only
                more = os.pwrite(handle, rest, offset + written)
                written, rest = written + more, rest[more:]
        os.fsync(handle)
    finally:
        os.close(handle)
