"""The two fleets, as real processes on this machine: Flower's SuperLink and SuperNodes, and ours."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnxruntime
import psutil
from numpy.typing import NDArray
from PIL import Image

from aggregator.algorithms.fedtc.head import Dense, logits_of
from benchmarks.processes import free_address, running, running_program
from protocol.errors import ConfigError, ProtofleetError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protofleet.simulation.fleet import Features

SAMPLE_S = 0.5


@dataclass
class Traffic:
    """Bytes through a proxy at `address`, from clients and to them."""

    address: BrokerAddress
    up: int = 0
    down: int = 0


@contextlib.contextmanager
def counting_proxy(server: BrokerAddress) -> Iterator[Traffic]:
    """Forward TCP connections to a server, and count their bytes."""
    traffic = Traffic(free_address())
    loop = asyncio.new_event_loop()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                traffic.up += len(data) * up
                traffic.down += len(data) * (not up)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_connection(server.host, server.port)
        except OSError:  # the client tries again
            writer.close()
            return
        await asyncio.gather(copy(reader, requests, up=True), copy(answers, writer, up=False))

    loop.run_until_complete(asyncio.start_server(serve, traffic.address.host, traffic.address.port))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield traffic
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@dataclass
class Usage:
    """Costs of processes and all that they start: peak of resident memory, and seconds of processor time."""

    memory_bytes: int = 0
    cpu_s: dict[int, float] = field(default_factory=dict)
    """By process, at the last sample."""
    before_s: float = 0.0
    """Before the first one."""

    @property
    def total_cpu_s(self) -> float:
        """Seconds of all processes since the first sample."""
        return sum(self.cpu_s.values()) - self.before_s


@contextlib.contextmanager
def observed(processes: Mapping[str, int]) -> Iterator[dict[str, Usage]]:
    """Sample the trees of processes, given by name, as long as the context lasts."""
    usage = {name: Usage() for name in processes}
    _sample(processes, usage)
    for each in usage.values():
        each.before_s = sum(each.cpu_s.values())
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_S):
            _sample(processes, usage)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield usage
    finally:
        stop.set()
        thread.join()


def _sample(processes: Mapping[str, int], usage: Mapping[str, Usage]) -> None:
    children: dict[int, list[psutil.Process]] = {}
    alive = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
        alive[process.pid] = process
    for name, root in processes.items():
        tree = [alive[root]] if root in alive else []
        for each in tree:
            tree += children.get(each.pid, [])
        memory = 0
        for each in tree:
            with contextlib.suppress(psutil.Error):
                times = each.cpu_times()
                usage[name].cpu_s[each.pid] = times.user + times.system
                memory += each.memory_info().rss
        usage[name].memory_bytes = max(usage[name].memory_bytes, memory)


APP = Path(__file__).parent / "app"
PROGRAMS = ("flower-superlink", "flower-supernode", "flwr")
TIMEOUT_S = 1800.0
"""For a fleet to get ready, and for each round."""

MAX_ROUNDS_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How Flower's clients train; FedAvg without `mu`."""

    learning_rate: float
    epochs: int
    mu: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """The accuracy of a round's head on the test images, and what was spent since the start until it was there."""

    accuracy: float = 0.0
    seconds: float
    bytes_up: int
    bytes_down: int
    clients_cpu_s: float
    server_cpu_s: float


@dataclass(frozen=True)
class Outcome:
    """A fleet's rounds, and the peak of each client's memory in bytes."""

    rounds: Sequence[Round]
    client_memory_bytes: Sequence[int]

    def needed(self, margin: float = 0.005) -> int:
        """Return the number of rounds until the accuracy is within a margin of this fleet's own best."""
        enough = max(each.accuracy for each in self.rounds) - margin
        return next(number for number, each in enumerate(self.rounds, 1) if each.accuracy >= enough)


@dataclass(frozen=True)
class Meter:
    """The costs of a fleet since the start of the clock."""

    traffic: Traffic
    usage: Mapping[str, Usage]
    bytes_up: int
    bytes_down: int
    started_s: float

    def read(self) -> Round:
        """Return what is spent until now."""
        spent = {name: each.total_cpu_s for name, each in self.usage.items()}
        return Round(
            seconds=time.time() - self.started_s,
            bytes_up=self.traffic.up - self.bytes_up,
            bytes_down=self.traffic.down - self.bytes_down,
            clients_cpu_s=sum(seconds for name, seconds in spent.items() if name != "server"),
            server_cpu_s=spent["server"],
        )

    def outcome(self, rounds: Sequence[Round]) -> Outcome:
        """Return the rounds with the clients' memory."""
        return Outcome(rounds, [each.memory_bytes for name, each in self.usage.items() if name != "server"])


def flower_programs(folder: Path) -> Path:
    """Return a folder that has Flower's programs.

    Raises:
        ConfigError: it has not.
    """
    if missing := [name for name in PROGRAMS if not (folder / name).is_file()]:
        raise ConfigError(
            f"no {' and no '.join(missing)} in {folder}: python -m venv flower && "
            f"flower/bin/pip install flwr==1.41.0 torch numpy, then --flower flower/bin"
        )
    return folder.absolute()


def run_flower(
    programs: Path,
    folder: Path,
    features: Features,
    owners: NDArray[np.int64],
    setting: Setting,
    *,
    rounds: int,
) -> Outcome:
    """Train by Flower: a SuperLink, a SuperNode for each client, and an app in the strategy's rounds.

    The clock starts when all SuperNodes are connected and the app's server has started; rounds that have not ended
    in MAX_ROUNDS_S do not count.

    Raises:
        ProtofleetError: no round ended, or the programs did not start.
    """
    folder.mkdir()
    clients = np.unique(owners)
    for client in clients:
        mine = owners == client
        np.savez(folder / f"{client}.npz", features=features.train[mine], labels=features.train_labels[mine])
    link, out = free_address(), folder / "out"
    out.mkdir()
    (folder / "config.toml").write_text(f'[superlink.here]\naddress = "{link}"\ninsecure = true\n')
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "FLWR_HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    config = {"clients": len(clients), "classes": features.classes, "feature-size": features.train.shape[1]}
    config |= {"rounds": rounds, "learning-rate": setting.learning_rate, "epochs": setting.epochs}
    config |= {"mu": setting.mu, "out": str(out)}
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    run = [str(programs / "flwr"), "run", str(APP), "here", "--run-config", settings]
    serve = ["--insecure", "--disable-runtime-dependency-installation"]
    serve += ["--host", link.host, "--port", str(link.port)]
    with counting_proxy(link) as traffic, contextlib.ExitStack() as stack:

        def start(name: str, program: str, *arguments: str) -> int:
            command, log = [str(programs / program), *arguments], folder / f"{name}.log"
            return stack.enter_context(running_program(command, log=log, environment=environment)).pid

        processes = {"server": start("server", "flower-superlink", *serve)}
        _wait_for(folder / "server.log", containing="Uvicorn running")
        for client in clients:
            data = f'data="{folder / f"{client}.npz"}"'
            node = ("--insecure", "--superlink", str(traffic.address), "--port", str(free_address().port))
            processes[f"{client}"] = start(f"{client}", "flower-supernode", *node, "--node-config", data)
        for client in clients:
            _wait_for(folder / f"{client}.log", containing="SuperNode ID")
        with observed(processes) as usage:
            subprocess.run(run, env=environment, check=True, stdout=subprocess.DEVNULL)
            _wait_for(out / "000.npz")
            meter = Meter(
                traffic, usage, traffic.up, traffic.down, float(np.load(out / "000.npz")["seconds"])
            )
            spent: list[Round] = []
            while len(spent) < rounds and time.time() < meter.started_s + MAX_ROUNDS_S:
                if (out / f"{len(spent) + 1:03}.npz").is_file():
                    spent.append(meter.read())
                time.sleep(0.05)
    if not spent:
        raise ProtofleetError(f"no round of Flower ended within {MAX_ROUNDS_S:.0f} s")
    return meter.outcome(
        [_evaluated(each, out / f"{number:03}.npz", meter, features) for number, each in enumerate(spent, 1)]
    )


def _evaluated(spent: Round, file: Path, meter: Meter, features: Features) -> Round:
    """Return a round with the accuracy of the head in a file, and when the file says that it was there.

    Raises:
        ProtofleetError: not all clients contributed.
    """
    with np.load(file) as head:
        if head["clients"] != len(meter.usage) - 1:
            raise ProtofleetError(
                f"{head['clients']} of {len(meter.usage) - 1} of Flower's clients answered in round "
                f"{int(file.stem)}: their tasks end where the machine is too busy for them"
            )
        layers = [Dense(head[f"{name}.weight"], head[f"{name}.bias"]) for name in ("first", "second", "last")]
        correct = logits_of(layers, features.test).argmax(axis=1) == features.test_labels
        seconds = float(head["seconds"]) - meter.started_s
        return replace(spent, seconds=seconds, accuracy=float(correct.mean()))


def run_ours(
    folder: Path,
    backbone: Path,
    features: Features,
    images: NDArray[np.uint8],
    owners: NDArray[np.int64],
    settings: str = "",
) -> Outcome:
    """Train with one upload: `aggregator run --embedded-broker`, and `edge-client --once` for each client, on images.

    `settings` are lines of the task file; FedTC without any.

    A dry run of each client extracts its features before the clock starts; features of the test images are given.
    """
    folder.mkdir()
    clients, labels, broker = np.unique(owners), features.train_labels, free_address()
    classes = [str(label) for label in range(features.classes)]
    for number, (client, label) in enumerate(zip(owners, labels, strict=True)):
        path = folder / f"{client}" / "images" / classes[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number]).save(path)
    task = folder / "task.toml"
    task.write_text(
        f"classes = {json.dumps(classes)}\nbackbones = [{json.dumps(str(backbone))}]\n"
        f"quorum = {len(clients)}\ndeadline_s = 1000000\n{settings}"
    )
    serve = ("run", "--embedded-broker", "--broker", str(broker), "--task", str(task))
    with counting_proxy(broker) as traffic, contextlib.ExitStack() as stack:

        def start_clients(mode: str, stack: contextlib.ExitStack) -> dict[str, subprocess.Popen[bytes]]:
            started = {}
            for client in clients:
                here = folder / f"{client}"
                command = [sys.executable, "-m", "edge_client.cli", mode, "--holdout", "0", "--threads", "1"]
                command += ["--broker", str(traffic.address)]
                command += ["--device-id", f"device-{client}"]
                command += ["--data", str(here / "images"), "--state", str(here / "state")]
                process = running_program(command, log=folder / f"{client}{mode}.log")
                started[f"{client}"] = stack.enter_context(process)
            return started

        state = folder / "state"
        server = stack.enter_context(
            running("aggregator.cli", *serve, "--state", str(state), log=folder / "server.log")
        )
        with contextlib.ExitStack() as extraction:
            _wait_for_exits(start_clients("dry-run", extraction), folder)
        before = (traffic.up, traffic.down, time.time())
        devices = start_clients("--once", stack)
        with observed({"server": server.pid, **{name: each.pid for name, each in devices.items()}}) as usage:
            _wait_for_exits(devices, folder)
            meter = Meter(traffic, usage, *before)
            spent = meter.read()
    session = onnxruntime.InferenceSession(state / "head.onnx", providers=["CPUExecutionProvider"])
    scores = session.run(None, {session.get_inputs()[0].name: features.test})[0]
    accuracy = float((scores.argmax(axis=1) == features.test_labels).mean())
    return meter.outcome([replace(spent, accuracy=accuracy)])


def _wait_for_exits(clients: Mapping[str, subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until every client has ended.

    Raises:
        ProtofleetError: one failed.
    """
    for name, client in clients.items():
        if client.wait(TIMEOUT_S):
            raise ProtofleetError(f"client {name} failed: see {folder}")


def _wait_for(file: Path, *, containing: str = "") -> None:
    """Wait for a file, and for a text in it.

    Raises:
        ProtofleetError: it took too long.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    while not file.is_file() or (containing and containing not in file.read_text(errors="replace")):
        if time.monotonic() > deadline_s:
            raise ProtofleetError(
                f"no {containing or 'result'} in {file} within {TIMEOUT_S:.0f} s: see {file.parent}"
            )
        time.sleep(0.1)
