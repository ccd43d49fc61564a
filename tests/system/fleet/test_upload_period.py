"""A device with --upload-period-s, on real processes: all that it sends leaves a period after its build began.

Everything is compared with the beginnings of builds, which `sequence` states: a busy machine makes it later only.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from edge_client.privacy.upload_slots import next_slot_s
from protocol.wire.codec import decode, message_kind
from protocol.wire.messages import MAX_FRAME_BYTES, Evaluation, Frame, Receipt, Submission
from protocol.wire.topics import device_topic
from tests.support.fleets.fleet import Fleet, write_digits
from tests.support.fleets.secure_fleet import EACH, write_private_task
from tests.support.network.brokers import free_address, mosquitto
from tests.system.attacks.attacker_client import ReceivedMessage, TrafficMonitor

PERIOD_S = 4.0
Upload = TypeVar("Upload", Submission, Evaluation)

ACK = device_topic("default", "device", "ack")
UP = device_topic("default", "device", "up")
OF_DEVICE = {device_topic("default", "device", channel) for channel in ("state", "info", "up", "get")}


class Traffic:
    """The messages of a device, as a client at the broker sees them."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When each message came (unix seconds)."""
        self._received: set[bytes] = set()
        self._begun: dict[bytes, tuple[float, bytearray]] = {}

    def take(self, message: ReceivedMessage) -> None:
        """Take a message of any client."""
        if message.topic == ACK and message_kind(message.payload) == "receipt":
            receipt = decode(message.payload, Receipt, max_bytes=len(message.payload))
            self._received |= {receipt.digest} if receipt.status == "received" else set()
        if message.topic not in OF_DEVICE or message.retained:
            return
        self.times.append(time.time())
        if message.topic == UP:
            frame = decode(message.payload, Frame, max_bytes=MAX_FRAME_BYTES)
            empty = (self.times[-1], bytearray(frame.size_bytes))
            content = self._begun.setdefault(frame.digest, empty)[1]
            content[frame.offset : frame.offset + len(frame.data)] = frame.data

    def received(self, kind: type[Upload]) -> list[tuple[float, Upload]]:
        """Return the uploads of a kind that the aggregator has received, each with the time of its first frame."""
        uploads = [
            (at_s, bytes(data))
            for digest, (at_s, data) in self._begun.copy().items()
            if digest in self._received
        ]
        tag = kind.__struct_config__.tag
        return [
            (at_s, decode(data, kind, max_bytes=len(data)))
            for at_s, data in uploads
            if message_kind(data) == tag
        ]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with mosquitto(address := free_address(), tmp_path), Fleet(tmp_path, address) as fleet:
        yield fleet


def test_all_that_a_device_sends_leaves_a_period_after_its_build_began(fleet: Fleet) -> None:
    """A first build begins with the program, a later one at a slot; an evaluation follows a head by a period.

    A new image causes no message before the end of its period, neither info nor the record of releases.
    """
    task = write_private_task(fleet.root, min_devices=1, operator="")
    data = write_digits(fleet.root / "data", classes=list(range(10)), start=0, each=EACH)
    traffic = Traffic()
    with TrafficMonitor(fleet.broker, on_message=traffic.take) as monitor:
        fleet.start_aggregator(task)
        fleet.start_device("device", data, "--upload-period-s", str(PERIOD_S), "--rescan-s", "0.5")
        fleet.wait_until("an evaluation", lambda: traffic.received(Evaluation))
        monitor.settle()
        ((left_s, first),), ((evaluated_s, _),) = traffic.received(Submission), traffic.received(Evaluation)
        assert left_s >= first.sequence + PERIOD_S
        assert evaluated_s >= first.sequence + 2 * PERIOD_S
        fleet.wait_until("silence", lambda: time.time() > traffic.times[-1] + 2)
        before = len(traffic.times)
        write_digits(data, classes=[0], start=EACH, each=1)
        fleet.wait_until("a second submission", lambda: len(traffic.received(Submission)) == 2)
    second = traffic.received(Submission)[1][1]
    assert second.sequence >= first.sequence + PERIOD_S
    slot_s = next_slot_s(second.sequence - 1e-3, PERIOD_S, device="device", task=second.task)
    assert int(slot_s) == second.sequence
    assert min(traffic.times[before:]) >= slot_s + PERIOD_S
