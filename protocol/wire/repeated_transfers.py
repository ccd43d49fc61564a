"""Payloads reassembled from their frames, of which a client may publish any. No I/O and no clock.

The sender repeats a transfer as a whole, so nothing is requested again: a frame behind a lost one is ignored, and
the next repetition continues there.
"""

from dataclasses import dataclass, field

from protocol.wire.codec import digest_of
from protocol.wire.messages import Frame

MAX_TRANSFERS = 4
"""Unfinished transfers; one more replaces the one without frames for longest."""


@dataclass
class Transfer:
    """The first bytes of a payload; announced ones take no memory."""

    size_bytes: int
    held: bytearray = field(default_factory=bytearray)


class Transfers:
    """The unfinished transfers by their digest, the one without frames for longest first.

    A payload, and all that is held of unfinished ones together, has at most `max_bytes`.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._transfers: dict[bytes, Transfer] = {}

    @property
    def held_bytes(self) -> int:
        return sum(len(each.held) for each in self._transfers.values())

    def take(self, frame: Frame) -> bytes | None:
        """Add a frame; returns the payload once it is complete and its digest is verified.

        A frame that contradicts an earlier one discards the transfer.
        """
        if not 0 < frame.size_bytes <= self._max_bytes:
            return None
        transfer = self._transfers.pop(frame.digest, None) or Transfer(frame.size_bytes)
        offset, held = frame.offset, transfer.held
        known = held[offset : offset + len(frame.data)]
        if (
            frame.size_bytes != transfer.size_bytes
            or offset + len(frame.data) > frame.size_bytes
            or not frame.data.startswith(known)
        ):
            return None
        if offset <= len(held):
            held += frame.data[len(known) :]
        if len(held) == transfer.size_bytes:
            payload = bytes(held)
            return payload if digest_of(payload) == frame.digest else None
        if held:
            self._transfers[frame.digest] = transfer
            self._drop_oldest()
        return None

    def _drop_oldest(self) -> None:
        while len(self._transfers) > MAX_TRANSFERS or (
            self.held_bytes > self._max_bytes and len(self._transfers) > 1
        ):
            del self._transfers[next(iter(self._transfers))]
