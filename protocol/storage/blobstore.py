"""Blobs on disk: files named by their sha256, written whole or not at all, and downloads that can go on.

A name is a promise: what stands under it has that digest. A download grows in `partial/` from its first byte
on, so that its length says all about what is there, and gets its name only once its digest is right.
"""

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from protocol.errors import StateError, TransferError
from protocol.wire.codec import digest_of

LONGEST_WRITE_S = 3600.0


@contextlib.contextmanager
def state_errors(path: Path) -> Iterator[None]:
    """Turn a failure of the file system into one clear line.

    Raises:
        StateError: the body met an OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StateError(f"cannot use {error.filename or path}: {reason}") from error


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Put `data` at `path`, durable and whole: a reader sees the old file or the new one, nothing between.

    Nobody can read more of it than `mode` lets them, at any moment.

    Raises:
        StateError: the disk is full, or the folder cannot be written.
    """
    temporary = _write_beside(path, data, mode)
    with state_errors(path):
        temporary.replace(path)
        sync(path.parent)


def _write_beside(path: Path, data: bytes, mode: int = 0o644, *, is_for_later: bool = False) -> Path:
    """Write what shall become `path` under another name, durably; nothing of it stays where that fails.

    What is for later leaves the kernel's memory at once: the next file takes that, instead of memory that was never
    used, which on a virtual machine costs more than the write.
    """
    with state_errors(path), contextlib.ExitStack() as unfinished:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:16]}-")
        temporary = Path(name)
        unfinished.callback(temporary.unlink, missing_ok=True)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if is_for_later and sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        temporary.chmod(mode)  # what mkstemp makes is for its owner alone
        unfinished.pop_all()
    return temporary


class WriteBatch:
    """Files that are written as `write_atomically` does, several at a time, while the program goes on.

    A disk takes several files at once in hardly more time than one.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="writing")
        self._written: dict[Path, Future[Path]] = {}

    def add(self, path: Path, data: bytes) -> None:
        """Begin to write a file; its name comes with `finish`."""
        if path not in self._written:
            self._written[path] = self._pool.submit(_write_beside, path, data, is_for_later=True)

    def finish(self) -> None:
        """Wait until all files are durable, and give them their names.

        Raises:
            StateError: one of them cannot be written; then none gets its name.
        """
        written, self._written = self._written, {}
        wait(written.values())
        failures = [failure for each in written.values() if (failure := each.exception())]
        with state_errors(Path()):
            for path, each in written.items():
                if failures and not each.exception():
                    each.result().unlink(missing_ok=True)
                elif not failures:
                    each.result().replace(path)
            for folder in {path.parent for path in written}:
                sync(folder)
        if failures:
            raise failures[0]

    def give_up(self) -> None:
        """Leave nothing of the files that were added."""
        with contextlib.suppress(StateError):
            self._written = {path: each for path, each in self._written.items() if not each.cancel()}
            wait(self._written.values())
            for each in self._written.values():
                if not each.exception():
                    each.result().unlink(missing_ok=True)
            self._written = {}


def sync(path: Path) -> None:
    """Make what is in a file durable, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> bytes:
    """The sha256 of a file, read piece by piece.

    Raises:
        StateError: it cannot be read.
    """
    with state_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


class BlobStore:
    """A folder of blobs.

    Args:
        folder: made if it is not there.

    Raises:
        StateError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._partial = folder / "partial"
        with state_errors(folder):
            self._partial.mkdir(parents=True, exist_ok=True)

    def path(self, digest: bytes) -> Path:
        """Where the blob stands, or would stand."""
        return self.folder / digest.hex()

    def __contains__(self, digest: bytes) -> bool:
        return self.path(digest).is_file()

    def digests(self) -> Iterator[bytes]:
        """The name of every blob that is there."""
        for file in self.folder.iterdir():
            with contextlib.suppress(ValueError):
                yield bytes.fromhex(file.name)

    def put(self, data: bytes) -> bytes:
        """Store `data`; returns its digest. Storing it again changes nothing, but mends what the disk has changed."""
        digest = digest_of(data)
        if not self._is_whole(digest):
            write_atomically(self.path(digest), data)
        return digest

    def put_soon(self, data: bytes, *, digest: bytes, together: WriteBatch) -> None:
        """Store `data`, whose digest was checked, with other files; it is there once these are."""
        if not self._is_whole(digest):
            together.add(self.path(digest), data)

    def _is_whole(self, digest: bytes) -> bool:
        return digest in self and file_digest(self.path(digest)) == digest

    def read(self, digest: bytes) -> bytes:
        """The blob's bytes, checked against their name.

        Raises:
            StateError: it is not there, or the disk has changed it; then it is deleted.
        """
        with state_errors(self.path(digest)):
            data = self.path(digest).read_bytes()
        if digest_of(data) != digest:
            # It is of no use to anybody, and in the way of fetching it again.
            with contextlib.suppress(OSError):
                self.path(digest).unlink()
            raise StateError(f"{self.path(digest)} was changed on disk and is deleted: start again")
        return data

    def partial_bytes(self, digest: bytes) -> int:
        """How many bytes of an unfinished download are there: it goes on from this offset."""
        partial = self._partial / digest.hex()
        return partial.stat().st_size if partial.is_file() else 0

    def append(self, digest: bytes, data: bytes) -> None:
        """Add the next bytes of a download."""
        partial = self._partial / digest.hex()
        with state_errors(partial), partial.open("ab") as file:
            file.write(data)

    def finish(self, digest: bytes) -> Path:
        """Give a complete download its name.

        Raises:
            TransferError: its bytes are not the digest's; they are thrown away.
        """
        partial = self._partial / digest.hex()
        got = file_digest(partial)
        if got != digest:
            partial.unlink(missing_ok=True)
            raise TransferError(f"expected sha256 {digest.hex()}, got {got.hex()}: will fetch it again")
        with state_errors(partial), partial.open("rb+") as file:
            os.fsync(file.fileno())
            partial.replace(self.path(digest))
            sync(self.folder)
        return self.path(digest)

    def keep_only(self, digests: Collection[bytes]) -> None:
        """Delete every blob and unfinished download but these, and not what is being written at the moment."""
        names = {digest.hex() for digest in digests}
        for folder in (self.folder, self._partial):
            for file in folder.iterdir():
                with contextlib.suppress(OSError):
                    if file.is_file() and file.name not in names and not _is_being_written(file):
                        file.unlink()


def _is_being_written(file: Path) -> bool:
    """Whether it is the unfinished file of a `write_atomically` that may still be at work."""
    return file.name.startswith(".") and time.time() - file.stat().st_mtime < LONGEST_WRITE_S
