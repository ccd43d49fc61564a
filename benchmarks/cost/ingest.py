"""Cost of durable ingest: an aggregator that stores submissions, against a subscriber that discards them.

`python -m benchmarks ingest` sends the same packets through the same mosquitto for both, in turns, since the machine
may be busy: read the ratio, not the speeds. The time is from the first packet until the subscriber has received the
last one, or until the last receipt, which confirms that everything is on the aggregator's disk. The frames of all
devices are mixed, one of each in turn. The processor time of each depends less on other programs.
"""

import contextlib
import io
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import click
import psutil

from benchmarks.cost.ingest_load import Load, write_load
from benchmarks.cost.processes import mosquitto, running
from benchmarks.report import json_option, print_figures, write_json
from protocol.errors import ProtofleetError
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Event, Received, Session
from protocol.wire.codec import decode
from protocol.wire.messages import Presence, Receipt
from protocol.wire.topics import device_topic, fleet_topic

ROOT = Path(__file__).parents[2]
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
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Cost:
    """Cost of a load for a subscriber: seconds, and seconds of a processor."""

    wall_s: float
    cpu_s: float


@click.command("ingest")
@click.option("--devices", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--submissions", type=click.IntRange(min=1), default=20, show_default=True, help="Of each device."
)
@click.option(
    "--megabytes", type=click.FloatRange(min=0.001), default=2.0, show_default=True, help="Of each."
)
@click.option("--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
@json_option
def ingest(
    *, devices: int, submissions: int, megabytes: float, repetitions: int, json_file: Path | None
) -> None:
    """Compare the aggregator's ingest with a subscriber that discards, on mosquitto."""
    with tempfile.TemporaryDirectory() as folder:
        figures, runs = measure(
            Path(folder),
            devices=devices,
            submissions=submissions,
            size_bytes=int(megabytes * 1e6),
            repetitions=repetitions,
        )
    table = print_figures(figures)
    write_json(json_file, "ingest", tables=[table], figures=figures, runs=runs)


def measure(
    folder: Path, *, devices: int, submissions: int, size_bytes: int, repetitions: int
) -> tuple[dict[str, float], list[dict[str, dict[str, float]]]]:
    """Return medians of throughput and of processor time a submission, ratios of neighboring runs, and all runs."""
    task = folder / "task.toml"
    backbone = ROOT / "examples" / "quickstart" / "backbone.onnx"
    task.write_text(TASK.format(fleet=FLEET, backbone=backbone))
    load = write_load(folder, task, devices=devices, submissions=submissions, size_bytes=size_bytes)
    discarded, received = [], []
    with mosquitto(folder) as broker:
        for number in range(repetitions):
            discarded.append(time_discarding(broker, load))
            received.append(time_aggregator(broker, load, task, folder / f"state-{number}"))
            shutil.rmtree(folder / f"state-{number}")
    ratios = [theirs.wall_s / ours.wall_s for ours, theirs in zip(received, discarded, strict=True)]
    figures = {"megabytes": load.size_bytes / 1e6}
    for name, costs in (("discarding", discarded), ("aggregator", received)):
        wall_s = statistics.median(cost.wall_s for cost in costs)
        cpu_s = statistics.median(cost.cpu_s for cost in costs)
        figures[f"{name}_mb_per_second"] = load.size_bytes / wall_s / 1e6
        figures[f"{name}_cpu_ms"] = cpu_s / load.submissions * 1e3
    figures |= {
        "ratio_lowest": min(ratios),
        "ratio": statistics.median(ratios),
        "ratio_highest": max(ratios),
    }
    runs = [
        {"discarding": asdict(theirs), "aggregator": asdict(ours)}
        for ours, theirs in zip(received, discarded, strict=True)
    ]
    return figures, runs


def time_discarding(broker: BrokerAddress, load: Load) -> Cost:
    """Measure until a process with a bare session has received every message."""
    call = f"from benchmarks.cost.ingest import discard\ndiscard({broker.port}, {load.messages})"
    with _running("-c", call) as lines:
        lines.readline()
        with publisher(broker, load):
            started = time.perf_counter()
            cpu_s = float(lines.readline())
            return Cost(time.perf_counter() - started, cpu_s)


def discard(port: int, messages: int) -> None:
    """Subscribe to what devices upload; print on stdout when subscribed, and at the end the processor time.

    Each message is acknowledged from this thread, as the aggregator has to, but at once.
    """
    broker, topic = BrokerAddress("127.0.0.1", port), f"pf/1/{FLEET}/d/+/up/+"
    with listening(broker, topic, manual_ack=True) as (session, events):
        print("ready", flush=True)
        started = time.process_time()
        for _ in range(messages):
            session.acknowledge(events.get(timeout=TIMEOUT_S))
        print(time.process_time() - started, flush=True)


def time_aggregator(broker: BrokerAddress, load: Load, task: Path, state: Path) -> Cost:
    """Measure until a new aggregator has sent a receipt for every submission."""
    log = state.with_suffix(".log")
    arguments = ["run", "--task", str(task), "--state", str(state), "--broker", str(broker)]
    topics = [fleet_topic(FLEET, "state"), *(device_topic(FLEET, name, "ack") for name in load.devices)]
    with listening(broker, *topics) as (_, events), running("aggregator.cli", *arguments, log=log) as process:
        _wait_online(events)
        with publisher(broker, load):
            started, before_s = time.perf_counter(), _cpu_s(process.pid)
            _count_receipts(events, load.submissions)
            return Cost(time.perf_counter() - started, _cpu_s(process.pid) - before_s)


@contextlib.contextmanager
def publisher(broker: BrokerAddress, load: Load) -> Iterator[None]:
    """Publish a load from a process of its own, beginning now."""
    arguments = [str(broker.port), str(load.packets), str(load.messages)]
    with _running("-m", "benchmarks.cost.publish_packets", *arguments) as lines:
        lines.readline()
        yield


@contextlib.contextmanager
def _running(*arguments: str) -> Iterator[IO[bytes]]:
    """Run Python; what it prints can be read."""
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE) as process:
        try:
            yield process.stdout or io.BytesIO()
        finally:
            process.kill()


@contextlib.contextmanager
def listening(
    broker: BrokerAddress, *topics: str, manual_ack: bool = False
) -> Iterator[tuple[Session, "queue.SimpleQueue[Received]"]]:
    """Subscribe to topics; received messages are in the queue."""
    others: queue.SimpleQueue[Event] = queue.SimpleQueue()
    received: queue.SimpleQueue[Received] = queue.SimpleQueue()

    session = Session(
        broker,
        client_id="listener",
        subscriptions=topics,
        on_event=lambda event: received.put(event) if isinstance(event, Received) else others.put(event),
        manual_ack=manual_ack,
    )
    session.start()
    try:
        while not isinstance(others.get(timeout=TIMEOUT_S), Connected):
            pass
        yield session, received
    finally:
        session.stop()


def _cpu_s(process: int) -> float:
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)


def _wait_online(received: "queue.SimpleQueue[Received]") -> None:
    while True:
        payload = received.get(timeout=TIMEOUT_S).payload
        if decode(payload, Presence, max_bytes=1024).state == "online":
            return


def _count_receipts(received: "queue.SimpleQueue[Received]", number: int) -> None:
    """Wait for so many receipts; a refused submission is an error."""
    while number:
        message = received.get(timeout=TIMEOUT_S)
        if not message.topic.endswith("/ack"):
            continue
        receipt = decode(message.payload, Receipt, max_bytes=65536)
        if receipt.status == "refused":
            raise ProtofleetError(f"the aggregator has refused a submission: {receipt.detail}")
        number -= receipt.status == "received"
