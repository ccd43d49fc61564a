"""A broker, an aggregator and processes that simulate devices, and what they cost."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from benchmarks.device.measurement import peak_memory
from benchmarks.processes import ROOT, free_address, running, running_mosquitto, serve_of
from protocol.errors import ProtofleetError, StateError
from protocol.storage.blobstore import file_digest

FLEET = "fleet"
BACKBONE = ROOT / "examples" / "quickstart" / "backbone.onnx"
TASK = f"""\
fleet = "{FLEET}"
classes = ["a", "b", "c"]
backbones = ["{BACKBONE}"]
quorum = %d
deadline_s = 1000000
[training]
recipe = "paper"
epochs = 1
"""
POLL_S, TIMEOUT_S = 0.1, 900.0
START_TIMEOUT_S = 60.0


class Loads:
    """The processes that simulate devices; each prints lines of JSON."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        folder: Path,
        port: int,
        devices: int,
        *,
        processes: int,
        is_idle: bool,
    ) -> None:
        self._log = folder / "load.log"
        errors = stack.enter_context(self._log.open("w", encoding="utf-8"))
        self._processes = []
        for number, part in enumerate(np.array_split(np.arange(devices), min(processes, devices))):
            arguments = ["--port", str(port), "--fleet", FLEET, "--prefix", f"d{number}"]
            arguments += ["--devices", str(len(part)), "--backbone", file_digest(BACKBONE).hex()]
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fleet.load", *arguments, *["--idle"][: int(is_idle)]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            self._processes.append(process)
        self._lines: list[dict[str, Any]] = [{} for _ in self._processes]
        self._is_ready = [threading.Event() for _ in self._processes]
        for number in range(len(self._processes)):
            threading.Thread(target=self._read, args=(number,), daemon=True).start()

    def _read(self, number: int) -> None:
        for line in self._processes[number].stdout or ():
            self._lines[number] = json.loads(line)
            self._is_ready[number].set()

    def wait_until_ready(self) -> None:
        """Wait until all processes have started."""
        for ready in self._is_ready:
            ready.wait(START_TIMEOUT_S)

    def begin(self) -> float:
        """Let all devices connect; returns the time."""
        self.wait_until_ready()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write("\n")
                process.stdin.flush()
        return time.monotonic()

    def sum(self, figure: str) -> int:
        """Return the sum of a figure over all processes."""
        self._require_running()
        return sum(line.get(figure, 0) for line in self._lines)

    def finished(self) -> list[dict[str, Any]]:
        """Wait until all devices are done; returns the last line of each process."""

        def is_finished() -> bool:
            self._require_running()
            return all("devices" in line for line in self._lines)

        until(is_finished, what="all devices to be done")
        return self._lines

    def _require_running(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise ProtofleetError(
                f"a process that simulates devices has ended: {self._log.read_text()[-2000:]}"
            )


class Programs:
    """Broker, aggregator and simulated devices; the first two can be ended and started again."""

    def __init__(
        self,
        folder: Path,
        stack: contextlib.ExitStack,
        devices: int,
        *,
        processes: int,
        quorum: int,
        is_idle: bool = False,
    ) -> None:
        self.state = folder / "state"
        self._folder = folder
        self._broker = free_address()
        (folder / "task.toml").write_text(TASK % quorum, encoding="utf-8")
        self._of_broker = stack.enter_context(contextlib.ExitStack())
        self._of_aggregator = stack.enter_context(contextlib.ExitStack())
        self._start_broker()
        self._start_aggregator()
        self.loads = Loads(stack, folder, self._broker.port, devices, processes=processes, is_idle=is_idle)
        self.loads.wait_until_ready()

    def _start_broker(self) -> None:
        self.mosquitto = self._of_broker.enter_context(running_mosquitto(self._folder, self._broker))

    def _start_aggregator(self) -> None:
        """Run `aggregator run`, until it is connected to the broker."""
        log = self._folder / "aggregator.log"
        arguments = ["--task", str(self._folder / "task.toml"), "--state", str(self.state)]
        program = running("aggregator.cli", "run", *arguments, "--broker", str(self._broker), log=log)
        self.aggregator = self._of_aggregator.enter_context(program)
        until(lambda: "connected to the broker" in log.read_text(encoding="utf-8"), what="the aggregator")

    def restart_broker(self) -> None:
        """Kill the broker and start it again."""
        self.mosquitto.kill()
        self._of_broker.close()
        until(lambda: self.loads.sum("connected") == 0, what="the end of all connections")
        self._start_broker()

    def restart_aggregator(self) -> None:
        """Kill the aggregator and start it again."""
        self.aggregator.kill()
        self._of_aggregator.close()
        self._start_aggregator()

    @contextlib.contextmanager
    def measured(self) -> Iterator[dict[str, Any]]:
        """Yield a dict that has the costs when the context has ended; a new process counts from its start."""
        began_s, attempts, frames = time.monotonic(), self.loads.sum("attempts"), self.loads.sum("frames")
        before = {pid: _cpu_s(pid) for pid in (serve_of(self.aggregator), self.mosquitto.pid)}
        costs: dict[str, Any] = {}
        yield costs
        costs |= {
            "seconds": time.monotonic() - began_s,
            "connected": self.loads.sum("connected"),
            "attempts": self.loads.sum("attempts") - attempts,
            "frames": self.loads.sum("frames") - frames,
        }
        for name, pid in (("aggregator", serve_of(self.aggregator)), ("broker", self.mosquitto.pid)):
            costs[f"{name}_cpu_s"] = _cpu_s(pid) - before.get(pid, 0.0)
            costs[f"{name}_bytes"] = psutil.Process(pid).memory_info().rss
            costs[f"{name}_peak_bytes"] = peak_memory(pid)

    def submitted(self) -> int:
        """Return how many devices' submissions the aggregator has stored."""
        return self._count(lambda store: len(store.submissions.all(store.served_task().digest)))

    def online(self) -> int:
        """Return how many devices are online by the aggregator's record."""
        return self._count(lambda store: len(store.devices.online()))

    def evaluated(self) -> int:
        """Return how many devices' evaluations of the first head the aggregator has."""
        return self._count(lambda store: len(store.evaluations.devices(store.served_task().digest, 1)))

    def _count(self, read: Callable[[Store], int]) -> int:
        """Read a number from the state of the running aggregator; 0 while there is none."""
        try:
            store = open_store(self.state, read_only=True)
        except StateError:
            return 0
        with contextlib.closing(store):
            return read(store)


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process, without those that it has waited for."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def until(is_true: Callable[[], bool], *, what: str) -> None:
    """Wait until a condition holds.

    Raises:
        ProtofleetError: it took too long.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_true():
        if time.monotonic() > deadline_s:
            raise ProtofleetError(f"waited {TIMEOUT_S:.0f} s for {what}")
        time.sleep(POLL_S)


def require(is_true: object, otherwise: str) -> None:
    """Raise ProtofleetError unless a condition holds."""
    if not is_true:
        raise ProtofleetError(otherwise)
