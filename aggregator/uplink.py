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
        max_held_bytes: what all unfinished transfers may hold together; beyond it, the oldest goes.
    """

    def __init__(self, *, max_bytes: int, per_device: int = 2, max_held_bytes: int = 512 * 1024**2) -> None:
        self._max_bytes = max_bytes
        self._per_device = per_device
        self._max_held_bytes = max(max_held_bytes, max_bytes)
        self._held_bytes = 0
        self._assemblies: dict[tuple[str, bytes], Assembly] = {}

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
        key = (device, frame.digest)
        if key not in self._assemblies:
            if holds(device, frame.digest):
                return Receipt(digest=frame.digest, status="received") if is_last else None
            self._open(device, frame)
        assembly = self._assemblies[key]
        try:
            self._add(assembly, frame)
            missing = assembly.missing() if is_last or assembly.held_bytes == frame.size_bytes else None
            if missing:
                self._make_room(key)
                return Receipt(digest=frame.digest, status="missing", missing=missing[:MAX_RANGES])
            if missing is None:
                self._make_room(key)
                return None
            self._drop(key)
            return Complete(frame.digest, assembly.payload())
        except TransferError as error:
            self._drop(key)
            raise Refused("digest", str(error)) from error

    def _open(self, device: str, frame: Frame) -> None:
        if frame.size_bytes > self._max_bytes:
            raise Refused("oversized", f"expected at most {self._max_bytes} bytes, got {frame.size_bytes}")
        own = [key for key in self._assemblies if key[0] == device]
        for key in own[: len(own) - self._per_device + 1]:
            self._drop(key)
        self._assemblies[device, frame.digest] = Assembly(frame.digest, frame.size_bytes)

    def _add(self, assembly: Assembly, frame: Frame) -> None:
        before = assembly.held_bytes
        assembly.add(frame)
        self._held_bytes += assembly.held_bytes - before

    def _drop(self, key: tuple[str, bytes]) -> None:
        assembly = self._assemblies.pop(key, None)
        if assembly is not None:
            self._held_bytes -= assembly.held_bytes

    def _make_room(self, newest: tuple[str, bytes]) -> None:
        """Push out the oldest transfers while all together hold too much; their devices begin again."""
        while self._held_bytes > self._max_held_bytes:
            self._drop(next(key for key in self._assemblies if key != newest))
