"""Blobs sent to devices: in pieces read from the disk, and no faster than the broker takes them."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from aggregator.messaging.publisher import Publisher
from protocol.errors import StateError
from protocol.log import event
from protocol.storage.blobstore import BlobStore, state_errors
from protocol.wire.messages import PROTOCOL_VERSION, BlobRequest, Frame

log = logging.getLogger(__name__)

BURST_BYTES = 4 * 1024**2
"""Bytes sent at once: blobs take no more memory than this, however many devices request them."""

MAX_REQUESTS = 100_000
"""Waiting requests; one more is dropped, and its device repeats it."""

MAX_DEVICE_REQUESTS = 64
"""Waiting requests of one device, which sends 16 at once: no other device waits for more."""


class BlobSender:
    """The queue of blob requests, in the order of their arrival."""

    def __init__(self, blobs: BlobStore, publisher: Publisher) -> None:
        self._blobs = blobs
        self._publisher = publisher
        self._waiting: dict[tuple[str, bytes, int], BlobRequest] = {}
        self._per_device: Counter[str] = Counter()
        self._is_busy = False

    def request(self, device: str, request: BlobRequest) -> None:
        """Queue a request; one that is waiting already is not queued again."""
        key = (device, request.digest, request.offset)
        is_room = len(self._waiting) < MAX_REQUESTS and self._per_device[device] < MAX_DEVICE_REQUESTS
        if is_room and key not in self._waiting:
            self._waiting[key] = request
            self._per_device[device] += 1

    def drained(self) -> None:
        """Allow the next burst: the broker has taken everything."""
        self._is_busy = False

    def forget(self) -> None:
        """Drop all requests: the connection is lost, and devices repeat them."""
        self._waiting.clear()
        self._per_device.clear()
        self._is_busy = False

    def send(self) -> None:
        """Send a burst, unless the broker has not taken the one before."""
        size_bytes = 0
        burst = []
        while self._waiting and size_bytes < BURST_BYTES and not self._is_busy:
            key = next(iter(self._waiting))
            burst.append((key[0], self._waiting.pop(key)))
            size_bytes += burst[-1][1].length
            self._per_device[key[0]] -= 1
        self._per_device += Counter()  # drops zeros
        for device, request in burst:
            path = self._blobs.path(request.digest)
            with reading():
                for frame in read_frames(path, request, chunk_bytes=self._publisher.chunk_bytes):
                    self._publisher.publish_to_device(device, "blk", frame)
                    self._is_busy = True


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
        event(log, logging.ERROR, "blob not readable: restart the aggregator to restore it", reason=error)
