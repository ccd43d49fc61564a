"""Cold start of the device program, beside the same in PyTorch and beside the bare libraries.

`device start` runs each program in a process of its own, in turns, since the machine may be busy: read the ratios, not
the seconds.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import paho.mqtt.client as mqtt
import psutil
from packaging.requirements import Requirement

from benchmarks.device.measurement import Cost, median, ratio
from benchmarks.processes import mosquitto
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ProtofleetError
from protocol.mqtt.reconnecting_session import BrokerAddress

OURS = "edge-client"
TIMEOUT_S = 120.0

CONNECT = """
import sys
client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
client.on_connect = lambda *_: client.publish("ready", b"", 1)
client.connect("127.0.0.1", int(sys.argv[1]))
client.loop_forever()
"""
RIVALS: Mapping[str, str] = {
    "bare libraries": "import numpy, onnxruntime, PIL.Image, paho.mqtt.client as mqtt" + CONNECT,
    "PyTorch and timm": "import numpy, torch, timm, PIL.Image, paho.mqtt.client as mqtt" + CONNECT,
}
"""Programs that connect to a broker and publish; each imports what it needs for features of images."""

PACKAGES: Mapping[str, tuple[str, ...]] = {
    OURS: ("protofleet[cpu]",),
    "bare libraries": ("numpy", "onnxruntime", "pillow", "paho-mqtt"),
    "PyTorch and timm": ("numpy", "torch", "timm", "pillow", "paho-mqtt"),
}
"""The packages that each program needs."""


@click.command("start")
@click.option("--repetitions", type=click.IntRange(min=1), default=9, show_default=True)
@json_option
def command(*, repetitions: int, json_file: Path | None) -> None:
    """Compare the device program's cold start, memory and installed size with PyTorch's."""
    runs: dict[str, list[Cost]] = {}
    with tempfile.TemporaryDirectory() as folder, mosquitto(Path(folder)) as broker:
        for number in range(repetitions + 1):
            for name, command in _commands(broker, Path(folder) / f"state-{number}").items():
                measured = until_ready(command, broker)
                if number:  # the first start of each fills the disk's cache
                    runs.setdefault(name, []).append(measured)
    sizes = {name: installed_bytes(packages) for name, packages in PACKAGES.items()}
    table = Table(
        {"program": "<18", "ready s": ">9.2f", "CPU s": ">7.2f", "resident MB": ">13.0f", "installed MB": ">14,.0f",
         "ready, times ours": ">19.2f", "CPU, times ours": ">17.2f", "memory, times ours": ">20.2f"}
    )  # fmt: skip
    for name, each in runs.items():
        times = [ratio(each, runs[OURS], figure) for figure in ("wall_s", "cpu_s", "memory_bytes")]
        megabytes = (median(each, "memory_bytes") / 1e6, sizes[name] / 1e6)
        table.row(name, median(each, "wall_s"), median(each, "cpu_s"), *megabytes, *times)
    every = {name: [asdict(one) for one in each] for name, each in runs.items()}
    write_json(json_file, "start", tables=[table], runs=every, installed_bytes=sizes)


def _commands(broker: BrokerAddress, state: Path) -> dict[str, list[str]]:
    data = state / "images"
    data.mkdir(parents=True)
    where = ["--broker", str(broker), "--data", str(data), "--state", str(state / "device")]
    rivals = {name: ["-c", program, str(broker.port)] for name, program in RIVALS.items()}
    return {OURS: ["-m", "edge_client.cli", *where], **rivals}


def until_ready(
    command: Sequence[str], broker: BrokerAddress, *, environment: Mapping[str, str] | None = None
) -> Cost:
    """Run a Python program until a message of it arrives, and end it.

    Raises:
        ProtofleetError: it ended or published nothing in time.
    """
    arrived, subscribed = threading.Event(), threading.Event()
    listener = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)  # type: ignore[attr-defined,unused-ignore]

    def on_message(_client: mqtt.Client, _data: object, message: mqtt.MQTTMessage) -> None:
        if not message.retain:
            arrived.set()

    listener.on_message = on_message
    listener.on_subscribe = lambda *_: subscribed.set()
    listener.connect(broker.host, broker.port)
    listener.subscribe("#", qos=1)
    listener.loop_start()
    subscribed.wait(TIMEOUT_S)
    started_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        if not arrived.wait(TIMEOUT_S):
            raise ProtofleetError(f"no message of {command[1]} within {TIMEOUT_S:.0f} s")
        wall_s = time.perf_counter() - started_s
        observed = psutil.Process(process.pid)
        cpu = observed.cpu_times()
        return Cost(wall_s, cpu.user + cpu.system, observed.memory_info().rss)
    finally:
        process.terminate()
        process.wait()
        listener.disconnect()
        listener.loop_stop()


def installed_bytes(packages: tuple[str, ...]) -> int:
    """Return the bytes on disk of installed packages and all that they require here, without compiled Python files."""
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = [Requirement(package) for package in packages]
    while wanted:
        requirement = wanted.pop()
        key = f"{requirement.name.lower().replace('_', '-')}{sorted(requirement.extras)}"
        if key in found:
            continue
        found[key] = importlib.metadata.distribution(requirement.name)
        extras = [{"extra": extra} for extra in ("", *requirement.extras)]
        for text in found[key].requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate(extra) for extra in extras):
                wanted.append(needed)
    return sum(_bytes_of(one) for one in {one.name: one for one in found.values()}.values())


def _bytes_of(distribution: importlib.metadata.Distribution) -> int:
    files: list[Any] = [distribution.locate_file(file) for file in distribution.files or ()]
    return sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".pyc")
