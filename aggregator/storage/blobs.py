"""The aggregator's blobs by their digest: in a folder of its state directory, or in an object store."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from uuid import uuid4

from aggregator.storage.background import WriteBatch, submit
from aggregator.storage.stored_values import BlobLocation
from protocol.cli import require_packages
from protocol.errors import BlobLost, StateError
from protocol.storage.blobstore import BlobStore
from protocol.storage.facts import Facts

if TYPE_CHECKING:
    from aggregator.storage.object_blobs import ObjectBlobs

Blobs: TypeAlias = "FolderBlobs | ObjectBlobs"
"""Content-addressed files, by the methods that both have."""

AHEAD = 8
"""Blobs that are in memory or on their way, at most."""

AHEAD_BYTES = 64 * 1024**2
"""Their bytes, if none is larger than the largest one so far; a larger blob is read alone."""


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
        """Add `data`, whose digest was verified, to a batch."""
        if (path := self.path(digest)) not in batch and not self.is_whole(digest):
            batch.add(path, data)


def object_store(location: str, *, cache: Path | None = None) -> "ObjectBlobs":
    """Return the blobs at s3://BUCKET/PREFIX, as `ObjectBlobs` does; raises RuntimeMissing without obstore."""
    require_packages("obstore", extras="cluster")
    from aggregator.storage.object_blobs import ObjectBlobs

    return ObjectBlobs(location, cache=cache)


def open_blobs(location: str) -> Blobs:
    """Return the blobs at a location for a job, which makes no copies that outlive it.

    Args:
        location: the folder of a state directory, or s3://BUCKET/PREFIX.
    """
    if "://" in location:
        return object_store(location)
    return FolderBlobs(Path(location), damaged=Path(location).with_name("damaged"))


def blobs_of(folder: Path, facts: Facts, configured: str) -> Blobs:
    """Return the blobs of an aggregator: at `configured`, or else where its database says they are.

    The blobs of the folder are copied to an object store that is given for the first time.

    Raises:
        ConfigError: the object store is another aggregator's.
        StateError: it cannot be used, or is not the one that the database refers to.
    """
    stored = facts.get(BlobLocation) or BlobLocation(owner=uuid4().hex)
    location = configured.rstrip("/") or stored.location
    if not location:
        return open_blobs(str(folder / "blobs"))
    blobs = object_store(location, cache=folder / "copies")
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


def read_each(blobs: Blobs, digests: Iterable[bytes]) -> Iterator[bytes | BlobLost]:
    """Yield each blob, verified, or the error of one that is lost; raises StateError if one cannot be read."""
    if isinstance(blobs, FolderBlobs):  # a disk answers at once
        yield from (_blob_or_loss(blobs, digest) for digest in digests)
        return
    pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="reading")
    reading: deque[Future[bytes | BlobLost]] = deque()
    largest, limit = 1, 2
    try:
        for digest in digests:
            reading.append(submit(pool, _blob_or_loss, blobs, digest))
            while len(reading) >= limit:
                blob = reading.popleft().result()
                largest = max(largest, len(blob) if isinstance(blob, bytes) else 0)
                limit = max(1, min(AHEAD, AHEAD_BYTES // largest))
                yield blob
        for each in reading:
            yield each.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _blob_or_loss(blobs: Blobs, digest: bytes) -> bytes | BlobLost:
    try:
        return blobs.read(digest)
    except BlobLost as error:
        return error
