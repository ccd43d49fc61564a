"""A device on a private task with --upload-period-s, on real processes: what it sends, and when.

Times are compared with the beginnings of builds, which `sequence` states: a busy machine makes it later only.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest

from edge_client.privacy.upload_slots import next_slot_s
from protocol.wire.codec import decode, message_kind
from protocol.wire.messages import MAX_FRAME_BYTES, DeviceInfo, Evaluation, Frame, Receipt, Submission
from protocol.wire.topics import device_topic
from tests.support.devices.marked_images import BOMB, BYTES_MARK, NAME_MARK, mark_images, write_bomb
from tests.support.fleets.fleet import Fleet, write_digits
from tests.support.fleets.secure_fleet import EACH, write_private_task
from tests.support.network.brokers import free_address, mosquitto
from tests.system.attacks.attacker_client import ReceivedMessage, TrafficMonitor

PERIOD_S = 4.0
Upload = TypeVar("Upload", Submission, Evaluation)

ACK = device_topic("default", "device", "ack")
UP = device_topic("default", "device", "up")
INFO = device_topic("default", "device", "info")
OF_DEVICE = {device_topic("default", "device", channel) for channel in ("state", "info", "up", "get")}


class Traffic:
    """The messages of a device, as a client at the broker sees them."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When each message came (unix seconds)."""
        self.payloads = bytearray()
        """All that it has sent, one after the other."""
        self.head = 0
        """The version of the head that it has reported last."""
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
        self.payloads += message.payload
        if message.topic == INFO:
            self.head = decode(message.payload, DeviceInfo, max_bytes=len(message.payload)).head_version
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


@dataclass(frozen=True)
class Run:
    """A device that has submitted twice: to a task, and with an image more."""

    fleet: Fleet
    traffic: Traffic
    before_image: int
    """Messages of the device before that image was written."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    root, address, traffic = tmp_path_factory.mktemp("period"), free_address(), Traffic()
    with (
        mosquitto(address, root),
        Fleet(root, address) as fleet,
        TrafficMonitor(address, on_message=traffic.take) as monitor,
    ):
        task = write_private_task(root, min_devices=1, operator="")
        data = write_digits(root / "images", classes=list(range(10)), start=0, each=EACH)
        mark_images(data)
        write_bomb(data / "0")
        fleet.start_aggregator(task, "--verbose")
        fleet.start_device("device", data, "--upload-period-s", str(PERIOD_S), "--rescan-s", "0.5")
        fleet.wait_until("an evaluation", lambda: traffic.received(Evaluation))
        # It sends an evaluation first, then this, and then nothing.
        fleet.wait_until("the report of the head", lambda: traffic.head == 1)
        monitor.settle()
        before = len(traffic.times)
        write_digits(data, classes=[0], start=EACH, each=1)
        fleet.wait_until("a second submission", lambda: len(traffic.received(Submission)) == 2)
        yield Run(fleet, traffic, before)


def test_uploads_leave_a_period_after_their_builds_began(run: Run) -> None:
    """A first build begins with the program, a later one at a slot; an evaluation follows a head by a period."""
    (first_s, first), (second_s, second) = run.traffic.received(Submission)
    assert first_s >= first.sequence + PERIOD_S
    assert run.traffic.received(Evaluation)[0][0] >= first.sequence + 2 * PERIOD_S
    assert second.sequence >= first.sequence + PERIOD_S
    slot_s = next_slot_s(second.sequence - 1e-3, PERIOD_S, device="device", task=second.task)
    assert int(slot_s) == second.sequence
    assert second_s >= slot_s + PERIOD_S


def test_a_new_image_causes_no_message_before_its_period_ends(run: Run) -> None:
    """Neither presence, nor info, nor the record of releases."""
    _, (_, second) = run.traffic.received(Submission)
    assert min(run.traffic.times[run.before_image :]) >= second.sequence + PERIOD_S


def test_no_image_of_a_private_task_leaves_its_device(run: Run) -> None:
    """Neither bytes nor names of images are in what it sends, or on the aggregator's side; one cannot be decoded."""
    assert f"image omitted path={run.fleet.root / 'images/0' / BOMB}" in run.fleet.log("device")
    folder = run.fleet.aggregator_state
    outside = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    for data in (*outside, run.fleet.log("aggregator").encode(), bytes(run.traffic.payloads)):
        for mark in (NAME_MARK, BYTES_MARK, BOMB):
            assert mark.encode() not in data
