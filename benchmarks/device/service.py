"""The device program as a service and once: time, features and memory, beside an earlier checkout and bare libraries.

`device service --before FOLDER` runs the device program of this checkout and of another one in turns, with the same
libraries, against one aggregator: read the ratios and the differences, since the machine may be busy. Memory of a
service and its jobs together is that of a control group, which counts pages that they share once.
"""

import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import click
import numpy as np
import psutil
from PIL import Image

from benchmarks.device.measurement import (
    CLASSES,
    LABELED,
    THREADS,
    export_random,
    link_some,
    median,
    write_photographs,
)
from benchmarks.device.start import CONNECT, until_ready
from benchmarks.options import repeated
from benchmarks.processes import ROOT, mosquitto, running, running_program, wait_for_log
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ProtofleetError
from protocol.mqtt.reconnecting_session import BrokerAddress

OURS, BEFORE, BARE = "edge-client", "edge-client before", "bare libraries"
BARE_PROGRAM = f"""
import msgspec, sqlite3, paho.mqtt.client as mqtt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
Ed25519PrivateKey.generate().sign(b"ready")
{CONNECT}"""
"""A program that connects to a broker and publishes; it imports what a service needs that computes nothing."""

SUBMITTED = "submission received by the aggregator"
IN_USE = "head in use"
TIMEOUT_S = 300.0
IDLE_S = 75.0
"""A service is idle a minute after a build: its process for jobs has ended by then."""

LIMIT_BYTES = 256_000_000
SMALL_MODEL = "test_resnet"
"""Of the service whose memory is measured, which does not depend on the backbone."""

POLL_S = 0.02


@dataclass(frozen=True)
class Once:
    """One run of `edge-client --once`, seconds from its start; `peak_bytes` is None without control groups."""

    submitted_s: float
    wall_s: float
    cpu_s: float
    """Of all its processes."""
    peak_bytes: int | None


class ControlGroup:
    """A control group for one program, below this process's own; as a context, it is deleted at the end.

    Raises:
        OSError: this system does not permit one.
    """

    def __init__(self) -> None:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
        places = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
        legacy = "memory" in places  # version 1
        root = Path("/sys/fs/cgroup") / ("memory" if legacy else "")
        own = root / places["memory" if legacy else ""].lstrip("/")
        self.folder = (own if own.is_dir() else root) / f"protofleet-{os.getpid()}-{time.monotonic_ns()}"
        self._peak, self._limit = (
            ("memory.max_usage_in_bytes", "memory.limit_in_bytes")
            if legacy
            else ("memory.peak", "memory.max")
        )
        self.folder.mkdir()
        if not (self.folder / self._peak).exists():
            self.folder.rmdir()
            raise OSError(f"no {self._peak}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(100):  # its last process may be ending still
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.05)

    def limit(self, size_bytes: int) -> None:
        """Let the group use no more memory than this, files that are cached included."""
        (self.folder / self._limit).write_text(str(size_bytes), encoding="ascii")

    def peak_bytes(self) -> int:
        """Return the most that the group has used, files that are cached included."""
        return int((self.folder / self._peak).read_text(encoding="ascii"))

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one in the group."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs; exec "$@"', "sh", *command]


def control_group() -> "contextlib.AbstractContextManager[ControlGroup | None]":
    """Return a control group, or None where this system permits none."""
    try:
        return ControlGroup()
    except OSError:
        return contextlib.nullcontext()


class Fleet:
    """A broker and an aggregator that has one head, and the device programs that are compared.

    Args:
        checkouts: folders of source code by the name of their device program.
    """

    def __init__(
        self, folder: Path, broker: BrokerAddress, checkouts: Mapping[str, Path], *, images: Path
    ) -> None:
        self._folder, self._broker, self._checkouts = folder, broker, checkouts
        self._images, self._devices, self._fleets = images, 0, 0

    @property
    def _fleet(self) -> str:
        return f"fleet-{self._fleets}"

    def folder_of(self, count: int) -> Path:
        """Return the folder of so many photographs."""
        return self._folder / str(count)

    @contextlib.contextmanager
    def serving(self, backbone: Path) -> Iterator[None]:
        """Run an aggregator that makes one head of one device's images, and no other one."""
        self._fleets += 1  # devices trust the first key that they receive from a fleet
        task, state = self._folder / "task.toml", self._folder / f"aggregator-{self._fleets}"
        task.write_text(
            f'fleet = "{self._fleet}"\n'
            f"classes = {json.dumps(CLASSES)}\nbackbones = [{json.dumps(str(backbone))}]\n"
            'quorum = 1\nretrain_after = 1000000\n[training]\nepochs = 1\ndevice = "cpu"\n'
        )
        where = ("--broker", str(self._broker), "--state", str(state))
        with running("aggregator.cli", "run", "--task", str(task), *where, log=state.with_suffix(".log")):
            self.once(OURS, self._images)
            yield

    def once(self, program: str, images: Path, *, limit_bytes: int = 0) -> Once:
        """Run a device until it has a head.

        Raises:
            ProtofleetError: it failed.
        """
        with control_group() as group:
            command, log = self._command(images, "--once"), self._log()
            if group is not None:
                if limit_bytes:
                    group.limit(limit_bytes)
                command = group.command(command)
            started_s, submitted_s = time.perf_counter(), 0.0
            cpu_s: dict[int, float] = {}
            with running_program(command, log=log, environment=self._environment(program)) as process:
                while process.poll() is None:
                    if not submitted_s and SUBMITTED in log.read_text(errors="replace"):
                        submitted_s = time.perf_counter() - started_s
                    if time.perf_counter() > started_s + TIMEOUT_S:
                        raise ProtofleetError(f"{program} did not end: {_end(log)}")
                    cpu_s |= _cpu_s(process.pid)
                    time.sleep(POLL_S)
                wall_s = time.perf_counter() - started_s
            if process.returncode:
                raise ProtofleetError(f"{program} failed with status {process.returncode}: {_end(log)}")
            peak_bytes = None if group is None else group.peak_bytes()
            return Once(submitted_s or wall_s, wall_s, sum(cpu_s.values()), peak_bytes)

    def idle_bytes(self, programs: Sequence[str], images: Path) -> dict[str, int]:
        """Return the resident memory of services a minute after each has built a submission."""
        with contextlib.ExitStack() as stack:
            processes, logs = {}, {}
            for program in programs:
                command, logs[program] = self._command(images), self._log()
                started = running_program(command, log=logs[program], environment=self._environment(program))
                processes[program] = stack.enter_context(started)
            for log in logs.values():
                wait_for_log(log, SUBMITTED, timeout_s=TIMEOUT_S)
                wait_for_log(log, IN_USE, timeout_s=TIMEOUT_S)
            time.sleep(IDLE_S)
            return {name: psutil.Process(each.pid).memory_info().rss for name, each in processes.items()}

    def ready(self, program: str) -> tuple[float, int]:
        """Return the seconds from a program's start to its first message, and its resident memory then."""
        empty = self._folder / "empty"
        empty.mkdir(exist_ok=True)
        if program == BARE:
            command = [sys.executable, "-c", BARE_PROGRAM, str(self._broker.port)]
        else:
            command = self._command(empty)
        cost = until_ready(command[1:], self._broker, environment=self._environment(program))
        return cost.wall_s, cost.memory_bytes

    def _command(self, images: Path, *options: str) -> list[str]:
        self._devices += 1
        name = f"device-{self._devices}"
        state = str(self._folder / name)
        where = ("--broker", str(self._broker), "--fleet", self._fleet, "--device-id", name, "--state", state)
        work = ("--data", str(images), "--threads", str(THREADS))
        return [sys.executable, "-P", "-m", "edge_client.cli", *where, *work, *options]

    def _log(self) -> Path:
        log = self._folder / f"device-{self._devices}.log"
        log.touch()
        return log

    def _environment(self, program: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self._checkouts.get(program, ROOT)), "PROTOFLEET_HTTP": "off"}


def _cpu_s(pid: int) -> dict[int, float]:
    """Return the processor time of a process and its children."""
    found = {}
    with contextlib.suppress(psutil.Error):
        program = psutil.Process(pid)
        for each in (program, *program.children()):
            times = each.cpu_times()
            found[each.pid] = times.user + times.system
    return found


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-1000:]


def write_small_images(folder: Path, *, count: int) -> None:
    """Write `count` PNG files of 16 x 16 random pixels, half of them in each class."""
    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / CLASSES[number % len(CLASSES)] / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(path)


START = {"program": "<20", "first message s": ">16.2f", "resident MB": ">12.1f", "seconds, to ours": ">17.2f"}
IDLE = {"program": "<20", "resident MB": ">12.1f"}
ONCE = {
    "program": "<20", "first build s": ">14.2f", "--once s": ">9.2f", "images/s": ">9.1f",
    "CPU ms an image": ">16.2f", "peak MB": ">8.0f",
    "build, s less than ours": ">24.2f", "--once, s less": ">15.2f", "rate, ours to this": ">19.2f",
    "by CPU": ">7.2f",
    "peak, MB less": ">14.0f", "with 256 MB": ">12",
}  # fmt: skip


@click.command("service")
@click.option(
    "--before",
    type=click.Path(file_okay=False, path_type=Path),
    help="Another checkout, whose device program is compared.",
)
@repeated("--model", "models", default=(SMALL_MODEL, "mobilenetv2_100"), help="Of timm; may be repeated.")
@click.option("--image-size", type=click.IntRange(min=32), default=224, show_default=True)
@click.option("--images", nargs=2, type=int, default=(100, 1000), show_default=True, help="Few, and many.")
@click.option("--grouped", type=int, default=10_000, show_default=True, help="Images of the idle service.")
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@json_option
def command(
    *,
    before: Path | None,
    models: tuple[str, ...],
    image_size: int,
    images: tuple[int, int],
    grouped: int,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Measure the device program: start, memory of the idle service, first build, features and peak memory."""
    checkouts = {OURS: ROOT} | ({BEFORE: before.resolve()} if before else {})
    few, many = images
    with tempfile.TemporaryDirectory() as name, mosquitto(Path(name)) as broker:
        folder = Path(name)
        write_photographs(folder / str(many), count=many)
        for count in {few, LABELED}:
            link_some(folder / str(many), folder / str(count), count=count)
        write_small_images(folder / "grouped", count=grouped)
        fleet = Fleet(folder, broker, checkouts, images=folder / str(LABELED))
        started, table = _start(fleet, [*checkouts, BARE], repetitions=repetitions)
        tables, every = [table], {}
        for model in models:
            backbone = export_random(model, image_size=image_size, folder=folder)
            with fleet.serving(backbone):
                title = f"{model} at {image_size}x{image_size}, {many:,} photographs, threads: {THREADS}"
                every[model], table = _once(fleet, [*checkouts], images, title=title, repetitions=repetitions)
                tables.append(table)
        with fleet.serving(export_random(SMALL_MODEL, image_size=32, folder=folder)):
            idle = fleet.idle_bytes([*checkouts], folder / "grouped")
        idle[BARE] = int(statistics.median(size for _, size in started[BARE]))
        tables.append(Table(IDLE, title=f"A minute after a build with {grouped:,} grouped images"))
        for program, size in idle.items():
            tables[-1].row(program, size / 1e6)
    if json_file is not None:
        write_json(json_file, "service", tables=tables, started=started, idle=idle, runs=every)


def _start(
    fleet: Fleet, programs: Sequence[str], *, repetitions: int
) -> tuple[dict[str, list[tuple[float, int]]], Table]:
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in programs}
    for number in range(repetitions + 1):
        for name, each in runs.items():
            measured = fleet.ready(name)
            if number:  # the first start of each fills the disk's cache
                each.append(measured)
    table = Table(START, title="Until the first message")
    for name, each in runs.items():
        seconds = [one / ours for (one, _), (ours, _) in zip(each, runs[OURS], strict=True)]
        middle = (statistics.median(values) for values in zip(*each, strict=True))
        seconds_s, size = middle
        table.row(name, seconds_s, size / 1e6, statistics.median(seconds))
    return runs, table


def _once(
    fleet: Fleet, programs: Sequence[str], images: tuple[int, int], *, title: str, repetitions: int
) -> tuple[dict[str, dict[str, list[dict[str, object]]]], Table]:
    few, many = images
    runs: dict[str, dict[int, list[Once]]] = {name: {few: [], many: []} for name in programs}
    for number in range(repetitions + 1):
        for count in images:
            for name, by_count in runs.items():
                measured = fleet.once(name, fleet.folder_of(count))
                if number:
                    by_count[count].append(measured)
    table = Table(ONCE, title=title)
    ours = runs[OURS]

    def less(of: dict[int, list[Once]], figure: str) -> float:
        pairs = zip(ours[few], of[few], strict=True)
        return float(statistics.median(getattr(own, figure) - getattr(other, figure) for own, other in pairs))

    def per_image_s(of: dict[int, list[Once]], figure: str = "submitted_s") -> float:
        return (median(of[many], figure) - median(of[few], figure)) / (many - few)

    for name, each in runs.items():
        peaks, difference, works = _peaks(each[many]), None, ""
        if peaks:
            difference = statistics.median(_peaks(ours[many])) - statistics.median(peaks)
            works = _works(fleet, name, fleet.folder_of(many))
        table.row(
            *(
                name,
                median(each[few], "submitted_s"),
                median(each[few], "wall_s"),
                _quotient(1, per_image_s(each)),
            ),
            1e3 * per_image_s(each, "cpu_s"),
            statistics.median(peaks) / 1e6 if peaks else None,
            *(
                less(each, "submitted_s"),
                less(each, "wall_s"),
                _quotient(per_image_s(each), per_image_s(ours)),
            ),
            _quotient(per_image_s(each, "cpu_s"), per_image_s(ours, "cpu_s")),
            *(None if difference is None else difference / 1e6, works),
        )
    if not _peaks(ours[many]):
        click.echo("no peak of memory: this system permits no control groups")
    every = {
        name: {str(count): [asdict(one) for one in each] for count, each in by_count.items()}
        for name, by_count in runs.items()
    }
    return every, table


def _quotient(one: float, other: float) -> float:
    """Return NaN where the kernel counted no time."""
    return one / other if other else math.nan


def _peaks(runs: Sequence[Once]) -> list[int]:
    return [one.peak_bytes for one in runs if one.peak_bytes is not None]


def _works(fleet: Fleet, program: str, images: Path) -> str:
    try:
        fleet.once(program, images, limit_bytes=LIMIT_BYTES)
    except ProtofleetError:
        return "fails"
    return "works"
