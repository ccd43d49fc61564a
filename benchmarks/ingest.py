"""What durability costs: an aggregator that takes submissions, against a subscriber that throws them away.

`python -m benchmarks ingest` puts the same packets through the same mosquitto for both, in turns, since the machine
may be busy: read the ratio, not the speeds. Timed is from the first packet until the subscriber has seen the last
one, or until the last receipt is there, which says that everything is on the aggregator's disk. The frames of all
devices are mixed, one of each in turn.
"""

import contextlib
import io
import json
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click

from benchmarks.load import Load, write_load
from benchmarks.restless import free_port
from protocol.codec import decode
from protocol.errors import ProtofleetError
from protocol.messages import Presence, Receipt
from protocol.session import Broker, Connected, Event, Received, Session
from protocol.topics import device_topic, fleet_topic

ROOT = Path(__file__).parents[1]
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
PATIENCE_S = 300.0


@click.command("ingest")
@click.option("--devices", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--submissions", type=click.IntRange(min=1), default=20, show_default=True, help="Of each device."
)
@click.option(
    "--megabytes", type=click.FloatRange(min=0.001), default=2.0, show_default=True, help="Of each."
)
@click.option("--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here as well.")
def ingest(
    *, devices: int, submissions: int, megabytes: float, repetitions: int, json_file: Path | None
) -> None:
    """Compare the aggregator's ingest with a subscriber that discards, on mosquitto."""
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(
            Path(folder),
            devices=devices,
            submissions=submissions,
            size_bytes=int(megabytes * 1e6),
            repetitions=repetitions,
        )
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    for name, value in figures.items():
        print(f"{name:28} {value:,.3f}")


def measure(
    folder: Path, *, devices: int, submissions: int, size_bytes: int, repetitions: int
) -> dict[str, float]:
    """Bytes a second that each takes, medians, and the lowest, median and highest ratio of neighbouring runs."""
    task = folder / "task.toml"
    backbone = ROOT / "examples" / "quickstart" / "backbone.onnx"
    task.write_text(TASK.format(fleet=FLEET, backbone=backbone))
    load = write_load(folder, task, devices=devices, submissions=submissions, size_bytes=size_bytes)
    discarded, taken = [], []
    with mosquitto(folder) as broker:
        for number in range(repetitions):
            discarded.append(load.size_bytes / time_discarding(broker, load))
            taken.append(load.size_bytes / time_aggregator(broker, load, task, folder / f"state-{number}"))
            shutil.rmtree(folder / f"state-{number}")
    ratios = [ours / theirs for ours, theirs in zip(taken, discarded, strict=True)]
    return {
        "megabytes": load.size_bytes / 1e6,
        "discarding_mb_per_second": statistics.median(discarded) / 1e6,
        "aggregator_mb_per_second": statistics.median(taken) / 1e6,
        "ratio_lowest": min(ratios),
        "ratio": statistics.median(ratios),
        "ratio_highest": max(ratios),
    }


@contextlib.contextmanager
def mosquitto(folder: Path) -> Iterator[Broker]:
    """Run mosquitto as `deploy/mosquitto.conf` has it.

    Raises:
        ProtofleetError: it is not installed, or does not start.
    """
    program = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        raise ProtofleetError("mosquitto is not installed: apt-get install mosquitto")
    address = Broker("127.0.0.1", free_port())
    text = (ROOT / "deploy" / "mosquitto.conf").read_text()
    text = text.replace("listener 1883", f"listener {address.port} 127.0.0.1")
    config = folder / "mosquitto.conf"
    config.write_text(text.replace("/var/lib/mosquitto/", f"{folder}/"))
    folder.chmod(0o777)  # mosquitto may give up root's rights
    process = subprocess.Popen([program, "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        _wait_for(address)
        yield address
    finally:
        process.terminate()
        process.wait()


def time_discarding(broker: Broker, load: Load) -> float:
    """Seconds until a process with nothing but our own session has had every message."""
    call = f"from benchmarks.ingest import discard\ndiscard({broker.port}, {load.messages})"
    with _running("-c", call) as lines:
        lines.readline()
        with publisher(broker, load):
            started = time.perf_counter()
            lines.readline()
            return time.perf_counter() - started


def discard(port: int, messages: int) -> None:
    """Subscribe to what devices hand in, and say on stdout when that works and when everything has come."""
    with listening(Broker("127.0.0.1", port), f"pf/1/{FLEET}/d/+/up/+") as events:
        print("ready", flush=True)
        for _ in range(messages):
            events.get(timeout=PATIENCE_S)
        print("done", flush=True)


def time_aggregator(broker: Broker, load: Load, task: Path, state: Path) -> float:
    """Seconds until a new aggregator has sent a receipt for every submission."""
    log = state.with_suffix(".log")
    arguments = ["run", "--task", str(task), "--state", str(state), "--broker", str(broker)]
    topics = [fleet_topic(FLEET, "state"), *(device_topic(FLEET, name, "ack") for name in load.devices)]
    with listening(broker, *topics) as events, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "aggregator.cli", *arguments], stdout=output, stderr=output
        )
        try:
            _wait_online(events)
            with publisher(broker, load):
                started = time.perf_counter()
                _count_receipts(events, load.submissions)
                return time.perf_counter() - started
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def publisher(broker: Broker, load: Load) -> Iterator[None]:
    """Publish a load from a process of its own, beginning now."""
    arguments = [str(broker.port), str(load.packets), str(load.messages)]
    with _running("-m", "benchmarks.pour", *arguments) as lines:
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
def listening(broker: Broker, *topics: str) -> Iterator["queue.SimpleQueue[Received]"]:
    """Listen to topics; what comes is in the queue."""
    others: queue.SimpleQueue[Event] = queue.SimpleQueue()
    received: queue.SimpleQueue[Received] = queue.SimpleQueue()

    def hear(event: Event) -> None:
        if isinstance(event, Received):
            received.put(event)
        else:
            others.put(event)

    session = Session(broker, client_id="listener", subscriptions=topics, on_event=hear)
    session.start()
    try:
        while not isinstance(others.get(timeout=PATIENCE_S), Connected):
            pass
        yield received
    finally:
        session.stop()


def _wait_online(received: "queue.SimpleQueue[Received]") -> None:
    while True:
        payload = received.get(timeout=PATIENCE_S).payload
        if decode(payload, Presence, max_bytes=1024).state == "online":
            return


def _count_receipts(received: "queue.SimpleQueue[Received]", number: int) -> None:
    """Wait for so many.

    Raises:
        ProtofleetError: something is refused.
    """
    while number:
        message = received.get(timeout=PATIENCE_S)
        if not message.topic.endswith("/ack"):
            continue
        receipt = decode(message.payload, Receipt, max_bytes=65536)
        if receipt.status == "refused":
            raise ProtofleetError(f"the aggregator has refused a submission: {receipt.detail}")
        number -= receipt.status == "received"


def _wait_for(address: Broker) -> None:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection((address.host, address.port)):
            return
        time.sleep(0.05)
    raise ProtofleetError(f"mosquitto did not start on {address}")
