"""Cost of durable ingest: an aggregator that stores submissions, against a subscriber that discards them.

`cost ingest` sends the same packets through the same mosquitto to each receiver, in turns: to none, to a paho program
that discards, to one that does the least that is durable, and to `aggregator run`. The time is from the first packet
until the subscriber has received the last one, or until the last receipt, which confirms that everything is on the
aggregator's disk. The frames of all devices are mixed, one of each in turn. Processor time is the kernel's count for
the process, without the kernel's own threads for disk and network.
"""

import contextlib
import io
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

import click
import numpy as np
import psutil

from aggregator.config.task_file import load_task
from aggregator.storage.open_store import open_store
from aggregator.tasks.task_preparation import Task, prepare_task
from benchmarks.device.measurement import median, ratio
from benchmarks.processes import ROOT, mosquitto, running, wait_for_log
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ProtofleetError
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Event, Received, Session
from protocol.wire.codec import decode, digest_of, encode, to_unsigned
from protocol.wire.messages import Presence, Receipt, Submission
from protocol.wire.quantization import prototype_fields
from protocol.wire.signing import sign_frame
from protocol.wire.topics import SHARDS, device_topic, fleet_topic
from protocol.wire.transfer import frames_of


@dataclass(frozen=True)
class Load:
    """Submissions to publish."""

    packets: Path
    """A file of whole MQTT packets, one after the other."""
    messages: int
    size_bytes: int
    devices: tuple[str, ...]
    submissions: int


def write_load(folder: Path, task: Path, *, devices: int, submissions: int, size_bytes: int) -> Load:
    """Write the packets of so many submissions of each device, each of random prototypes of so many bytes."""
    store = open_store(folder / "preparation")
    prepared = prepare_task(*load_task(task), store=store)
    store.close()
    names = tuple(f"device-{number}" for number in range(devices))
    random = np.random.default_rng(0)
    path, messages, total_bytes = folder / "packets", 0, 0
    with path.open("wb") as file:
        for sequence in range(1, submissions + 1):
            payloads = [_payload(prepared, sequence, size_bytes, random) for _ in names]
            total_bytes += sum(map(len, payloads))
            for packet in _mixed(prepared.file.fleet, dict(zip(names, payloads, strict=True)), messages):
                file.write(packet)
                messages += 1
    return Load(path, messages, total_bytes, names, submissions * devices)


def _payload(task: Task, sequence: int, size_bytes: int, random: np.random.Generator) -> bytes:
    rows = max(1, size_bytes // task.feature_size)
    values = random.normal(size=(rows, task.feature_size)).astype(np.float16)
    return encode(
        Submission(
            task=task.digest,
            sequence=sequence,
            **prototype_fields(values),
            labels=to_unsigned(np.arange(rows) % len(task.file.classes)),
            counts=to_unsigned(np.ones(rows, dtype=np.int64)),
            images=rows,
        )
    )


def _mixed(fleet: str, payloads: dict[str, bytes], sent: int) -> Iterator[bytes]:
    """Yield the packets of one payload of each device, a frame of each in turn."""
    frames = [frames_of(payload, digest=digest_of(payload)) for payload in payloads.values()]
    for turn in zip(*frames, strict=True):
        for name, frame in zip(payloads, turn, strict=True):
            sent += 1
            signed = sign_frame(frame, key=digest_of(name.encode()), fleet=fleet, device=name)
            yield _publish(device_topic(fleet, name, "up"), encode(signed), identifier=sent % 65535 + 1)


def _publish(topic: str, payload: bytes, *, identifier: int) -> bytes:
    """Write a publication at QoS 1, MQTT 3.1.1."""
    name = topic.encode()
    rest = len(name).to_bytes(2, "big") + name + identifier.to_bytes(2, "big") + payload
    length, left = bytearray(), len(rest)
    while left >= 128:
        length.append(left & 127 | 128)
        left >>= 7
    return bytes((0x32, *length, left)) + rest


FLEET = "ingest"
TASK = """\
fleet = "{fleet}"
classes = ["a", "b", "c"]
backbones = ["{backbone}"]
quorum = 1000000
deadline_s = 1000000
[client]
batch_size = 1
min_images = 1
"""
TIMEOUT_S = 120.0
MAX_LOAD_BYTES = 128 * 1024**2
"""Messages that mosquitto queues for a subscriber: it drops what is beyond, and no device is there to send it again."""

UNRECEIVED, DISCARDS, STORES, OURS = "no subscriber", "discards", "stores, checks nothing", "aggregator run"


@dataclass(frozen=True)
class Cost:
    """Cost of a load: seconds, and seconds of a processor."""

    wall_s: float
    receiver_s: float
    broker_s: float
    """Of the broker's process: receiving from the devices and delivering."""
    bytes: int
    submissions: int
    delivery_s: float = 0.0
    """The broker's above that without a subscriber."""

    @property
    def whole_s(self) -> float:
        """Processor time of the receiver, and of the broker to deliver to it."""
        return self.receiver_s + self.delivery_s


@click.command("ingest")
@click.option("--devices", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--megabytes",
    type=click.FloatRange(min=0.001),
    multiple=True,
    default=(2.0, 0.1),
    show_default=True,
    help="Size of a submission; repeatable.",
)
@click.option(
    "--load",
    "load_mb",
    type=click.FloatRange(min=0.001, max=MAX_LOAD_BYTES / 1e6),
    default=100.0,
    show_default=True,
    help="Megabytes of all submissions of a run.",
)
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@json_option
def command(
    *, devices: int, megabytes: Sequence[float], load_mb: float, repetitions: int, json_file: Path | None
) -> None:
    """Compare the aggregator's ingest with a subscriber that discards, on mosquitto."""
    tables, every = [], {}
    for size in megabytes:
        with tempfile.TemporaryDirectory() as folder:
            submissions = max(1, round(load_mb / size / devices))
            runs = measure(
                Path(folder),
                devices=devices,
                submissions=submissions,
                size_bytes=int(size * 1e6),
                repetitions=repetitions,
            )
        tables.append(table_of(f"Submissions of {size:g} MB", runs))
        every[f"{size:g}"] = {name: [asdict(run) for run in each] for name, each in runs.items()}
    write_json(json_file, "ingest", tables=tables, runs=every)


def table_of(title: str, runs: dict[str, list[Cost]]) -> Table:
    """Print and return the medians of each receiver, and how its costs compare with discarding."""
    table = Table(
        {"receiver": "<22", "submissions/s": ">13.1f", "CPU s/GB": ">10.2f", "broker, to deliver": ">20.2f",
         "speed, ratio": ">14.2f", "CPU, ratio": ">12.2f", "CPU with broker, ratio": ">24.2f"},
        title=title,
    )  # fmt: skip
    for name, each in runs.items():
        if name == UNRECEIVED:
            continue
        gigabytes = each[0].bytes / 1e9
        table.row(
            name,
            each[0].submissions / median(each, "wall_s"),
            median(each, "receiver_s") / gigabytes,
            median(each, "delivery_s") / gigabytes,
            *(ratio(runs[DISCARDS], each, figure) for figure in ("wall_s", "receiver_s", "whole_s")),
        )
    return table


def measure(
    folder: Path, *, devices: int, submissions: int, size_bytes: int, repetitions: int
) -> dict[str, list[Cost]]:
    """Return the costs of each receiver, in turns."""
    task = write_task(folder)
    load = write_load(folder, task, devices=devices, submissions=submissions, size_bytes=size_bytes)
    runs: dict[str, list[Cost]] = {UNRECEIVED: [], DISCARDS: [], STORES: [], OURS: []}
    with mosquitto(folder) as broker:
        for number in range(repetitions + 1):
            state = folder / f"state-{number}"
            costs = {
                UNRECEIVED: time_broker(broker, load),
                DISCARDS: time_plain(broker, load, "discard", state),
                STORES: time_plain(broker, load, "store", state),
                OURS: time_aggregator(broker, load, task, state / "aggregator"),
            }
            shutil.rmtree(state)
            if number:  # the first runs fill caches
                for name, cost in costs.items():
                    delivery_s = cost.broker_s - costs[UNRECEIVED].broker_s
                    runs[name].append(replace(cost, delivery_s=delivery_s))
    return runs


def write_task(folder: Path, fleet: str = FLEET) -> Path:
    """Write the task file of a fleet that makes no head."""
    task = folder / "task.toml"
    task.write_text(TASK.format(fleet=fleet, backbone=ROOT / "examples" / "quickstart" / "backbone.onnx"))
    return task


class Meter:
    """Seconds since its creation: of the clock, of the receivers' processes and of the broker's."""

    def __init__(self, load: Load, *receivers: int) -> None:
        broker = next(each.pid for each in psutil.Process().children() if each.name() == "mosquitto")
        self._load, self._receivers, self._broker = load, receivers, broker
        self._begin = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), sum(map(_cpu_s, self._receivers)), _cpu_s(self._broker)

    def read(self) -> Cost:
        """Return the costs so far."""
        wall_s, receiver_s, broker_s = (
            now - begin for now, begin in zip(self._now(), self._begin, strict=True)
        )
        return Cost(wall_s, receiver_s, broker_s, self._load.size_bytes, self._load.submissions)


def _cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process; Linux only.

    It is exact, other than that in `/proc`, which counts in 10 ms. The clock's number is that of clock_getcpuclockid.
    """
    return time.clock_gettime((~pid << 3) | 2)


def time_broker(broker: BrokerAddress, load: Load) -> Cost:
    """Measure until the broker has acknowledged every message."""
    with publisher(broker, load) as lines:
        meter = Meter(load)
        lines.read()
        return meter.read()


def time_plain(broker: BrokerAddress, load: Load, kind: str, folder: Path) -> Cost:
    """Measure until a program of `receiving_programs` has received every message."""
    topic = f"pf/1/{FLEET}/d/+/up/+"
    arguments = [kind, str(broker.port), topic, str(load.messages), str(folder)]
    with _running("-m", "benchmarks.cost.uploads.receiving_programs", *arguments) as (process, lines):
        lines.readline()
        with publisher(broker, load):
            meter = Meter(load, process.pid)
            lines.readline()
            return meter.read()


def time_aggregator(
    broker: BrokerAddress, load: Load, task: Path, state: Path, *options: str, receivers: int = 0
) -> Cost:
    """Measure until a new aggregator, with or without receivers, has sent a receipt for every submission."""
    state.parent.mkdir(exist_ok=True)
    where = ("--state", str(state), "--broker", str(broker))
    arguments = ["coordinate" if receivers else "run", "--task", str(task), *where, *options]
    topics = [fleet_topic(FLEET, "state"), *(device_topic(FLEET, name, "ack") for name in load.devices)]
    with contextlib.ExitStack() as programs:

        def start(name: str, *arguments: str) -> int:
            program = running("aggregator.cli", *arguments, log=state.with_name(f"{name}.log"))
            return programs.enter_context(program).pid

        events = programs.enter_context(listening(broker, *topics))
        pids = [start("aggregator", *arguments)]
        wait_online(events)
        if receivers:
            pids = []
            for number in range(receivers):
                shards = ",".join(map(str, range(number, SHARDS, receivers)))
                name = f"receiver-{number}"
                pids.append(start(name, "receive", "--name", name, "--shards", shards, *where))
                wait_for_log(state.with_name(f"{name}.log"), "connected to the broker")
        programs.enter_context(publisher(broker, load))
        meter = Meter(load, *pids)
        count_receipts(events, load.submissions)
        return meter.read()


@contextlib.contextmanager
def publisher(broker: BrokerAddress, load: Load) -> Iterator[IO[bytes]]:
    """Publish a load from a process of its own, beginning now; its output ends with the last acknowledgement."""
    arguments = [str(broker.port), str(load.packets), str(load.messages)]
    with _running("-m", "benchmarks.cost.uploads.publish_packets", *arguments) as (_, lines):
        lines.readline()
        yield lines


@contextlib.contextmanager
def _running(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Run Python; what it prints can be read."""
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE) as process:
        try:
            yield process, process.stdout or io.BytesIO()
        finally:
            process.kill()


@contextlib.contextmanager
def listening(broker: BrokerAddress, *topics: str) -> Iterator["queue.SimpleQueue[Received]"]:
    """Subscribe to topics; received messages are in the queue."""
    others: queue.SimpleQueue[Event] = queue.SimpleQueue()
    received: queue.SimpleQueue[Received] = queue.SimpleQueue()

    session = Session(
        broker,
        client_id="listener",
        subscriptions=topics,
        on_event=lambda event: received.put(event) if isinstance(event, Received) else others.put(event),
    )
    session.start()
    try:
        while not isinstance(others.get(timeout=TIMEOUT_S), Connected):
            pass
        yield received
    finally:
        session.stop()


def wait_online(received: "queue.SimpleQueue[Received]") -> None:
    """Wait until an aggregator that was started now is online."""
    while True:
        message = received.get(timeout=TIMEOUT_S)
        if message.retained or message.topic.endswith("/ack"):
            continue  # of an earlier run
        if decode(message.payload, Presence, max_bytes=1024).state == "online":
            return


def count_receipts(received: "queue.SimpleQueue[Received]", number: int) -> None:
    """Wait for so many receipts; a refused submission is an error."""
    while number:
        try:
            message = received.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise ProtofleetError(f"no receipts for {number} submissions within {TIMEOUT_S:.0f} s") from None
        if not message.topic.endswith("/ack"):
            continue
        receipt = decode(message.payload, Receipt, max_bytes=65536)
        if receipt.status == "refused":
            raise ProtofleetError(f"the aggregator has refused a submission: {receipt.detail}")
        number -= receipt.status == "received"
