"""An incoming transfer, reassembled from its frames, and its missing ranges. No I/O and no clock."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice

from protocol.errors import TransferError
from protocol.wire.codec import digest_of
from protocol.wire.messages import Frame
from protocol.wire.transfer import SMALLEST_CHUNK_BYTES, Ranges

MAX_PIECES = 2**17
"""Pieces in which a transfer may arrive, in addition to the number of its smallest chunks: bounds memory."""

MAX_STRETCHES = 4096
"""Gapless stretches of a transfer that are held: a frame that would begin one more counts as lost."""


class Assembly:
    """An incoming transfer: accepts frames of any size, in any order, with repetitions.

    Only bytes that have not arrived before are held, so that memory never exceeds the payload, and an announced size
    allocates nothing. Bytes in the ranges `stored` are stored elsewhere; `settle` releases those that were since.
    """

    def __init__(self, digest: bytes, size_bytes: int, *, stored: Ranges = ()) -> None:
        self.digest = digest
        self.size_bytes = size_bytes
        self.held_bytes = 0
        """Bytes that have arrived, wherever they are stored."""
        self.pieces = len(stored)
        """Number of pieces in which they arrived."""
        self.fresh: list[tuple[int, bytes]] = []
        """Offset and bytes that are stored nowhere else."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in stored:
            self._cover(start, stop)

    @property
    def stretches(self) -> int:
        """Number of gapless stretches that they form."""
        return len(self._starts)

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
        if self.pieces > MAX_PIECES + self.size_bytes // SMALLEST_CHUNK_BYTES:
            raise TransferError(f"more than {self.pieces} pieces: send larger frames")
        for start, end in self._cover(frame.offset, stop):
            whole = end - start == len(frame.data)
            piece = frame.data if whole else frame.data[start - frame.offset : end - frame.offset]
            self.fresh.append((start, piece))
            self.pieces += 1

    def _cover(self, start: int, stop: int) -> Ranges:
        """Add [start, stop) to the ranges that have arrived, and return the parts of it that are new."""
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first == last and len(self._starts) >= MAX_STRETCHES:
            return ()
        starts, stops = self._starts[first:last], self._stops[first:last]
        new = tuple(_between(start, stop, zip(starts, stops, strict=True)))
        if new:
            self._starts[first:last] = [min(start, starts[0]) if starts else start]
            self._stops[first:last] = [max(stop, stops[-1]) if stops else stop]
            self.held_bytes += sum(end - begin for begin, end in new)
        return new

    def ranges(self) -> Ranges:
        """Return the byte ranges that have arrived, wherever they are stored."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def missing(self, limit: int | None = None) -> Ranges:
        """Return the ranges that have not arrived, or the first of them; empty if the transfer is complete."""
        return tuple(islice(_between(0, self.size_bytes, zip(self._starts, self._stops, strict=True)), limit))

    def settle(self) -> None:
        """Release the bytes in `fresh`, which were stored elsewhere."""
        self.fresh = []

    def payload(self, stored: Iterable[tuple[int, bytes]] = ()) -> bytes:
        """Return the payload after verifying its digest; `stored` are offset and bytes that were stored elsewhere.

        Raises:
            TransferError: bytes are missing, or the digest is wrong.
        """
        if self.missing(1):
            raise TransferError("the transfer is incomplete")
        payload = b"".join(data for _, data in sorted([*stored, *self.fresh]))
        if (digest := digest_of(payload)) != self.digest:
            raise TransferError(f"expected sha256 {self.digest.hex()}, got {digest.hex()}")
        return payload


def _between(start: int, stop: int, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of [start, stop) outside of ascending disjoint ranges."""
    for begin, end in ranges:
        if begin > start:
            yield start, begin
        start = max(start, end)
    if start < stop:
        yield start, stop
