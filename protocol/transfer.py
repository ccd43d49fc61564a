"""A payload to frames and back, and what is missing in between. No I/O and no clock."""

from collections.abc import Iterable, Iterator

from protocol.codec import digest_of
from protocol.errors import TransferError
from protocol.messages import MAX_CHUNK_BYTES, PROTOCOL_VERSION, Frame

MAX_PIECES = 2**17
"""Frames that one transfer may hold apart: what is kept beside their bytes stays small."""

Ranges = tuple[tuple[int, int], ...]
"""Disjoint byte ranges [start, stop) in ascending order."""


ENVELOPE_BYTES = 256
"""More than a frame's envelope, its topic and MQTT's own header take together."""

SMALLEST_CHUNK_BYTES = 256


def chunk_bytes(max_packet_bytes: int | None) -> int:
    """Bytes of payload in a frame for a broker that takes packets of this size; None: it does not say."""
    if max_packet_bytes is None:
        return MAX_CHUNK_BYTES
    return max(SMALLEST_CHUNK_BYTES, min(MAX_CHUNK_BYTES, max_packet_bytes - ENVELOPE_BYTES))


def frames_of(
    payload: bytes, *, digest: bytes, ranges: Ranges | None = None, chunk_bytes: int = MAX_CHUNK_BYTES
) -> Iterator[Frame]:
    """Cut a payload, or only some byte ranges of it, into frames of at most `chunk_bytes`.

    Ranges that reach past the payload are clipped to it. An empty payload is one empty frame.
    """
    size = len(payload)
    view = memoryview(payload)
    for start, stop in ranges if ranges is not None else ((0, max(size, 1)),):
        for offset in range(start, min(stop, max(size, 1)), chunk_bytes):
            piece = bytes(view[offset : min(offset + chunk_bytes, stop)])
            yield Frame(v=PROTOCOL_VERSION, digest=digest, size_bytes=size, offset=offset, data=piece)


def gaps(size_bytes: int, pieces: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges of [0, size_bytes) that no (offset, length) piece covers."""
    missing = []
    covered = 0
    for offset, length in sorted(pieces):
        if offset > covered:
            missing.append((covered, offset))
        covered = max(covered, offset + length)
    if covered < size_bytes:
        missing.append((covered, size_bytes))
    return tuple(missing)


class Assembly:
    """One transfer coming in: takes frames in any order, any number of times, and gives the payload.

    It holds what has arrived and never more than the whole: an announced size allocates nothing.
    """

    def __init__(self, digest: bytes, size_bytes: int) -> None:
        self.digest = digest
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self._pieces: dict[int, bytes] = {}

    def add(self, frame: Frame) -> None:
        """Take a frame of this transfer.

        Raises:
            TransferError: it is of another transfer, contradicts the size, overlaps what came before, or is empty
                or one too many.
        """
        if frame.digest != self.digest or frame.size_bytes != self.size_bytes:
            raise TransferError("the frame's digest or size is not this transfer's")
        if frame.offset + len(frame.data) > self.size_bytes:
            raise TransferError(
                f"expected bytes within {self.size_bytes}, got {frame.offset}+{len(frame.data)}"
            )
        if not frame.data and self.size_bytes:
            raise TransferError("a frame without bytes")
        known = self._pieces.get(frame.offset)
        if known is not None and len(known) >= len(frame.data):
            return
        held = self.held_bytes + len(frame.data) - len(known or b"")
        if held > self.size_bytes:
            raise TransferError("the frames overlap: together they are larger than the whole")
        if known is None and len(self._pieces) >= MAX_PIECES:
            raise TransferError(f"more than {MAX_PIECES} pieces: send larger frames")
        self._pieces[frame.offset] = frame.data
        self.held_bytes = held

    def missing(self) -> Ranges:
        """The byte ranges that have not come yet; empty when the transfer is complete."""
        return gaps(self.size_bytes, ((offset, len(data)) for offset, data in self._pieces.items()))

    def payload(self) -> bytes:
        """The whole, verified.

        Raises:
            TransferError: something is missing, or the bytes are not the announced digest's.
        """
        if self.missing():
            raise TransferError("the transfer is not complete")
        whole = bytearray(self.size_bytes)
        for offset, data in self._pieces.items():
            whole[offset : offset + len(data)] = data
        payload = bytes(whole)
        if digest_of(payload) != self.digest:
            raise TransferError(f"expected sha256 {self.digest.hex()}, got {digest_of(payload).hex()}")
        return payload
