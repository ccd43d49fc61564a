"""The processes of a fleet: those that simulate devices, the aggregator, and real devices."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.processes import ROOT, running
from protocol.errors import ProtofleetError
from protocol.mqtt.tls import BrokerAddress
from protocol.storage.blobstore import file_digest

FLEET = "fleet"
CLASSES = ("a", "b", "c")
TASK = """\
fleet = "{fleet}"
classes = {classes}
backbones = ["{backbone}"]
quorum = {quorum}
deadline_s = 1000000
[training]
recipe = "paper"
epochs = 1
"""
BACKBONE = ROOT / "examples" / "quickstart" / "backbone.onnx"
IMAGES = 12
"""Of a real device in each class."""
POLL_S = 0.1
START_TIMEOUT_S = 60.0


class Loads:
    """The processes that simulate devices; each prints lines of JSON."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], log: Path) -> None:
        self._processes = processes
        self._log = log
        self._lines: list[dict[str, Any]] = [{} for _ in processes]
        self._readers = [
            threading.Thread(target=self._read, args=(number,), daemon=True)
            for number in range(len(processes))
        ]
        self._is_ready = [threading.Event() for _ in processes]
        for reader in self._readers:
            reader.start()

    def _read(self, number: int) -> None:
        for line in self._processes[number].stdout or ():
            self._lines[number] = json.loads(line)
            self._is_ready[number].set()

    def begin(self) -> float:
        """Let all devices connect; returns the time."""
        for ready in self._is_ready:
            ready.wait(START_TIMEOUT_S)
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write("\n")
                process.stdin.flush()
        return time.monotonic()

    def sum(self, figure: str) -> int:
        """Return the sum of a figure over all processes."""
        self.require_running()
        return sum(line.get(figure, 0) for line in self._lines)

    def finished(self) -> list[dict[str, Any]]:
        """Wait until all devices are done; returns the last line of each process."""

        def is_finished() -> bool:
            self.require_running()
            return all("devices" in line for line in self._lines)

        until(is_finished, what="all devices to be done")
        return self._lines

    def require_running(self) -> None:
        """Raise ProtofleetError if a process has ended by itself."""
        if any(process.poll() is not None for process in self._processes):
            raise ProtofleetError(
                f"a process that simulates devices has ended: {self._log.read_text()[-2000:]}"
            )


@contextlib.contextmanager
def running_loads(
    folder: Path, broker: BrokerAddress, devices: int, *, processes: int, is_idle: bool = False
) -> Iterator[Loads]:
    """Run processes that simulate so many devices together."""
    numbers = [len(part) for part in np.array_split(np.arange(devices), processes) if len(part)]
    log = folder / "load.log"
    with log.open("w", encoding="utf-8") as errors, contextlib.ExitStack() as stack:
        started = []
        for number, size in enumerate(numbers):
            arguments = ["--port", str(broker.port), "--fleet", FLEET, "--prefix", f"d{number}"]
            arguments += ["--devices", str(size), "--backbone", file_digest(BACKBONE).hex()]
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fleet.load", *arguments, *["--idle"][: int(is_idle)]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        yield Loads(started, log)


@contextlib.contextmanager
def running_aggregator(
    folder: Path, broker: BrokerAddress, *, quorum: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `aggregator run` on an empty state, once it is connected to the broker."""
    task, log = folder / "task.toml", folder / "aggregator.log"
    task.write_text(
        TASK.format(fleet=FLEET, classes=json.dumps(CLASSES), backbone=BACKBONE, quorum=quorum),
        encoding="utf-8",
    )
    arguments = ["run", "--task", str(task), "--state", str(folder / "state"), "--broker", str(broker)]
    with running("aggregator.cli", *arguments, log=log) as process:
        until(lambda: "connected to the broker" in log.read_text(encoding="utf-8"), what="the aggregator")
        yield process


@contextlib.contextmanager
def running_device(folder: Path, broker: BrokerAddress, name: str) -> Iterator[None]:
    """Run a real `edge-client` on random images."""
    rng = np.random.default_rng(list(name.encode()))
    own = folder / name
    for label in CLASSES:
        (own / "images" / label).mkdir(parents=True)
        for number in range(IMAGES):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(own / "images" / label / f"{number}.png")
    arguments = ["--broker", str(broker), "--fleet", FLEET, "--device-id", name]
    arguments += ["--data", str(own / "images"), "--state", str(own / "state")]
    with running("edge_client.cli", *arguments, log=folder / f"{name}.log"):
        yield


def until(is_true: Callable[[], bool], *, what: str, timeout_s: float = 900.0) -> None:
    """Wait until a condition holds.

    Raises:
        ProtofleetError: it took too long.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline_s:
            raise ProtofleetError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(POLL_S)
