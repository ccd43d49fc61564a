"""Reassembly of device uploads: bounded, in any order, with repetitions. No I/O and no clock."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field

from aggregator.intake.assembly import Assembly
from aggregator.intake.validation import Refused
from protocol.errors import TransferError
from protocol.wire.messages import Frame, Receipt
from protocol.wire.transfer import Ranges

MAX_RANGES = 64
"""Missing ranges in one receipt."""

PIECE_BYTES = 256
"""Overhead of a piece in the quotas, and of a transfer, so that tiny ones are not free."""

STRETCH_BYTES = 8192
"""Overhead of a contiguous range in the quotas: files occupy whole blocks on the disk."""

Key = tuple[str, bytes]
"""A transfer: its device, and the digest of its payload."""


@dataclass(frozen=True)
class Complete:
    """A payload whose digest was verified."""

    digest: bytes
    payload: bytes


@dataclass
class Transfer:
    """An unfinished transfer."""

    key: Key
    assembly: Assembly
    """The received bytes; `assembly.fresh` is not on the disk yet."""
    seen_s: float
    """When its last frame arrived, elapsed seconds."""
    stored: Ranges = ()
    """The ranges on the disk."""

    @property
    def weight(self) -> int:
        """Bytes that count against the quotas."""
        held = self.assembly
        return held.held_bytes + (1 + held.pieces) * PIECE_BYTES + held.stretches * STRETCH_BYTES


@dataclass(kw_only=True)
class Reassembly:
    """The unfinished transfers of all devices."""

    max_bytes: int
    """Greatest size of a payload."""
    holds: Callable[[str, bytes], bool]
    """Returns True for a device and the digest of a payload that was accepted earlier."""
    per_device: int = 2
    """Unfinished transfers of one device; one more replaces the one without frames for longest."""
    max_held_bytes: int = 512 * 1024**2
    """Weight of all unfinished transfers; beyond it the device that holds most loses its oldest."""
    read: Callable[[Key, Ranges], Sequence[tuple[int, bytes]]] = lambda _key, _ranges: ()
    """Returns offsets and bytes of a transfer's ranges on the disk."""
    ended: list[Key] = field(default_factory=list, init=False)
    """Transfers that the disk need not keep, since the last `settle`."""
    transfers: InitVar[Iterable[Transfer]] = ()
    """Unfinished transfers on the disk, by the time of their last frame."""

    def __post_init__(self, transfers: Iterable[Transfer]) -> None:
        self._transfers = {each.key: each for each in transfers}
        """The one without frames for longest comes first."""
        self._keys_of: dict[str, dict[Key, None]] = {}
        """Each device's transfers, in the same order."""
        self._fresh: dict[Key, Transfer] = {}
        """Those with bytes that are not on the disk yet."""
        self._held_bytes = 0
        self._held_by = Counter[str]()
        for each in self._transfers.values():
            self._keys_of.setdefault(each.key[0], {})[each.key] = None
            self._count(each.key[0], each.weight)
        for key in [key for key in self._transfers if self.holds(*key)]:
            self._drop(key)  # a kill came between storing the payload and clearing the transfer

    def take(self, device: str, frame: Frame, *, now_s: float = 0.0) -> Receipt | Complete | None:
        """Add a frame whose signature was verified.

        Returns the payload once it is complete; a receipt with the missing ranges for a frame with the transfer's last
        bytes; None otherwise.

        Raises:
            Refused: the payload is too large, its frames contradict each other, or its digest is wrong.
            StateError: the disk cannot be read.
        """
        key = (device, frame.digest)
        is_last = frame.offset + len(frame.data) >= frame.size_bytes
        if key not in self._transfers:
            if self.holds(*key):
                return Receipt(digest=frame.digest, status="received") if is_last else None
            self._open(key, frame)
        transfer = self._transfers[key] = self._transfers.pop(key)  # to the end: it has the newest frame
        self._keys_of[device][key] = self._keys_of[device].pop(key)
        transfer.seen_s = now_s
        try:
            before = transfer.weight
            transfer.assembly.add(frame)
            if transfer.assembly.fresh:
                self._fresh[key] = transfer
            self._count(device, transfer.weight - before)
            if transfer.assembly.held_bytes == frame.size_bytes:
                payload = transfer.assembly.payload(self.read(key, transfer.stored))
                self._drop(key)
                return Complete(frame.digest, payload)
        except TransferError as error:
            self._drop(key)
            raise Refused("digest", str(error)) from error
        while self._held_bytes > self.max_held_bytes and len(self._transfers) > 1:
            greatest = max(self._held_by, key=self._held_by.__getitem__)
            self._drop(next(iter(self._keys_of[greatest])))
        if not is_last or key not in self._transfers:
            return None
        missing = transfer.assembly.missing(MAX_RANGES)
        return Receipt(digest=frame.digest, status="missing", missing=missing)

    def expire(self, before_s: float) -> list[Key]:
        """Drop the transfers without a frame since `before_s`, elapsed seconds; returns them."""
        old = [key for key, transfer in self._transfers.items() if transfer.seen_s < before_s]
        for key in old:
            self._drop(key)
        return old

    def drop_device(self, device: str) -> None:
        for key in list(self._keys_of.get(device, ())):
            self._drop(key)

    def pending(self) -> list[Transfer]:
        """Return the transfers with bytes that are not on the disk yet."""
        return list(self._fresh.values())

    def settle(self) -> None:
        """Release from memory what `pending` returned, and forget `ended`: the disk is up to date."""
        for transfer in self.pending():
            transfer.stored = transfer.assembly.ranges()
            transfer.assembly.settle()
        self._fresh.clear()
        self.ended.clear()

    def _open(self, key: Key, frame: Frame) -> None:
        if frame.size_bytes > self.max_bytes:
            raise Refused("oversized", f"expected at most {self.max_bytes} bytes, got {frame.size_bytes}")
        own = list(self._keys_of.get(key[0], ()))
        for other in own[: len(own) - self.per_device + 1]:
            self._drop(other)
        transfer = self._transfers[key] = Transfer(key, Assembly(frame.digest, frame.size_bytes), 0.0)
        self._keys_of.setdefault(key[0], {})[key] = None
        self._count(key[0], transfer.weight)

    def _drop(self, key: Key) -> None:
        transfer = self._transfers.pop(key)
        self._fresh.pop(key, None)
        own = self._keys_of[key[0]]
        del own[key]
        if not own:
            del self._keys_of[key[0]]
        self._count(key[0], -transfer.weight)
        if transfer.stored:
            self.ended.append(key)

    def _count(self, device: str, weight: int) -> None:
        self._held_bytes += weight
        self._held_by[device] += weight
        if not self._held_by[device]:
            del self._held_by[device]
