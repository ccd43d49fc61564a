"""Transfers coming in from devices: bounded, in any order, any number of times. No I/O and no clock."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aggregator.ingest.validation import Refused
from protocol.errors import TransferError
from protocol.wire.messages import Frame, Receipt
from protocol.wire.transfer import Assembly, Ranges

MAX_RANGES = 64
"""Missing ranges in one receipt."""

PIECE_BYTES = 256
"""What a piece takes beside its bytes, however few they are; a transfer that has begun counts as one more."""

STRETCH_BYTES = 8192
"""What a stretch without a gap takes on the disk beside its bytes, which come in blocks there."""

Key = tuple[str, bytes]
"""A transfer: its device, and the digest of the whole."""

Pieces = Sequence[tuple[int, bytes]]
"""Offsets and bytes, which do not overlap."""


@dataclass(frozen=True)
class Complete:
    """A transfer whose bytes are all there and are the digest's."""

    digest: bytes
    payload: bytes


@dataclass(frozen=True)
class Stored:
    """What the disk has of an unfinished transfer."""

    key: Key
    size_bytes: int
    seen_s: float
    """When its last frame came, unix seconds."""
    ranges: Ranges


@dataclass(frozen=True)
class Arrived:
    """What has come of an unfinished transfer and is not on the disk yet."""

    key: Key
    size_bytes: int
    seen_s: float
    pieces: Pieces


@dataclass(frozen=True)
class Changes:
    """What the disk has to be told to be up to date."""

    arrived: Sequence[Arrived]
    ended: Sequence[Key]
    """Transfers of which the disk need keep nothing any more."""

    def __bool__(self) -> bool:
        return bool(self.arrived or self.ended)


@dataclass
class _Transfer:
    assembly: Assembly
    seen_s: float
    is_stored: bool


def _nothing(_device: str, _digest: bytes) -> Pieces:
    return ()


class Uplink:
    """The unfinished transfers of all devices.

    What has come is held until `settle` says that it is on the disk; from then on, only which bytes there are.

    Args:
        max_bytes: the largest transfer that is taken.
        per_device: unfinished transfers a device may have; a further one pushes out the one that waits longest.
        max_held_bytes: what all unfinished transfers may hold together, in memory and on the disk; beyond it,
            the one that waits longest goes.
        stored: what the disk has of earlier.
        read: the bytes that the disk has of a device's transfer.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        per_device: int = 2,
        max_held_bytes: int = 512 * 1024**2,
        stored: Iterable[Stored] = (),
        read: Callable[[str, bytes], Pieces] = _nothing,
    ) -> None:
        self._max_bytes = max_bytes
        self._per_device = per_device
        self._max_held_bytes = max_held_bytes
        self._read = read
        self._held_bytes = 0
        self._transfers: dict[Key, _Transfer] = {}
        """The one that waits longest for a frame comes first."""
        self._ended: list[Key] = []
        for each in sorted(stored, key=lambda each: each.seen_s):
            assembly = Assembly(each.key[1], each.size_bytes, stored=each.ranges)
            self._transfers[each.key] = _Transfer(assembly, each.seen_s, is_stored=True)
            self._held_bytes += _weight(assembly)

    def take(
        self, device: str, frame: Frame, *, holds: Callable[[str, bytes], bool], now_s: float = 0.0
    ) -> Receipt | Complete | None:
        """Take a frame: a receipt to send back, a payload to look into, or nothing to say yet.

        The last bytes of a transfer are a question as well: they are answered with what is missing.

        Args:
            device: who sent it.
            frame: what it sent.
            holds: whether a device's payload of this digest was taken before.
            now_s: unix seconds.

        Raises:
            Refused: too large, self-contradicting, or not the announced digest's bytes.
            StateError: what the disk has of it cannot be read.
        """
        is_last = frame.offset + len(frame.data) >= frame.size_bytes
        key = (device, frame.digest)
        if key not in self._transfers and holds(device, frame.digest):
            return Receipt(digest=frame.digest, status="received") if is_last else None
        assembly = self._touch(key, frame, now_s)
        try:
            self._add(assembly, frame)
            if assembly.held_bytes == frame.size_bytes:
                payload = assembly.payload(self._read(*key) if self._transfers[key].is_stored else ())
                self._drop(key)
                return Complete(frame.digest, payload)
        except TransferError as error:
            self._drop(key)
            raise Refused("digest", str(error)) from error
        self._make_room()
        if not is_last:
            return None
        return Receipt(digest=frame.digest, status="missing", missing=assembly.missing()[:MAX_RANGES])

    def expire(self, before_s: float) -> list[Key]:
        """Drop the transfers of which no frame has come since `before_s`, unix seconds."""
        old = [key for key, transfer in self._transfers.items() if transfer.seen_s < before_s]
        for key in old:
            self._drop(key)
        return old

    def drop_if(self, holds: Callable[[str, bytes], bool]) -> None:
        """Drop what was taken meanwhile, but could not be cleared."""
        for key in [key for key in self._transfers if holds(*key)]:
            self._drop(key)

    def changes(self) -> Changes:
        """What has happened since the last `settle`."""
        arrived = [
            Arrived(key, transfer.assembly.size_bytes, transfer.seen_s, transfer.assembly.fresh)
            for key, transfer in self._transfers.items()
            if transfer.assembly.fresh
        ]
        return Changes(arrived, tuple(self._ended))

    def settle(self) -> None:
        """The disk knows of all changes."""
        for transfer in self._transfers.values():
            if transfer.assembly.fresh:
                transfer.assembly.settle()
                transfer.is_stored = True
        self._ended.clear()

    def _touch(self, key: Key, frame: Frame, now_s: float) -> Assembly:
        """Find or open a frame's transfer, which waits shortest now."""
        transfer = self._transfers.pop(key, None)
        if transfer is None:
            if frame.size_bytes > self._max_bytes:
                raise Refused(
                    "oversized", f"expected at most {self._max_bytes} bytes, got {frame.size_bytes}"
                )
            own = [other for other in self._transfers if other[0] == key[0]]
            for other in own[: len(own) - self._per_device + 1]:
                self._drop(other)
            transfer = _Transfer(Assembly(frame.digest, frame.size_bytes), now_s, is_stored=False)
            self._held_bytes += _weight(transfer.assembly)
        transfer.seen_s = now_s
        self._transfers[key] = transfer
        return transfer.assembly

    def _add(self, assembly: Assembly, frame: Frame) -> None:
        before = _weight(assembly)
        assembly.add(frame)
        self._held_bytes += _weight(assembly) - before

    def _drop(self, key: Key) -> None:
        transfer = self._transfers.pop(key)
        self._held_bytes -= _weight(transfer.assembly)
        if transfer.is_stored:
            self._ended.append(key)

    def _make_room(self) -> None:
        """Push out what waits longest while all together hold too much, but not what is coming in just now."""
        while self._held_bytes > self._max_held_bytes and len(self._transfers) > 1:
            self._drop(next(iter(self._transfers)))


def _weight(assembly: Assembly) -> int:
    """What a transfer takes: its bytes, and what goes with each piece and each stretch, or tiny ones would be free."""
    return assembly.held_bytes + (1 + assembly.pieces) * PIECE_BYTES + assembly.stretches * STRETCH_BYTES
