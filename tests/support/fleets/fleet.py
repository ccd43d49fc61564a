"""A fleet of real programs on this machine; each writes its output to a log file."""

import atexit
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import msgspec
import numpy as np
import psutil
from PIL import Image
from sklearn.datasets import load_digits

from aggregator.status.collect import collect_status
from aggregator.storage.open_store import open_store
from edge_client.cli.options import as_json_text
from edge_client.cli.status import device_status
from edge_client.store.device_state import DeviceState
from protocol.errors import StateError
from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.support.fleets.fork_server import ForkServer, Program
from tests.support.graphs.backbones import tiny_backbone

Process = subprocess.Popen[bytes] | Program

TIMEOUT_S = 240.0
FORKED = (
    "aggregator.cli",
    "edge_client.cli",
    "sums_operator.cli",
    "tests.support.fleets.fast_aggregator",
    "tests.support.fleets.changed_device",
    "tests.support.fleets.killed_program",
    "tests.support.fleets.traced_jobs",
)
"""Modules whose `main` a fork server can call."""
CLASSES = tuple(map(str, range(10)))
QUICK = '[training]\nepochs = 2\ndevice = "cpu"\n'
"""A training of seconds, for tests in which a head need not be good."""


def with_startup_code(folder: Path, code: str) -> dict[str, str]:
    """Write code to a folder; returns variables with which each Python program runs it first."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def _oom_score(process: psutil.Process) -> int | None:
    """Return the score of a process, which is higher for jobs; None if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())
    return None


def write_digits(folder: Path, *, classes: list[int], start: int = 0, each: int = 20) -> Path:
    """Write real handwritten digits as PNG files, one sub-folder a class; returns the folder."""
    digits = load_digits()
    for label in classes:
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        for number in np.flatnonzero(digits.target == label)[start : start + each]:
            image = Image.fromarray((digits.images[number] * 15.9).astype(np.uint8))
            image.save(folder / str(label) / f"{number}.png")
    return folder


def write_task(
    folder: Path, *, feature_sizes: tuple[int, ...] = (16,), tables: str = QUICK, **settings: object
) -> Path:
    """Write a task file with these settings and TOML tables, and a backbone for each feature size."""
    backbones = [f"backbone-{number}.onnx" for number in range(len(feature_sizes))]
    for number, (name, size) in enumerate(zip(backbones, feature_sizes, strict=True)):
        (folder / name).write_bytes(tiny_backbone(feature_size=size, seed=number))
    values = {"classes": CLASSES, "backbones": backbones, "quorum": 3, "deadline_s": 600, **settings}
    task = folder / "task.toml"
    task.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()) + tables)
    return task


def aggregator_status(state: Path) -> dict[str, Any]:
    """Return what `aggregator status --json` prints; empty before the state folder exists."""
    with contextlib.suppress(StateError), closing(open_store(state, read_only=True)) as store:
        return dict(msgspec.json.decode(msgspec.json.encode(collect_status(store))))
    return {}


def accepted_submissions(aggregator_log: str) -> list[tuple[str, int]]:
    """Return device and number of images of each submission that the aggregator has logged as accepted."""
    # Python repeats a line that could not be written, in quotes, when it can be.
    found = re.findall(r"(?<!')submission accepted device=(\S+) .*?images=(\d+)", aggregator_log)
    return [(device, int(images)) for device, images in found]


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder, which may change meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def wait_until(
    what: str,
    holds: Callable[[], Any],
    *,
    diagnostics: Callable[[], str],
    check: Callable[[], None] = lambda: None,
    pause_s: float = 0.05,
) -> None:
    """Wait until a condition holds; `check` raises as soon as it cannot hold any more."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        check()
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:.0f} s: {what}\n{diagnostics()}"
        time.sleep(pause_s)


_starting = threading.Lock()


@functools.cache
def _fork_server() -> ForkServer:
    """Start a fork server, which ends with this process."""
    server = ForkServer()
    server.__enter__()
    atexit.register(server.__exit__)
    return server


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Fleet:
    """The processes of one test; as a context, it ends all of them.

    Args:
        root: folder of all states and logs.
        broker: where the programs connect.
        device_broker: where devices connect, if not to `broker`: a proxy's address.
        enrolled: start each device with its enrollment folder `root/NAME`.

    Attributes:
        forks: whether programs are forks of a process that has imported their modules, which takes a tenth of the time.
        aggregator_program: the module that `start_aggregator` starts.
    """

    forks = True
    aggregator_program = "aggregator.cli"

    def __init__(
        self,
        root: Path,
        broker: BrokerAddress,
        *,
        device_broker: BrokerAddress | None = None,
        enrolled: bool = False,
    ) -> None:
        self.root = root
        self.broker = broker
        self.aggregator_state = root / "aggregator"
        self.processes: dict[str, Process] = {}
        self.starts: Counter[str] = Counter()
        self._device_broker = device_broker or broker
        self._enrolled = enrolled
        self._supervisors: set[str] = set()
        """Names of aggregators."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.terminate()
        for name in self.processes:
            self.resume(name)
        for process in self.processes.values():
            try:
                process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(
        self,
        name: str,
        module: str,
        *arguments: str | Path,
        limits: tuple[str, ...] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Process:
        """Start a module as a process, with `limits` as arguments of `ulimit`; its output goes to NAME.log."""
        assert name not in self.processes or self.processes[name].poll() is not None, f"{name} still runs"
        # No dashboard, unless a test gives its address.
        log, variables = self.root / f"{name}.log", {"PROTOFLEET_HTTP": "off", **os.environ, **environment}
        if self.forks and module in FORKED and not limits:
            with _starting:
                server = _fork_server()
            process: Process = server.start_process(module, *arguments, log=log, environment=variables)
        else:
            command = [sys.executable, "-m", module, *map(str, arguments)]
            if limits:
                command = ["sh", "-c", f'ulimit {" ".join(limits)}; exec "$@"', "sh", *command]
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables
                )
        self.processes[name] = process
        self.starts[name] += 1
        return process

    def start_aggregator(
        self, task: Path, *options: str | Path, name: str = "aggregator", state: Path | None = None
    ) -> Process:
        tls = ["--tls"] if self._enrolled else []
        self._supervisors.add(name)
        return self.start(
            *(name, self.aggregator_program, "run", "--task", task),
            *("--state", state or self.aggregator_state),
            *("--broker", str(self.broker), *tls, *options),
        )

    def start_device(
        self,
        name: str,
        data: Path,
        *options: str | Path,
        state: Path | None = None,
        program: str = "edge_client.cli",
        command: str = "run",
        limits: tuple[str, ...] = (),
    ) -> Process:
        identity: tuple[str | Path, ...] = ("--broker", str(self._device_broker), "--device-id", name)
        if self._enrolled:
            identity = ("--enrollment", self.root / name)
        arguments = (*identity, "--data", data, "--state", state or self.device_state(name), "--threads", "1")
        return self.start(name, program, command, *arguments, *options, limits=limits)

    def stop(self, name: str) -> None:
        """End a process by SIGTERM, and check that it ends with status 0."""
        self.processes[name].terminate()
        self.wait_exit(name)

    def kill(self, name: str, *, with_jobs: bool = True) -> None:
        """End a program, and by default its jobs, by SIGKILL."""
        services, jobs = self.services(name), self.jobs(name)
        self.processes[name].kill()
        self.processes[name].wait()
        for job in jobs if with_jobs else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                job.kill()
        self.wait_until(f"the end of all programs of {name}", lambda: not any(map(_runs, services)))

    def services(self, name: str) -> list[psutil.Process]:
        """Return the process of a program, and of an aggregator those that it supervises."""
        if self.processes[name].poll() is not None:
            return []
        process = psutil.Process(self.processes[name].pid)
        children = process.children() if name in self._supervisors else ()
        return [process, *(each for each in children if _oom_score(each) == _oom_score(process))]

    def jobs(self, name: str) -> list[psutil.Process]:
        """Return the processes that a program, or those that it supervises, have started."""
        services = self.services(name)
        family = services[0].children(recursive=True) if services else []
        return [each for each in family if each not in services]

    def pause(self, name: str) -> None:
        for each in self.services(name):
            each.suspend()

    def resume(self, name: str) -> None:
        for each in self.services(name):
            each.resume()

    def device_state(self, name: str) -> Path:
        return self.root / "devices" / name

    def log(self, name: str) -> str:
        file = self.root / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def status(self) -> dict[str, Any]:
        return aggregator_status(self.aggregator_state)

    def refusals(self) -> Counter[tuple[str, str]]:
        """Count the refusals in status, by reason and name; `by NAME` for a device's own refusals."""
        summary = self.status()
        counts: Counter[tuple[str, str]] = Counter()
        for row in summary.get("refusals", []):
            counts[row["reason"], row["device"]] += row["count"]
        for device in summary.get("devices", []):
            for reason, count in device["refused_messages"].items():
                counts[reason, f"by {device['device']}"] += count
        return counts

    @contextlib.contextmanager
    def counted(self, reason: str, name: str) -> Iterator[None]:
        """Do something, and wait until status has counted one more refusal."""
        before = self.refusals()[reason, name]
        yield
        self.wait_until(f"{reason} of {name}", lambda: self.refusals()[reason, name] > before)

    def is_evaluated_by(self, devices: int) -> bool:
        """Return whether so many devices have evaluated the newest head."""
        heads = self.status().get("heads", [])
        return bool(heads) and heads[-1]["held_out"]["devices"] == devices

    def device_status(self, name: str) -> dict[str, Any]:
        """Return what `edge-client status --json` prints; empty before the state folder exists."""
        with contextlib.suppress(StateError):
            store = DeviceState(self.device_state(name), read_only=True)
            return dict(json.loads(as_json_text(device_status(store))))
        return {}

    def predict(self, name: str, image: Path) -> dict[str, Any]:
        """Return what `edge-client predict --json --prior none` prints for an image: the answer of the head itself."""
        options = ["--json", "--prior", "none", "--state", str(self.device_state(name))]
        command = [sys.executable, "-m", "edge_client.cli", "predict", str(image), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    def wait_until(self, what: str, holds: Callable[[], Any], *, pause_s: float = 0.05) -> None:
        """Wait for a condition; the failure shows every process's last output."""
        wait_until(what, holds, diagnostics=self.diagnostics, check=self.check, pause_s=pause_s)

    def wait_for(self, what: str, holds: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Wait until the aggregator's status meets a condition; returns that status."""
        summary: dict[str, Any] = {}

        def met() -> bool:
            aggregator = self.processes.get("aggregator")
            assert aggregator is None or aggregator.poll() is None, f"it has ended\n{self.diagnostics()}"
            summary.clear()
            summary.update(self.status())
            return bool(summary and holds(summary))

        self.wait_until(what, met, pause_s=0.1)
        return summary

    def wait_for_log(self, name: str, text: str, *, times: int = 1) -> None:
        """Wait until a process has logged a text at least `times` times."""
        self.wait_until(f"{text!r} in {name}.log", lambda: self.log(name).count(text) >= times)

    def wait_exit(self, name: str, code: int = 0) -> None:
        process = self.processes[name]
        self.wait_until(f"the end of {name}", lambda: process.poll() is not None)
        assert process.returncode == code, f"{name}: exit status {process.returncode}\n{self.diagnostics()}"

    def diagnostics(self) -> str:
        """Return the end of every log, and the aggregator's status."""
        ends = [
            f"== {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-25:])
            for file in sorted(self.root.glob("*.log"))
        ]
        return "\n".join([*ends, json.dumps(self.status(), indent=1)])

    def check(self) -> None:
        """Raise if waiting is pointless, for subclasses."""
