"""A small fleet behind two proxies, its comparison with a fleet without faults, and what a fault is."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from aggregator.storage.open_store import open_store
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import Secret
from protocol.errors import MalformedMessage
from protocol.wire.codec import decode, digest_of
from protocol.wire.messages import MAX_FRAME_BYTES, Frame, Receipt
from protocol.wire.topics import parse_device_topic
from tests.support.fleets.fleet import Fleet, accepted_submissions, write_digits, write_task
from tests.support.network.brokers import Mosquitto, free_address
from tests.support.network.proxy import Proxy, Seen
from tests.system.tables import FaultRow, Reference


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


SEED = 20261121
DEVICES = ("device-0", "device-1", "device-2")
LATE_DEVICE = "late-device"
"""A device that joins later."""
MIN_SUBMISSION_BYTES = 100_000
"""A device's submission is larger, its evaluation smaller."""

CONNECTED = "connected to the broker"
"""Logged by device and aggregator each time that they reach the broker."""


def write_inputs(folder: Path) -> Path:
    """Write the task with its backbone, and each device's images: a third of the handwritten digits, or a tenth."""
    # A head of the paper's recipe has 5 MB, so that a fault can meet its download.
    tables = '[client]\nbatch_size = 1\nmin_images = 1\n[training]\nrecipe = "paper"\ncalibrate = false\n'
    write_task(folder, feature_sizes=(768,), tables=tables, deadline_s=100_000, retrain_after=1)
    for number, name in enumerate(DEVICES):
        write_digits(folder / name, classes=list(range(10)), start=58 * number, each=58)
    write_digits(folder / LATE_DEVICE, classes=list(range(10)), each=18)
    return folder


class FaultyFleet(Fleet):
    """A fleet whose devices and whose aggregator each reach the broker through a proxy.

    Args:
        root: of all states and logs.
        inputs: the folder of task and images.
        mosquitto: the broker, not started yet.
        reference: the result of a fleet without faults.
        mqtt5: whether the proxies accept MQTT 5.
        abandoned: set when the test run has ended.
        stores: options with which the aggregator is started, for its database and its blobs.

    Attributes:
        device_log: transfers between the devices and the broker.
        aggregator_log: transfers between the broker and the aggregator.
    """

    aggregator_program = "tests.support.fleets.fast_aggregator"

    def __init__(
        self,
        root: Path,
        inputs: Path,
        mosquitto: Mosquitto,
        reference: Reference,
        *,
        mqtt5: bool = True,
        abandoned: threading.Event | None = None,
        stores: tuple[str, ...] = (),
    ) -> None:
        def proxy(log: TransferLog) -> Proxy:
            address, broker = free_address(), mosquitto.address
            return Proxy(address, broker, seed=SEED, without_mqtt5=not mqtt5, on_seen=log.record)

        self.device_log, self.aggregator_log = TransferLog(), TransferLog()
        self.net, self.aggregator_net = proxy(self.device_log), proxy(self.aggregator_log)
        super().__init__(root, self.aggregator_net.address, device_broker=self.net.address)
        self.mosquitto = mosquitto
        self.reference = reference
        self.mqtt5 = mqtt5
        self._inputs = inputs
        self._stores = stores
        self._random = random.Random(SEED)
        self._abandoned = abandoned or threading.Event()
        self._expected: set[str] = set()
        self._connected: dict[str, int] = {}

    def __enter__(self) -> Self:
        self.mosquitto.start()
        self.net.__enter__()
        self.aggregator_net.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._expected):
            self.kill(name)
        self.net.__exit__()
        self.aggregator_net.__exit__()
        self.mosquitto.stop()

    # Processes.

    def run(self, *names: str) -> None:
        """Start devices by name, the aggregator, or without a name all of them."""
        for name in names or ("aggregator", *DEVICES):
            self._connected[name] = self.log(name).count(CONNECTED)
            if name == "aggregator":
                self.start_aggregator(self._inputs / "task.toml", *self._stores)
            else:
                if not self.starts[name]:  # the same shuffles as in the reference, and so the same head
                    DeviceState(self.device_state(name)).set(Secret(digest_of(name.encode())))
                self.start_device(name, self._inputs / name)
            self._expected.add(name)

    def kill(self, name: str, *, with_jobs: bool = True) -> None:
        """End a process by SIGKILL; what it has in transit is lost too."""
        self._expected.discard(name)
        super().kill(name, with_jobs=with_jobs)
        if name == "aggregator":
            self.aggregator_net.cut()
        else:
            self.net.cut(f"-{name}-")

    def pause_for_a_while(self, name: str) -> None:
        self.pause(name)
        time.sleep(self._random.uniform(0.5, 2.0))
        self.resume(name)

    def sleep_up_to(self, longest_s: float, chance: random.Random | None = None) -> None:
        time.sleep((chance or self._random).uniform(0, longest_s))

    def check(self) -> None:
        """Raise if a process has ended by itself, or the test run is over."""
        for name in list(self._expected):
            code = self.processes[name].poll()
            assert code is None, f"{name} has ended, {code}\n{self.diagnostics()}"
        assert not self._abandoned.is_set(), "the run was ended"

    # Transfers.

    def submissions(self) -> dict[tuple[str, bytes], Transfer]:
        """Return the submissions that devices have begun to upload, by device and digest."""
        return self.device_log.submissions(min_bytes=MIN_SUBMISSION_BYTES)

    def uploads(self, name: str = "") -> bool:
        """Return whether a device, by default any, is uploading a submission."""
        uploads = self.submissions().items()
        return any(not transfer.received for (device, _), transfer in uploads if name in device)

    def wait_for_frames(self, log: TransferLog, name: str | None = None, *, head: str | None = None) -> None:
        """Wait for further frames of submissions, or of the head with that digest.

        The named process has to be online since its last start; frames of submissions are a named device's own.
        """
        if name is not None:
            self.wait_for_log(name, CONNECTED, times=self._connected[name] + 1)

        def count() -> int:
            return log.frames_down(head) if head else log.frames_up(name if name in DEVICES else None)

        before = count()
        self.wait_until(f"frames that cross for {name}", lambda: count() > before, pause_s=0.005)

    def wait_for_head_frames(self, count: int) -> None:
        """Wait until frames of the head have crossed to the devices."""
        head = self.reference.head
        self.wait_until(f"{count} frames of the head", lambda: self.device_log.frames_down(head) >= count)

    # The end.

    def settle(self) -> None:
        """End all faults, and wait until every device has uploaded and has evaluated the newest head."""
        self.net.calm()
        self.aggregator_net.calm()
        self.wait_until("a head that every device has evaluated", self.is_settled, pause_s=0.1)

    def is_settled(self) -> bool:
        """Return whether every device has evaluated the newest head."""
        return self.is_evaluated_by(len(self.reference.prototypes))

    def compare(self, row: FaultRow) -> None:
        """Compare a settled fleet with the reference."""
        words, reference = self.diagnostics(), self.reference
        assert (row.once, row.lost, row.twice) == (row.sent, 0, 0), f"{row}\n{words}"
        assert row.sent == len(reference.prototypes), f"{row}\n{words}"
        summary = self.status()
        assert [head["sha256"] for head in summary["heads"]] == [*reference.heads], words
        assert {d["device"]: d["prototypes"] for d in summary["devices"]} == reference.prototypes, words
        for name in reference.prototypes:
            status = self.device_status(name)
            assert status["received"], f"{name}\n{words}"
            assert status["head"]["head"] == reference.heads[-1], f"{name}\n{words}"

    def account(self, fault: str, provoked: int) -> FaultRow:
        """Count submissions and their outcomes, from the aggregator's disk, its newest head and its log."""
        prototypes, sent = self.reference.prototypes, set(self.submissions())
        assert (self.aggregator_state / "store.json").exists() == bool(self._stores)
        with closing(open_store(self.aggregator_state)) as store:
            task = store.served_task().digest
            rows, head = store.submissions.all(task), store.heads.all(task)[-1]
            members = set(store.members(head).items()) - {
                (name, bytes.fromhex(digest)) for name, digest in head.quarantined.items()
            }
        stored = {(name, row.entry.digest): row.prototypes for name, row in rows.items()}
        whole = {key for key in sent if stored.get(key) == prototypes.get(key[0]) and key in members}
        twice = {key for key in whole if self.times_accepted(key[0]) > 1}
        extra = head.prototypes - sum(prototypes.values())
        return FaultRow(
            fault, provoked, len(sent), len(whole - twice), len(sent - whole), max(len(twice), extra > 0)
        )

    def times_accepted(self, name: str) -> int:
        """Count how often the aggregator has logged a submission of a device as accepted."""
        return sum(device == name for device, _ in accepted_submissions(self.log("aggregator")))


Provoke = Callable[[FaultyFleet], int]
"""Starts a fleet of which only the broker runs, provokes a fault, and returns how often."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: as in the table.
        least: how often it has to be provoked. Where a moment has to be met, this is less than the number of attempts:
            on a slow machine the transfer or training may already be over.
        options: lines of the broker's configuration; `{folder}` is its folder.
        without_mqtt5: the broker does not speak MQTT 5.
    """

    name: str
    provoke: Provoke
    least: int
    options: str
    without_mqtt5: bool


def fault(
    name: str, *, least: int, options: str = "max_queued_messages 20000", without_mqtt5: bool = False
) -> Callable[[Provoke], Fault]:
    """Make a fault of a function."""
    return lambda provoke: Fault(name, provoke, least, options, without_mqtt5)
