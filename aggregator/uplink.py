"""Transfers coming in from devices: bounded, in any order, any number of times. No I/O and no clock."""

from collections.abc import Callable
from dataclasses import dataclass

from aggregator.intake import Refused
from protocol.errors import TransferError
from protocol.messages import Frame, Receipt
from protocol.transfer import Assembly

MAX_RANGES = 64
"""Missing ranges in one receipt."""


@dataclass(frozen=True)
class Complete:
    """A transfer whose bytes are all there and are the digest's."""

    digest: bytes
    payload: bytes


class Uplink:
    """The unfinished transfers of all devices.

    Args:
        max_bytes: the largest transfer that is taken.
        per_device: unfinished transfers a device may have; a further one pushes out its oldest.
    """

    def __init__(self, *, max_bytes: int, per_device: int = 2) -> None:
        self._max_bytes = max_bytes
        self._per_device = per_device
        self._assemblies: dict[str, dict[bytes, Assembly]] = {}

    def take(
        self, device: str, frame: Frame, *, holds: Callable[[str, bytes], bool]
    ) -> Receipt | Complete | None:
        """Take a frame: a receipt to send back, a payload to look into, or nothing to say yet.

        The last bytes of a transfer are a question as well: they are answered with what is missing.

        Args:
            device: who sent it.
            frame: what it sent.
            holds: whether a device's payload of this digest was taken before.

        Raises:
            Refused: too large, self-contradicting, or not the announced digest's bytes.
        """
        is_last = frame.offset + len(frame.data) >= frame.size_bytes
        transfers = self._assemblies.setdefault(device, {})
        if frame.digest not in transfers:
            if holds(device, frame.digest):
                return Receipt(digest=frame.digest, status="received") if is_last else None
            self._open(transfers, frame)
        assembly = transfers[frame.digest]
        try:
            assembly.add(frame)
            missing = assembly.missing() if is_last or assembly.held_bytes == frame.size_bytes else None
            if missing:
                return Receipt(digest=frame.digest, status="missing", missing=missing[:MAX_RANGES])
            if missing is None:
                return None
            del transfers[frame.digest]
            return Complete(frame.digest, assembly.payload())
        except TransferError as error:
            transfers.pop(frame.digest, None)
            raise Refused("digest", str(error)) from error

    def _open(self, transfers: dict[bytes, Assembly], frame: Frame) -> None:
        if frame.size_bytes > self._max_bytes:
            raise Refused("oversized", f"expected at most {self._max_bytes} bytes, got {frame.size_bytes}")
        while len(transfers) >= self._per_device:
            del transfers[next(iter(transfers))]
        transfers[frame.digest] = Assembly(frame.digest, frame.size_bytes)
