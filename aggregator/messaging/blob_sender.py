"""Blobs sent to devices: in pieces read from the disk, no faster than the broker takes them, and not again and again.

A broker holds what a device has requested and does not read. What a device can request is therefore bounded, per
device and blob.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from aggregator.messaging.publisher import Publisher
from aggregator.rates import TokenBuckets
from aggregator.storage.blobs import Blobs
from protocol.errors import StateError
from protocol.log import event
from protocol.storage.blobstore import state_errors
from protocol.wire.messages import MAX_CHUNK_BYTES, PROTOCOL_VERSION, BlobRequest, Frame

log = logging.getLogger(__name__)

BURST_BYTES = 4 * 1024**2
"""Bytes sent at once: blobs take no more memory than this, however many devices request them."""

MAX_REQUESTS = 100_000
"""Waiting requests; one more is dropped, and its device repeats it."""

RETRY_S = 5.0
"""Seconds in which a blob that could not be read is not read again: an object store takes long to miss a blob."""

MAX_DEVICE_BYTES = 32 * MAX_CHUNK_BYTES
"""Bytes of one device's waiting requests, which sends requests for half as many at once."""

MAX_DEVICE_REQUESTS = 64
"""Waiting requests of one device, which sends 16 at once: no other device waits for more."""

SMALLEST_DOWNLOAD_BYTES = 256 * 1024
"""A smaller blob counts as one of this size, since a connection may be lost before its frames arrive."""


class BlobSender:
    """The queue of blob requests, in the order of their arrival."""

    def __init__(
        self,
        blobs: Blobs,
        publisher: Publisher,
        *,
        downloads_per_hour: int,
        is_verified: Callable[[bytes], bool],
    ) -> None:
        self._blobs = blobs
        self._is_verified = is_verified
        """Returns False for a blob that `verified` is called for later."""
        self._publisher = publisher
        self._downloads = TokenBuckets[tuple[str, bytes]](
            capacity=downloads_per_hour, per_s=downloads_per_hour / 3600
        )
        """A token for each download of a blob by a device."""
        self._waiting: deque[tuple[str, BlobRequest]] = deque()
        self._of_device: dict[str, list[BlobRequest]] = {}
        """Waiting requests of each device, in the same order."""
        self._unverified: dict[bytes, list[tuple[str, BlobRequest]]] = {}
        """Requests that wait until their blob is verified."""
        self._unreadable_s: dict[bytes, float] = {}
        """The time until which each blob that could not be read is not read again."""
        self._is_busy = False

    def request(self, device: str, request: BlobRequest) -> float:
        """Queue a request, unless its bytes are waiting already: in a large fleet, devices ask again while they wait.

        Returns 0, or the seconds until the device may request these bytes, if it has downloaded the blob too often.
        """
        own = self._of_device.get(device, [])
        is_room = self._count() < MAX_REQUESTS and sum(map(_weight, own)) < MAX_DEVICE_BYTES
        if not is_room or any(_contains(each, request) for each in own):
            return 0.0
        bucket, now_s = (device, request.digest), time.monotonic()
        tokens = self._fraction(request)
        if not self._downloads.take(bucket, tokens, now_s=now_s):
            return self._downloads.wait_s(bucket, tokens, now_s=now_s)
        self._waiting.append((device, request))
        self._of_device.setdefault(device, []).append(request)
        return 0.0

    def _count(self) -> int:
        return len(self._waiting) + sum(map(len, self._unverified.values()))

    def _fraction(self, request: BlobRequest) -> float:
        size = 0
        with contextlib.suppress(StateError):  # `send` logs what cannot be read
            size = self._blobs.size(request.digest)
        return min(request.length, max(0, size - request.offset)) / max(size, SMALLEST_DOWNLOAD_BYTES)

    def drained(self) -> None:
        """Allow the next burst: the broker has taken everything."""
        self._is_busy = False

    def forget(self) -> None:
        """Drop all requests: the connection is lost, and devices repeat them."""
        self._waiting.clear()
        self._unverified.clear()
        self._of_device.clear()
        self._is_busy = False

    def verified(self, digest: bytes, *, is_readable: bool) -> None:
        """Answer the requests of a blob at the next `send`, or drop them if it cannot be read: devices repeat them."""
        requests = self._unverified.pop(digest, [])
        if is_readable:
            self._waiting.extendleft(reversed(requests))
            return
        self._unreadable_s[digest] = time.monotonic() + RETRY_S
        for device, request in requests:
            self._answered(device, request)

    def _answered(self, device: str, request: BlobRequest) -> None:
        self._of_device[device].remove(request)
        if not self._of_device[device]:
            del self._of_device[device]

    def send(self) -> None:
        """Send a burst, unless the broker has not taken the one before."""
        size_bytes = 0
        burst = []
        while self._waiting and size_bytes < BURST_BYTES and not self._is_busy:
            device, request = self._waiting.popleft()
            if time.monotonic() < self._unreadable_s.get(request.digest, 0.0):
                self._answered(device, request)
            elif not self._is_verified(request.digest):
                self._unverified.setdefault(request.digest, []).append((device, request))
            else:
                self._answered(device, request)
                burst.append((device, request))
                size_bytes += request.length
        for device, request in burst:
            path = self._blobs.path(request.digest)
            with reading():
                try:
                    for frame in read_frames(path, request, chunk_bytes=self._publisher.chunk_bytes):
                        self._publisher.publish_to_device(device, "blk", frame)
                        self._is_busy = True
                except StateError:
                    self._unreadable_s[request.digest] = time.monotonic() + RETRY_S
                    raise


def _contains(waiting: BlobRequest, request: BlobRequest) -> bool:
    stops = (waiting.offset + waiting.length, request.offset + request.length)
    return waiting.digest == request.digest and waiting.offset <= request.offset and stops[0] >= stops[1]


def _weight(request: BlobRequest) -> int:
    return max(request.length, MAX_DEVICE_BYTES // MAX_DEVICE_REQUESTS)


def read_frames(path: Path, request: BlobRequest, *, chunk_bytes: int) -> Iterator[Frame]:
    """Yield the requested bytes of a blob, clipped to its size, in frames of at most `chunk_bytes`.

    Raises StateError if the blob cannot be read.
    """
    with state_errors(path), path.open("rb") as file:
        size = path.stat().st_size
        file.seek(request.offset)
        while (left := request.offset + request.length - file.tell()) > 0:
            offset = file.tell()
            data = file.read(min(chunk_bytes, left))
            if not data:
                return
            yield Frame(v=PROTOCOL_VERSION, digest=request.digest, size_bytes=size, offset=offset, data=data)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Log a blob that cannot be read, and continue."""
    try:
        yield
    except StateError as error:
        event(log, logging.ERROR, "cannot read a file that devices need", reason=error)
