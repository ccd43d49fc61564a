"""Transfers that cross a proxy: their frames so far, and whether the receipt has crossed."""

import threading
from collections import Counter
from dataclasses import dataclass

from protocol.errors import MalformedMessage
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_FRAME_BYTES, Frame, Receipt
from protocol.wire.topics import parse_device_topic
from tests.support.network.proxy import Seen


@dataclass
class Transfer:
    size_bytes: int
    frames: int = 0
    received: bool = False
    """True once a receipt with the status `received` has crossed."""


class TransferLog:
    """Records every publication that crosses a proxy.

    Attributes:
        up: uploads of devices, by device and digest.
        down: downloads of devices, likewise.
        answers: receipts by status, or by the reason of a refusal.
    """

    def __init__(self) -> None:
        self.up: dict[tuple[str, bytes], Transfer] = {}
        self.down: dict[tuple[str, bytes], Transfer] = {}
        self.answers: Counter[str] = Counter()
        self._lock = threading.Lock()

    def record(self, seen: Seen) -> None:
        try:
            where = parse_device_topic(seen.topic)
            if where.channel in {"up", "blk"}:
                frame = decode(seen.payload, Frame, max_bytes=MAX_FRAME_BYTES)
                self._record_frame(where.device, self.up if where.channel == "up" else self.down, frame)
            elif where.channel == "ack" and seen.direction == "down":
                self._record_receipt(where.device, decode(seen.payload, Receipt, max_bytes=MAX_FRAME_BYTES))
        except MalformedMessage:
            return  # of another channel, or damaged on purpose

    def _record_frame(self, device: str, transfers: dict[tuple[str, bytes], Transfer], frame: Frame) -> None:
        with self._lock:
            transfers.setdefault((device, frame.digest), Transfer(frame.size_bytes)).frames += 1

    def _record_receipt(self, device: str, receipt: Receipt) -> None:
        with self._lock:
            self.answers[receipt.reason or receipt.status] += 1
            if (device, receipt.digest) in self.up and receipt.status == "received":
                self.up[device, receipt.digest].received = True

    def submissions(self, *, min_bytes: int) -> dict[tuple[str, bytes], Transfer]:
        """Return the uploads that are at least this large: an evaluation is small."""
        with self._lock:
            return {key: transfer for key, transfer in self.up.items() if transfer.size_bytes >= min_bytes}

    def frames_up(self, device: str | None = None) -> int:
        """Count frames from all devices, or from one."""
        with self._lock:
            return sum(one.frames for (name, _), one in self.up.items() if device in {None, name})

    def frames_down(self, digest: str | None = None) -> int:
        """Count frames to devices, of all blobs or of the one with this hex digest."""
        with self._lock:
            return sum(one.frames for (_, blob), one in self.down.items() if digest in {None, blob.hex()})
