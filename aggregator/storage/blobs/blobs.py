"""The aggregator's blobs: in a folder of its state directory, or in an object store."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from aggregator.storage.blobs.object_blobs import ObjectBlobs
from aggregator.storage.stored_values import BlobLocation
from protocol.errors import ConfigError
from protocol.storage.blobstore import BlobStore, WriteBatch
from protocol.storage.facts import Facts


class Blobs(Protocol):
    """Content-addressed files, as `protocol.storage.blobstore.BlobStore` describes them."""

    @property
    def location(self) -> str:
        """The folder, or s3://BUCKET/PREFIX, as `open_blobs` takes it."""

    @property
    def folder(self) -> Path:
        """The folder of all paths."""

    def create(self) -> None:
        """Create the folder if it does not exist."""

    def is_missing(self) -> bool:
        """Return True if the folder of the blobs was deleted."""

    def check_writable(self) -> None:
        """Check that blobs can be stored; raises StateError."""

    def __contains__(self, digest: bytes) -> bool: ...

    def digests(self) -> Iterator[bytes]:
        """Yield the digest of every blob."""

    def put(self, data: bytes) -> bytes:
        """Store `data` durably and return its digest."""

    def put_in_batch(self, data: bytes, *, digest: bytes, batch: WriteBatch) -> None:
        """Add `data`, whose digest was verified, to a batch."""

    def is_whole(self, digest: bytes) -> bool:
        """Return True if a blob exists and its digest is correct."""

    def read(self, digest: bytes) -> bytes:
        """Return a blob after verifying its digest; raises BlobLost, or StateError if it cannot be read."""

    def verified_path(self, digest: bytes) -> Path:
        """Return the path of a verified blob; raises what `read` does."""

    def path(self, digest: bytes) -> Path:
        """Return the path that `verified_path` returns, whether the file exists or not."""

    def size(self, digest: bytes) -> int:
        """Return the bytes of the file at `path`; raises StateError if it cannot be read."""

    def delete(self, digests: Collection[bytes]) -> None:
        """Delete blobs if they exist; raises StateError if one cannot be deleted."""

    def keep_only(self, digests: Collection[bytes]) -> None:
        """Delete all other blobs, except for new ones of an object store."""


def open_blobs(location: str) -> Blobs:
    """Return the blobs at a location for a job, which makes no copies that outlive it.

    Args:
        location: the folder of a state directory, or s3://BUCKET/PREFIX.
    """
    if "://" in location:
        return ObjectBlobs(location)
    return BlobStore(Path(location), damaged=Path(location).with_name("damaged"))


def blobs_of(folder: Path, facts: Facts, given: str) -> Blobs:
    """Return the blobs of an aggregator: where `given` says, or else where its database says they are.

    The blobs of the folder are copied to an object store that is given for the first time.

    Raises:
        ConfigError: the object store is another aggregator's.
        StateError: it cannot be used, or is not the one that the database refers to.
    """
    stored = facts.get(BlobLocation) or BlobLocation(owner=uuid4().hex)
    location = given.rstrip("/") or stored.location
    if not location:
        return open_blobs(str(folder / "blobs"))
    if "://" not in location:
        raise ConfigError(
            "expected s3://BUCKET/PREFIX for --blobs; without it, blobs are in the state directory"
        )
    blobs = ObjectBlobs(location, cache=folder / "copies")
    is_first = not stored.location
    if is_first:
        facts.put(stored)  # before the claim: an interrupted start claims it again
    blobs.claim(stored.owner, is_new=is_first)
    if is_first and (folder / "blobs").is_dir():
        before = BlobStore(folder / "blobs")
        for digest in before.digests():
            if before.is_whole(digest):
                blobs.put(before.read(digest))
    if location != stored.location:
        facts.put(BlobLocation(owner=stored.owner, location=location))
    return blobs
