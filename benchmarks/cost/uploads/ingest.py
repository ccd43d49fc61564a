"""Cost of durable ingest: submissions that reach `aggregator run` as fast as mosquitto takes them.

The time is from the first packet until the last receipt, which confirms that everything is on the aggregator's disk.
The frames of all devices are mixed, one of each in turn. Processor time is the kernel's count for the aggregator's
process, without the kernel's own threads for disk and network.
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
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from aggregator.config.task_file import load_task
from aggregator.storage.open_store import open_store
from aggregator.tasks.task_preparation import Task, prepare_task
from benchmarks.device.measurement import median
from benchmarks.processes import ROOT, mosquitto, running, serve_of
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ProtofleetError
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Event, Received, Session
from protocol.wire.arrays import to_unsigned
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import Presence, Receipt, Submission
from protocol.wire.quantization import prototype_fields
from protocol.wire.signing import sign_frame
from protocol.wire.topics import device_topic, fleet_topic
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


@dataclass(frozen=True)
class Cost:
    """Cost of a load: seconds, and seconds of a processor."""

    wall_s: float
    cpu_s: float
    bytes: int
    submissions: int


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
    """Measure how fast the aggregator stores submissions, on mosquitto."""
    columns = {"MB": ">5g", "submissions/s": ">15.1f", "CPU ms/submission": ">19.2f", "CPU s/GB": ">10.2f"}
    table, every = Table(columns, title=f"Submissions of {devices} devices"), {}
    for size in megabytes:
        with tempfile.TemporaryDirectory() as folder:
            runs = measure(
                Path(folder),
                devices=devices,
                submissions=max(1, round(load_mb / size / devices)),
                size_bytes=int(size * 1e6),
                repetitions=repetitions,
            )
        count, cpu_s = runs[0].submissions, median(runs, "cpu_s")
        table.row(size, count / median(runs, "wall_s"), 1000 * cpu_s / count, cpu_s / (runs[0].bytes / 1e9))
        every[f"{size:g}"] = [asdict(run) for run in runs]
    write_json(json_file, "ingest", tables=[table], runs=every)


def measure(folder: Path, *, devices: int, submissions: int, size_bytes: int, repetitions: int) -> list[Cost]:
    """Return the costs of a load, after a first run, which fills caches."""
    task = write_task(folder)
    load = write_load(folder, task, devices=devices, submissions=submissions, size_bytes=size_bytes)
    runs = []
    with mosquitto(folder) as broker:
        for number in range(repetitions + 1):
            state = folder / f"state-{number}"
            runs.append(time_aggregator(broker, load, task, state))
            shutil.rmtree(state)
    return runs[1:]


def write_task(folder: Path, fleet: str = FLEET) -> Path:
    """Write the task file of a fleet that makes no head."""
    task = folder / "task.toml"
    task.write_text(TASK.format(fleet=fleet, backbone=ROOT / "examples" / "quickstart" / "backbone.onnx"))
    return task


def time_aggregator(broker: BrokerAddress, load: Load, task: Path, state: Path) -> Cost:
    """Measure until a new aggregator has sent a receipt for every submission."""
    arguments = ("run", "--task", str(task), "--state", str(state), "--broker", str(broker))
    topics = [fleet_topic(FLEET, "state"), *(device_topic(FLEET, name, "ack") for name in load.devices)]
    with (
        listening(broker, *topics) as events,
        running("aggregator.cli", *arguments, log=state.with_suffix(".log")) as aggregator,
    ):
        wait_online(events)
        with publisher(broker, load):
            serve = serve_of(aggregator)
            begin_s, begin_cpu_s = time.perf_counter(), _cpu_s(serve)
            count_receipts(events, load.submissions)
            return Cost(
                time.perf_counter() - begin_s,
                _cpu_s(serve) - begin_cpu_s,
                load.size_bytes,
                load.submissions,
            )


def _cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process; Linux only.

    It is exact, other than that in `/proc`, which counts in 10 ms. The clock's number is that of clock_getcpuclockid.
    """
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def publisher(broker: BrokerAddress, load: Load) -> Iterator[None]:
    """Publish a load from a process of its own, beginning now."""
    arguments = [str(broker.port), str(load.packets), str(load.messages)]
    command = [sys.executable, "-m", "benchmarks.cost.uploads.publish_packets", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            (process.stdout or io.BytesIO()).readline()
            yield
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
