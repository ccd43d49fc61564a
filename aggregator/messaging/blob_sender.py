"""Blobs going out to devices, piece by piece from the disk, and no faster than the broker takes them."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from protocol.storage.blobstore import state_errors
from protocol.wire.messages import PROTOCOL_VERSION, BlobRequest, Frame

BURST_BYTES = 4 * 1024**2
"""What is asked for together and sent at once: so much of blobs is in memory, however many devices ask."""

MAX_WAITING = 100_000
"""Requests that wait; one more is dropped, and its device asks again."""

MAX_OF_ONE = 64
"""Those of one device: it asks for 16 at once, and nobody waits for what one asks for all day."""


class Downlink:
    """What devices have asked for and was not sent yet, in the order of their requests. No I/O."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, bytes, int], BlobRequest] = {}
        self._of_device: Counter[str] = Counter()
        self._is_busy = False

    def ask(self, device: str, request: BlobRequest) -> None:
        """Take a request; one that waits already is not taken twice."""
        key = (device, request.digest, request.offset)
        is_room = len(self._waiting) < MAX_WAITING and self._of_device[device] < MAX_OF_ONE
        if is_room and key not in self._waiting:
            self._waiting[key] = request
            self._of_device[device] += 1

    def sent(self) -> None:
        """Something of a burst was given to the broker."""
        self._is_busy = True

    def drained(self) -> None:
        """The broker has taken all that was sent."""
        self._is_busy = False

    def forget(self) -> None:
        """Drop everything: the connection is gone, and devices ask again."""
        self._waiting.clear()
        self._of_device.clear()
        self._is_busy = False

    def burst(self) -> list[tuple[str, BlobRequest]]:
        """What to send now; nothing while the broker has not taken what was sent before."""
        if self._is_busy:
            return []
        size_bytes, taken = 0, []
        while self._waiting and size_bytes < BURST_BYTES:
            key = next(iter(self._waiting))
            request = self._waiting.pop(key)
            size_bytes += request.length
            taken.append((key[0], request))
            self._of_device[key[0]] -= 1
        self._of_device += Counter()  # without those of whom nothing waits
        return taken


def read_frames(path: Path, request: BlobRequest, *, chunk_bytes: int) -> Iterator[Frame]:
    """The bytes of a blob that a device asked for, as far as there are any, in frames of at most `chunk_bytes`.

    Raises:
        StateError: the blob cannot be read.
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
