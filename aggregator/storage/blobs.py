"""The aggregator's blobs by their digest: in a folder of its state directory, or elsewhere."""

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from aggregator.cluster_modules import BLOBS, cluster_module
from aggregator.storage.background import WriteBatch
from aggregator.storage.stored_values import BlobLocation
from protocol.errors import BlobLost, StateError
from protocol.storage.blobstore import BlobStore
from protocol.storage.facts import Facts


class Blobs(Protocol):
    """Content-addressed files; each method raises StateError if they cannot be used, see also `BlobStore`."""

    @property
    def location(self) -> str:
        """The place, as `open_blobs` takes it."""

    def check_writable(self) -> None:
        """Raise StateError if nothing can be written."""

    def __contains__(self, digest: bytes) -> bool: ...

    def digests(self) -> Iterator[bytes]: ...

    def put(self, data: bytes) -> bytes:
        """Store `data` and return its digest; a damaged blob is replaced."""

    def put_in_batch(self, data: bytes, *, digest: bytes, batch: WriteBatch) -> None:
        """Add `data`, whose digest was verified, to a batch unless it is stored or in the batch."""

    def is_whole(self, digest: bytes) -> bool:
        """Return True if a blob exists and its digest is correct."""

    def size(self, digest: bytes) -> int:
        """Return the bytes of a blob that `verified_path` has returned."""

    def path(self, digest: bytes) -> Path:
        """Return the path of a blob, which exists once `verified_path` has returned it."""

    def read(self, digest: bytes) -> bytes:
        """Return a blob after verifying its digest; raises BlobLost if it is missing or damaged."""

    def read_each(self, digests: Iterable[bytes]) -> Iterator[bytes | BlobLost]:
        """Yield each blob, verified, or the error of one that is lost."""

    def verified_path(self, digest: bytes) -> Path:
        """Return a blob's path after verifying its digest; raises BlobLost if it is missing or damaged."""

    def delete(self, digests: Collection[bytes]) -> None:
        """Delete blobs, damaged ones too, if they exist."""

    def delete_unneeded(self, needed: Callable[[Collection[bytes]], Collection[bytes]]) -> Iterator[None]:
        """Delete blobs that are not needed, except for those that are being written; yields after each slice of them.

        `needed` returns the digests of a slice that are needed when the slice is deleted.
        """


class FolderBlobs(BlobStore):
    """Blobs in a folder of the state directory."""

    @property
    def location(self) -> str:
        return str(self.folder)

    def check_writable(self) -> None:
        """Raise StateError if the folder was deleted; the database is on the same disk, and is checked by itself."""
        if not self.folder.is_dir():
            raise StateError(f"cannot use {self.folder}: the folder was deleted: restart the aggregator")

    def put_in_batch(self, data: bytes, *, digest: bytes, batch: WriteBatch) -> None:
        if (path := self.path(digest)) not in batch and not self.is_whole(digest):
            batch.add(path, data)

    def read_each(self, digests: Iterable[bytes]) -> Iterator[bytes | BlobLost]:
        return (blob_or_loss(self, digest) for digest in digests)


def blob_or_loss(blobs: Blobs, digest: bytes) -> bytes | BlobLost:
    try:
        return blobs.read(digest)
    except BlobLost as error:
        return error


def open_blobs(location: str) -> Blobs:
    """Return the blobs at a location for a job, which makes no copies that outlive it.

    Args:
        location: the folder of a state directory, or a URL.
    """
    if "://" in location:
        elsewhere: Blobs = cluster_module(BLOBS, location).open_blobs(location)
        return elsewhere
    return FolderBlobs(Path(location), damaged=Path(location).with_name("damaged"))


def blobs_of(folder: Path, facts: Facts, configured: str) -> Blobs:
    """Return the blobs of an aggregator: at the URL `configured`, or else where its database says they are.

    Raises:
        ConfigError: the place is of no known kind, or another aggregator's.
        StateError: it cannot be used, or is not the one that the database refers to.
    """
    stored = facts.get(BlobLocation)
    location = configured or (stored.location if stored else "")
    if not location:
        return open_blobs(str(folder / "blobs"))
    elsewhere: Blobs = cluster_module(BLOBS, location).blobs_of(folder, facts, location)
    return elsewhere
