"""Split payloads into frames, reassemble them, and find missing ranges. No I/O and no clock."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from protocol.errors import TransferError
from protocol.wire.codec import digest_of
from protocol.wire.messages import MAX_CHUNK_BYTES, PROTOCOL_VERSION, Frame

MAX_PIECES = 2**17
"""Pieces in which a transfer may arrive, in addition to the number of its smallest chunks: bounds memory."""

Ranges = tuple[tuple[int, int], ...]
"""Disjoint byte ranges [start, stop) in ascending order."""

ENVELOPE_BYTES = 384
"""Upper bound for a frame's envelope, topic and MQTT header together."""

SMALLEST_CHUNK_BYTES = 256


def chunk_bytes(max_packet_bytes: int | None) -> int:
    """Return the payload bytes per frame for a broker's packet limit; None if it does not announce one."""
    if max_packet_bytes is None:
        return MAX_CHUNK_BYTES
    return max(SMALLEST_CHUNK_BYTES, min(MAX_CHUNK_BYTES, max_packet_bytes - ENVELOPE_BYTES))


def frames_of(
    payload: bytes, *, digest: bytes, ranges: Ranges | None = None, chunk_bytes: int = MAX_CHUNK_BYTES
) -> Iterator[Frame]:
    """Split a payload, or some byte ranges of it, into frames of at most `chunk_bytes`.

    Ranges are clipped to the payload. An empty payload is one empty frame.
    """
    size = len(payload)
    view = memoryview(payload)
    for start, stop in ranges if ranges is not None else ((0, max(size, 1)),):
        for offset in range(start, min(stop, max(size, 1)), chunk_bytes):
            piece = bytes(view[offset : min(offset + chunk_bytes, stop)])
            yield Frame(v=PROTOCOL_VERSION, digest=digest, size_bytes=size, offset=offset, data=piece)


class Coverage:
    """The bytes of a payload that have arrived: disjoint ranges, merged where they touch."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> Ranges:
        """Cover [start, stop), and return the parts of it that were not covered before."""
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        starts, stops = self._starts[first:last], self._stops[first:last]
        new = _between(start, stop, zip(starts, stops, strict=True))
        if new:
            self._starts[first:last] = [min(start, starts[0]) if starts else start]
            self._stops[first:last] = [max(stop, stops[-1]) if stops else stop]
            self.held_bytes += sum(end - begin for begin, end in new)
        return new

    @property
    def stretches(self) -> int:
        """The number of disjoint ranges."""
        return len(self._starts)

    def ranges(self) -> Ranges:
        """Return the covered ranges."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def missing(self) -> Ranges:
        """Return the ranges that are not covered."""
        return _between(0, self.size_bytes, zip(self._starts, self._stops, strict=True))


def _between(start: int, stop: int, ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the parts of [start, stop) outside of ascending disjoint ranges."""
    found = []
    for begin, end in ranges:
        if begin > start:
            found.append((start, begin))
        start = max(start, end)
    if start < stop:
        found.append((start, stop))
    return tuple(found)


class Assembly:
    """An incoming transfer: accepts frames of any size, in any order, with repetitions.

    Only bytes that have not arrived before are held, so that memory never exceeds the payload, and an announced size
    allocates nothing. Bytes that were stored elsewhere can be released with `settle`.

    Args:
        digest: of the payload.
        size_bytes: of the payload.
        stored: ranges that are stored elsewhere already.

    Attributes:
        fresh: offset and bytes that are stored nowhere else.
    """

    def __init__(self, digest: bytes, size_bytes: int, *, stored: Ranges = ()) -> None:
        self.digest = digest
        self.size_bytes = size_bytes
        self.fresh: list[tuple[int, bytes]] = []
        self._coverage = Coverage(size_bytes)
        self._pieces = len(stored)
        for start, stop in stored:
            self._coverage.add(start, stop)

    @property
    def held_bytes(self) -> int:
        """Bytes that have arrived, wherever they are stored."""
        return self._coverage.held_bytes

    @property
    def pieces(self) -> int:
        """Number of pieces in which they arrived."""
        return self._pieces

    @property
    def stretches(self) -> int:
        """Number of gapless stretches that they form."""
        return self._coverage.stretches

    def add(self, frame: Frame) -> None:
        """Hold the new bytes of a frame.

        Raises:
            TransferError: the frame belongs to another transfer, exceeds the size, is empty, or is one too many.
        """
        if frame.digest != self.digest or frame.size_bytes != self.size_bytes:
            raise TransferError("the frame's digest or size differs from the transfer's")
        stop = frame.offset + len(frame.data)
        if stop > self.size_bytes:
            raise TransferError(
                f"expected bytes within {self.size_bytes}, got {frame.offset}+{len(frame.data)}"
            )
        if not frame.data and self.size_bytes:
            raise TransferError("expected bytes in the frame, got none")
        if self._pieces > MAX_PIECES + self.size_bytes // SMALLEST_CHUNK_BYTES:
            raise TransferError(f"more than {self._pieces} pieces: send larger frames")
        for start, end in self._coverage.add(frame.offset, stop):
            whole = end - start == len(frame.data)
            piece = frame.data if whole else frame.data[start - frame.offset : end - frame.offset]
            self.fresh.append((start, piece))
            self._pieces += 1

    def ranges(self) -> Ranges:
        """Return the byte ranges that have arrived, wherever they are kept."""
        return self._coverage.ranges()

    def settle(self) -> None:
        """Release the bytes in `fresh`, which were stored elsewhere."""
        self.fresh = []

    def missing(self) -> Ranges:
        """Return the ranges that have not arrived; empty if the transfer is complete."""
        return self._coverage.missing()

    def payload(self, stored: Iterable[tuple[int, bytes]] = ()) -> bytes:
        """Return the payload after verifying its digest.

        Args:
            stored: offset and bytes that were stored elsewhere.

        Raises:
            TransferError: bytes are missing, or the digest is wrong.
        """
        if self.missing():
            raise TransferError("the transfer is incomplete")
        payload = b"".join(data for _, data in sorted([*stored, *self.fresh]))
        if (digest := digest_of(payload)) != self.digest:
            raise TransferError(f"expected sha256 {self.digest.hex()}, got {digest.hex()}")
        return payload
