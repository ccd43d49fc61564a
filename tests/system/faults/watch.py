"""Transfers that cross a proxy: frames so far, and whether the receipt has crossed."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from protocol.errors import MalformedMessage
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_FRAME_BYTES, Frame, Receipt
from protocol.wire.topics import parse_device_topic
from tests.support.network_proxy import Seen


@dataclass
class Transfer:
    """A transfer between a device and the aggregator."""

    size_bytes: int
    offsets: set[int] = field(default_factory=set)
    frames: int = 0
    received: bool = False
    """Whether a receipt that says so has crossed."""


class Watch:
    """Sees every publication that crosses a proxy.

    Attributes:
        up: transfers of devices, by device and digest.
        down: blobs that devices fetch, likewise.
    """

    def __init__(self) -> None:
        self.up: dict[tuple[str, bytes], Transfer] = {}
        self.down: dict[tuple[str, bytes], Transfer] = {}
        self.answers: Counter[str] = Counter()
        """Receipts by status, or by the reason of a refusal."""
        self._lock = threading.Lock()

    def see(self, seen: Seen) -> None:
        """Record a publication."""
        try:
            where = parse_device_topic(seen.topic)
            if where.channel in {"up", "blk"}:
                self._frame(
                    where.device, where.channel, decode(seen.payload, Frame, max_bytes=MAX_FRAME_BYTES)
                )
            elif where.channel == "ack" and seen.direction == "down":
                self._receipt(where.device, decode(seen.payload, Receipt, max_bytes=MAX_FRAME_BYTES))
        except MalformedMessage:
            return  # of another channel, or damaged on purpose

    def _frame(self, device: str, channel: str, frame: Frame) -> None:
        with self._lock:
            transfers = self.up if channel == "up" else self.down
            transfer = transfers.setdefault((device, frame.digest), Transfer(frame.size_bytes))
            transfer.offsets.add(frame.offset)
            transfer.frames += 1

    def _receipt(self, device: str, receipt: Receipt) -> None:
        with self._lock:
            transfer = self.up.get((device, receipt.digest))
            self.answers[receipt.reason or receipt.status] += 1
            if transfer is not None and receipt.status == "received":
                transfer.received = True

    def submissions(self, *, least_bytes: int) -> dict[tuple[str, bytes], Transfer]:
        """The transfers up that are at least this large: an evaluation is small."""
        with self._lock:
            return {key: transfer for key, transfer in self.up.items() if transfer.size_bytes >= least_bytes}

    def frames_up(self, name: str | None = None) -> int:
        """Frames that have crossed on the way from devices, or from one."""
        with self._lock:
            return sum(one.frames for (device, _), one in self.up.items() if name in {None, device})

    def frames_down(self, digest: str | None = None) -> int:
        """Frames that have crossed on the way to devices, of all blobs or of the one with this hex digest."""
        with self._lock:
            return sum(one.frames for (_, blob), one in self.down.items() if digest in {None, blob.hex()})
