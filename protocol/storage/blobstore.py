"""Content-addressed files: named by their sha256, written atomically, with downloads that can be resumed.

A download grows in `partial/` from its first byte on, so that its length tells where to resume, and is renamed once
its digest is verified.
"""

import contextlib
import errno
import fnmatch
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from io import BufferedReader
from itertools import islice
from pathlib import Path

from protocol.errors import BlobLost, StateError, TransferError
from protocol.wire.codec import digest_of

SLICE_FILES = 500
"""Files that `delete_unneeded` decides about at once."""

MAX_DAMAGED = 16
"""Damaged blobs that are kept."""

MAX_WRITE_S = 3600.0
"""Temporary files older than this were left by a process that has ended."""

TEMPORARY = ".*-????????"
"""Pattern of the names of temporary files."""

TEMPORARY_FOLDER = ".enroll-????????"
"""Pattern of the names of the folders with private keys that an earlier version wrote enrollments to."""


@contextlib.contextmanager
def state_errors(path: Path) -> Iterator[None]:
    """Convert an OSError of the body to a StateError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StateError(f"cannot use {error.filename or path}: {reason}") from error


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file durably: a reader sees the old contents or the new ones, with no more access than `mode`.

    Raises:
        StateError: the disk is full, or the folder cannot be written.
    """
    temporary = write_beside(path, data, mode)
    with state_errors(path), deleted_on_failure(temporary):
        temporary.replace(path)
        sync(path.parent)


def create_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Create a file durably, unless it exists: of several processes that try, one succeeds. Raises StateError."""
    temporary = write_beside(path, data, mode)
    with state_errors(path), deleted_on_failure(temporary):
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            temporary.replace(path)
        temporary.unlink(missing_ok=True)
        sync(path.parent)


@contextlib.contextmanager
def deleted_on_failure(temporary: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def delete_temporary_files(folder: Path, *, is_only_writer: bool = False) -> None:
    """Delete what killed processes have left: temporary files below a folder, and temporary folders directly in it.

    Other processes may write, rename and delete meanwhile, and a file that one of them may be writing stays; with
    `is_only_writer`, none does. Raises StateError if the folder cannot be read.
    """
    with state_errors(folder):
        for left in folder.glob(TEMPORARY_FOLDER):
            if left.is_dir() and not left.is_symlink():
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(left)
        for parent, _, names in os.walk(folder, onerror=_raise_unless_missing):
            for name in fnmatch.filter(names, TEMPORARY):
                file = Path(parent, name)
                if is_only_writer or not _is_being_written(file):
                    file.unlink(missing_ok=True)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def write_beside(path: Path, data: bytes, mode: int = 0o644, *, is_for_later: bool = False) -> Path:
    """Write the contents of `path` durably to a temporary file, which is deleted on failure.

    With `is_for_later` the file leaves the page cache, which the next file can then use: on a virtual machine,
    allocating new memory takes longer than the write.
    """
    with state_errors(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:16]}-")
        temporary = Path(name)
        with deleted_on_failure(temporary):
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                if is_for_later and sys.platform == "linux":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            temporary.chmod(mode)  # mkstemp makes it readable by its owner only
    return temporary


def sync(path: Path) -> None:
    """Make a file's contents, or the names in a folder, durable.

    Some file systems, such as the shared folders of virtual machines, cannot sync a folder, and SQLite does without.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(handle)


def file_digest(path: Path) -> bytes:
    """Return the sha256 of a file; raises StateError if the file cannot be read."""
    with state_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


class BlobStore:
    """A folder of blobs, which is created if it does not exist; raises StateError if it cannot be used.

    Damaged blobs are moved to the folder `damaged`, which keeps the last `MAX_DAMAGED`, and without one deleted.
    """

    def __init__(self, folder: Path, *, damaged: Path | None = None) -> None:
        self.folder = folder
        self._damaged = damaged
        self._partial = folder / "partial"
        self.create()

    def create(self) -> None:
        with state_errors(self.folder):
            self._partial.mkdir(parents=True, exist_ok=True)

    def path(self, digest: bytes) -> Path:
        """Return the path of a blob, whether it exists or not."""
        return self.folder / digest.hex()

    def size(self, digest: bytes) -> int:
        """Return the bytes of a blob; raises StateError if it cannot be read."""
        path = self.path(digest)
        with state_errors(path):
            return path.stat().st_size

    def __contains__(self, digest: bytes) -> bool:
        path = self.path(digest)
        with state_errors(path):
            return path.is_file()

    def digests(self) -> Iterator[bytes]:
        with state_errors(self.folder):
            files = list(self.folder.iterdir())
        return filter(None, (_digest_of(file.name) for file in files))

    def put(self, data: bytes) -> bytes:
        """Store `data` and return its digest; a blob that was damaged on disk is replaced."""
        digest = digest_of(data)
        if not self.is_whole(digest):
            write_atomically(self.path(digest), data)
        return digest

    def is_whole(self, digest: bytes) -> bool:
        """Return True if a blob exists and its digest is correct."""
        with contextlib.suppress(BlobLost):
            self.verified_path(digest)
            return True
        return False

    def read(self, digest: bytes) -> bytes:
        """Return a blob after verifying its digest.

        Raises:
            BlobLost: the blob does not exist, or was damaged on disk; a damaged one is deleted or moved.
            StateError: it cannot be read for another reason.
        """
        data = self._read(digest, lambda file: file.read())
        if digest_of(data) != digest:
            raise self._deleted(digest)
        return data

    def verified_path(self, digest: bytes) -> Path:
        """Return a blob's path after verifying its digest; raises what `read` does."""
        if self._read(digest, lambda file: hashlib.file_digest(file, "sha256").digest()) != digest:
            raise self._deleted(digest)
        return self.path(digest)

    def _read(self, digest: bytes, read: Callable[[BufferedReader], bytes], *, attempts: int = 2) -> bytes:
        """Read from a file; one that is missing, or that the disk fails to read twice, is lost."""
        try:
            with self.path(digest).open("rb") as file:
                return read(file)
        except OSError as error:
            text = f"cannot use {self.path(digest)}: {error.strerror or error}"
            if error.errno == errno.EIO and attempts > 1:
                return self._read(digest, read, attempts=attempts - 1)
            if error.errno == errno.EIO:
                raise self._deleted(digest) from error
            is_missing = error.errno in (errno.ENOENT, errno.EISDIR)
            raise (BlobLost(digest, text) if is_missing else StateError(text)) from error

    def _deleted(self, digest: bytes) -> BlobLost:
        """Delete a damaged blob or move it, so that it is downloaded again, and return the error to raise."""
        path, text = self.path(digest), "was damaged on disk and has been deleted"
        with contextlib.suppress(OSError):
            if self._damaged is None:
                path.unlink()
            else:
                self._damaged.mkdir(exist_ok=True)
                path.replace(self._damaged / path.name)
                text = f"was damaged on disk and has been moved to {self._damaged}"
                moved = sorted(self._damaged.iterdir(), key=lambda file: file.stat().st_ctime)
                for old in moved[:-MAX_DAMAGED]:
                    old.unlink()
        return BlobLost(digest, f"{path} {text}")

    def partial_bytes(self, digest: bytes) -> int:
        """Return the size of an unfinished download, which is the offset to resume at."""
        partial = self._partial / digest.hex()
        with state_errors(partial):
            return partial.stat().st_size if partial.is_file() else 0

    def append(self, digest: bytes, data: bytes) -> None:
        partial = self._partial / digest.hex()
        with state_errors(partial), partial.open("ab") as file:
            file.write(data)

    def finish(self, digest: bytes) -> Path:
        """Verify a complete download, and rename it; deletes it and raises TransferError if the digest is wrong."""
        partial = self._partial / digest.hex()
        got = file_digest(partial)
        if got != digest:
            with state_errors(partial):
                partial.unlink(missing_ok=True)
            raise TransferError(f"expected sha256 {digest.hex()}, got {got.hex()}: downloading it again")
        with state_errors(partial), partial.open("rb+") as file:
            os.fsync(file.fileno())
            partial.replace(self.path(digest))
            sync(self.folder)
        return self.path(digest)

    def delete(self, digests: Collection[bytes]) -> None:
        """Delete blobs, durably and damaged ones too, if they exist; raises StateError if one cannot be deleted."""
        for folder in filter(None, (self.folder, self._damaged)):
            with state_errors(folder):
                for digest in digests:
                    (folder / digest.hex()).unlink(missing_ok=True)
                if folder.is_dir():
                    sync(folder)

    def keep_only(self, digests: Collection[bytes]) -> None:
        """Delete all other blobs and unfinished downloads, except for files that are being written."""
        kept = frozenset(digests)
        for _ in self.delete_unneeded(kept.intersection):
            pass

    def delete_unneeded(self, needed: Callable[[Collection[bytes]], Collection[bytes]]) -> Iterator[None]:
        """Delete blobs and unfinished downloads that are not needed, except for files that are being written.

        Yields after each `SLICE_FILES` files. `needed` returns the digests of the next files that are needed when
        these files are deleted, whatever was needed when the folder was opened.
        """
        for folder in (self.folder, self._partial):
            with state_errors(folder), os.scandir(folder) as entries:
                files = (entry for entry in entries if entry.is_file())
                while paths := {file.name: file.path for file in islice(files, SLICE_FILES)}:
                    _delete_unneeded(paths, needed)
                    if len(paths) == SLICE_FILES:
                        yield


def _delete_unneeded(
    paths: Mapping[str, str], needed: Callable[[Collection[bytes]], Collection[bytes]]
) -> None:
    """Delete files, given by their names, that are not needed."""
    digests = set(filter(None, map(_digest_of, paths)))
    kept = {digest.hex() for digest in needed(digests)}
    for name, path in paths.items():
        if name not in kept and not _is_being_written(file := Path(path)):
            with contextlib.suppress(OSError):
                file.unlink()


def _digest_of(name: str) -> bytes:
    """Return the digest that a file is named by; empty if it is not a blob's."""
    try:
        return bytes.fromhex(name)
    except ValueError:
        return b""


def _is_being_written(file: Path) -> bool:
    try:
        found = file.stat()
    except FileNotFoundError:  # it has its final name
        return True
    # With a second name it is complete, and as young as what is written under that name.
    return file.name.startswith(".") and found.st_nlink == 1 and time.time() - found.st_mtime < MAX_WRITE_S
