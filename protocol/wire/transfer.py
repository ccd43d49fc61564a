"""A payload to frames and back, and what is missing in between. No I/O and no clock."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from protocol.errors import TransferError
from protocol.wire.codec import digest_of
from protocol.wire.messages import MAX_CHUNK_BYTES, PROTOCOL_VERSION, Frame

MAX_PIECES = 2**17
"""Pieces in which a transfer may come, beside what the smallest chunks make: what is kept of each stays small."""

Ranges = tuple[tuple[int, int], ...]
"""Disjoint byte ranges [start, stop) in ascending order."""

ENVELOPE_BYTES = 384
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


class Coverage:
    """Which bytes of a whole are there: disjoint ranges, joined where they touch."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> Ranges:
        """Cover [start, stop); returns the parts of it that were not covered before."""
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
        """How many ranges are covered that do not touch."""
        return len(self._starts)

    def ranges(self) -> Ranges:
        """What is covered."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def missing(self) -> Ranges:
        """What is not covered; empty when everything is."""
        return _between(0, self.size_bytes, zip(self._starts, self._stops, strict=True))


def _between(start: int, stop: int, ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The parts of [start, stop) that ascending disjoint ranges leave open."""
    found = []
    for begin, end in ranges:
        if begin > start:
            found.append((start, begin))
        start = max(start, end)
    if start < stop:
        found.append((start, stop))
    return tuple(found)


class Assembly:
    """One transfer coming in: takes frames of any size, in any order, any number of times, and gives the payload.

    It keeps of each frame only the bytes that nobody brought before, so it holds never more than the whole, and an
    announced size allocates nothing. Bytes that are kept elsewhere meanwhile need not stay in it.

    Args:
        digest: of the whole.
        size_bytes: of the whole.
        stored: ranges that are kept elsewhere already.

    Attributes:
        fresh: offset and bytes of what is kept nowhere else.
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
        """Bytes that have come, wherever they are kept."""
        return self._coverage.held_bytes

    @property
    def pieces(self) -> int:
        """In how many pieces they have come."""
        return self._pieces

    @property
    def stretches(self) -> int:
        """How many stretches without a gap they make."""
        return self._coverage.stretches

    def add(self, frame: Frame) -> None:
        """Take what is new in a frame of this transfer.

        Raises:
            TransferError: it is of another transfer, contradicts the size, or is empty, or one too many.
        """
        if frame.digest != self.digest or frame.size_bytes != self.size_bytes:
            raise TransferError("the frame's digest or size is not this transfer's")
        stop = frame.offset + len(frame.data)
        if stop > self.size_bytes:
            raise TransferError(
                f"expected bytes within {self.size_bytes}, got {frame.offset}+{len(frame.data)}"
            )
        if not frame.data and self.size_bytes:
            raise TransferError("a frame without bytes")
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
        """Let go of bytes that are kept elsewhere now."""
        self.fresh = []

    def missing(self) -> Ranges:
        """The byte ranges that have not come yet; empty when the transfer is complete."""
        return self._coverage.missing()

    def payload(self, stored: Iterable[tuple[int, bytes]] = ()) -> bytes:
        """The whole, verified.

        Args:
            stored: offset and bytes of what is kept elsewhere.

        Raises:
            TransferError: something is missing, or the bytes are not the announced digest's.
        """
        if self.missing():
            raise TransferError("the transfer is not complete")
        payload = b"".join(data for _, data in sorted([*stored, *self.fresh]))
        if (digest := digest_of(payload)) != self.digest:
            raise TransferError(f"expected sha256 {self.digest.hex()}, got {digest.hex()}")
        return payload
