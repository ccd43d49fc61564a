"""An upload: the bytes that have arrived, in memory or in a temporary file, and the ranges that have not."""

import contextlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from protocol.errors import TransferError
from protocol.storage.blobstore import state_errors
from protocol.wire.codec import digest_of
from protocol.wire.messages import Frame
from protocol.wire.transfer import Ranges

MAX_STRETCHES = 4096
"""Gapless stretches of an upload: a frame that would begin one more counts as lost."""

UPLOAD_BYTES = 2048
"""Memory of an upload without its data."""

PIECE_BYTES = 256
"""Memory of a piece in addition to its data, so that tiny ones are not free."""

STRETCH_BYTES = 8192
"""Disk of a stretch in addition to its data: a file occupies whole blocks."""


class Size(NamedTuple):
    """Bytes that an upload takes."""

    memory: int = 0
    file: int = 0
    """Unused parts of blocks included."""
    written: int = 0
    """Without unused parts of blocks."""


class Upload:
    """An upload that accepts frames of any size, in any order, with repetitions.

    Only bytes that have not arrived before are stored, and an announced size allocates nothing. They are in memory
    until `flush` writes them to the file `path`.
    """

    def __init__(self, digest: bytes, size_bytes: int, *, path: Path | None = None) -> None:
        self.digest = digest
        self.size_bytes = size_bytes
        self.received_bytes = 0
        self.seen_s = 0.0
        """When the last frame arrived, in seconds of any clock."""
        self._path = path
        self._flushed_bytes = 0
        self._pieces: list[tuple[int, bytes]] = []
        """Offset and bytes of what is in memory."""
        self._starts: list[int] = []
        self._stops: list[int] = []

    @property
    def is_whole(self) -> bool:
        return self.received_bytes == self.size_bytes

    @property
    def size(self) -> Size:
        in_memory = UPLOAD_BYTES + self.received_bytes - self._flushed_bytes + len(self._pieces) * PIECE_BYTES
        in_file = self._flushed_bytes + len(self._starts) * STRETCH_BYTES if self._flushed_bytes else 0
        return Size(in_memory, in_file, self._flushed_bytes)

    def add(self, frame: Frame) -> None:
        """Store the new bytes of a frame in memory.

        Raises:
            TransferError: the frame belongs to another upload, exceeds the size, or is empty.
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
        for start, end in self._cover(frame.offset, stop):
            # A copy: a view would keep the whole packet in memory.
            self._pieces.append((start, bytes(frame.data[start - frame.offset : end - frame.offset])))

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
            self.received_bytes += sum(end - begin for begin, end in new)
        return new

    def missing(self, limit: int | None = None) -> Ranges:
        """Return the ranges that have not arrived, or the first of them; empty if the upload is whole."""
        return tuple(islice(_between(0, self.size_bytes, zip(self._starts, self._stops, strict=True)), limit))

    def flush(self) -> None:
        """Move the bytes in memory to the file, each at its offset; raises StateError and moves none on failure."""
        if self._path is None or not self._pieces:
            return
        begins = 0 if self._flushed_bytes else os.O_TRUNC
        with state_errors(self._path):
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | begins, 0o600)
            try:
                for offset, data in sorted(self._pieces):
                    _write(handle, offset, data)
            finally:
                os.close(handle)
        self._pieces = []
        self._flushed_bytes = self.received_bytes

    def payload(self) -> bytes:
        """Return the payload after verifying its digest.

        Raises:
            TransferError: bytes are missing, or the digest is wrong.
            StateError: the file cannot be written or read.
        """
        if not self.is_whole:
            raise TransferError("the transfer is incomplete")
        if self._path is not None and self._flushed_bytes:
            self.flush()
            with state_errors(self._path):
                payload = self._path.read_bytes()
        else:
            payload = b"".join(data for _, data in sorted(self._pieces))
        if (digest := digest_of(payload)) != self.digest:
            raise TransferError(f"expected sha256 {self.digest.hex()}, got {digest.hex()}")
        return payload

    def discard(self) -> None:
        """Delete the file, if there is one."""
        if self._path is not None:
            with contextlib.suppress(OSError):  # the next start deletes it
                self._path.unlink(missing_ok=True)


def _write(handle: int, offset: int, data: bytes) -> None:
    while data:  # a full disk raises at the second attempt only
        written = os.pwrite(handle, data, offset)
        offset, data = offset + written, data[written:]


def _between(start: int, stop: int, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of [start, stop) outside of ascending disjoint ranges."""
    for begin, end in ranges:
        if begin > start:
            yield start, begin
        start = max(start, end)
    if start < stop:
        yield start, stop
