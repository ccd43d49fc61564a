"""Reading many blobs in order: from an object store several at a time, since each is a round trip."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from aggregator.storage.blobs.blobs import Blobs
from protocol.errors import BlobLost
from protocol.storage.blobstore import BlobStore
from protocol.threads import submit

AHEAD = 8
"""Blobs that are in memory or on their way, at most."""

AHEAD_BYTES = 64 * 1024**2
"""Their bytes, if none is larger than the largest one so far; a larger blob is read alone."""


def read_each(blobs: Blobs, digests: Iterable[bytes]) -> Iterator[bytes | BlobLost]:
    """Yield each blob, verified, or the error of one that is lost; raises StateError if one cannot be read."""
    if isinstance(blobs, BlobStore):  # a disk answers at once
        yield from (_read(blobs, digest) for digest in digests)
        return
    pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="reading")
    reading: deque[Future[bytes | BlobLost]] = deque()
    largest, limit = 1, 2
    try:
        for digest in digests:
            reading.append(submit(pool, _read, blobs, digest))
            while len(reading) >= limit:
                blob = reading.popleft().result()
                largest = max(largest, len(blob) if isinstance(blob, bytes) else 0)
                limit = max(1, min(AHEAD, AHEAD_BYTES // largest))
                yield blob
        for each in reading:
            yield each.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _read(blobs: Blobs, digest: bytes) -> bytes | BlobLost:
    try:
        return blobs.read(digest)
    except BlobLost as error:
        return error
