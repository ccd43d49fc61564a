"""A fleet that never rests: real programs that come and go, are killed, and talk over a network that fails."""

import contextlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from examples.quickstart.digits import CLASSES, Digits, load

FLEET = "soak"
BACKBONE = Path("examples/quickstart/backbone.onnx")
FIRST_IMAGES = 12
TASK = """\
fleet = "{fleet}"
classes = {classes}
backbones = ["{backbone}"]
quorum = {devices}
deadline_s = 60
retrain_after = {retrain_after}
[client]
batch_size = 1
min_images = 1
[training]
epochs = 2
"""
BROKER = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence true
persistence_location {folder}/
autosave_interval 5
max_queued_messages 20000
log_dest none
"""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Programs:
    """Every process of the fleet by its name, and how to start each again.

    Args:
        folder: gets states, images and logs.
        devices: how many.
        mosquitto: the broker's program.
        rng: of the images.
    """

    folder: Path
    devices: int
    mosquitto: str
    rng: random.Random
    broker_port: int = field(default_factory=free_port)
    device_port: int = field(default_factory=free_port)
    """Where devices find the broker: the network's other end."""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    _digits: Digits = field(default_factory=load)

    @property
    def names(self) -> list[str]:
        """The devices."""
        return [f"device-{number:02d}" for number in range(self.devices)]

    def start_broker(self) -> None:
        """Start mosquitto."""
        folder = self.folder / "broker"
        folder.mkdir(exist_ok=True)
        config = self.folder / "mosquitto.conf"
        config.write_text(BROKER.format(port=self.broker_port, folder=folder))
        folder.chmod(0o777)  # mosquitto may give up root's rights
        self._start("broker", [self.mosquitto, "-c", str(config)])

    def start_aggregator(self) -> None:
        """Start the aggregator."""
        task = self.folder / "task.toml"
        if not task.exists():
            text = TASK.format(
                fleet=FLEET,
                classes=list(CLASSES),
                backbone=BACKBONE.resolve(),
                devices=self.devices,
                retrain_after=max(1, self.devices // 4),
            )
            task.write_text(text.replace("'", '"'))
        state = self.folder / "aggregator"
        broker = f"127.0.0.1:{self.broker_port}"
        self._start_module("aggregator", "run", "--task", task, "--state", state, "--broker", broker)

    def start_device(self, name: str) -> None:
        """Start a device, with one image more than it had."""
        self._add_images(name)
        data, state = self.folder / "images" / name, self.folder / "devices" / name
        self._start_module(
            name,
            *("--broker", f"127.0.0.1:{self.device_port}", "--fleet", FLEET, "--device-id", name),
            *("--data", data, "--state", state, "--threads", "1", "--workers", "1", "--rescan-s", "20"),
        )

    def end(self, name: str, how: signal.Signals) -> None:
        """End a process, and wait until it has."""
        process = self.running.pop(name)
        process.send_signal(how)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def fallen(self) -> list[str]:
        """Those that have ended by themselves."""
        return [name for name, process in self.running.items() if process.poll() is not None]

    def log(self, name: str) -> str:
        """What a process has said."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def _add_images(self, name: str) -> None:
        folder = self.folder / "images" / name
        number = sum(1 for _ in folder.rglob("*.png")) if folder.exists() else 0
        for count in range(number, number + (1 if number else FIRST_IMAGES)):
            pick = self.rng.randrange(len(self._digits.labels))
            (folder / CLASSES[self._digits.labels[pick]]).mkdir(parents=True, exist_ok=True)
            image = np.asarray(self._digits.images[pick])
            target = folder / CLASSES[self._digits.labels[pick]] / f"{count}.png"
            Image.fromarray(image).resize((32, 32)).save(target)

    def _start_module(self, name: str, *arguments: str | Path) -> None:
        module = "aggregator.cli" if name == "aggregator" else "edge_client.cli"
        self._start(name, [sys.executable, "-m", module, *map(str, arguments)])

    def _start(self, name: str, command: Sequence[str]) -> None:
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.starts[name] += 1

    def stop(self) -> None:
        """End everything."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()
            process.wait()


@dataclass
class Fate:
    """What happens to whom and when, from a seed: devices come and go; aggregator and broker are killed early on.

    Args:
        programs: whom it happens to.
        rng: what decides.
        stay_s: how long a device stays, on average.
        away_s: how long it is away, on average.
        stayers: devices that nothing is done to; only the network fails them.
        killing_until_s: of `time.monotonic`, when aggregator and broker are left in peace.
        kill_every_s: between two kills of the aggregator or the broker, on average.
    """

    programs: Programs
    rng: random.Random
    stay_s: float
    away_s: float
    stayers: frozenset[str]
    killing_until_s: float
    kill_every_s: float
    done: Counter[str] = field(default_factory=Counter)
    _due_s: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Let the devices come, one after the other over the first stay."""
        now_s = time.monotonic()
        for name in self.programs.names:
            self._due_s[name] = now_s + self.rng.uniform(0, self.stay_s / 2)
        self._due_s["kill"] = now_s + self.kill_every_s

    def advance(self) -> None:
        """Do what is due."""
        now_s = time.monotonic()
        for name in [name for name, due_s in self._due_s.items() if due_s <= now_s]:
            if name == "kill":
                self._kill(now_s)
            elif name in self.programs.running:
                self._leave(name, now_s)
            else:
                self.programs.start_device(name)
                self._due_s[name] = (
                    float("inf") if name in self.stayers else now_s + self.rng.expovariate(1 / self.stay_s)
                )

    def _leave(self, name: str, now_s: float) -> None:
        how = self.rng.choice((signal.SIGKILL, signal.SIGTERM))
        self.programs.end(name, how)
        self.done[f"device, {how.name}"] += 1
        self._due_s[name] = now_s + self.rng.expovariate(1 / self.away_s)

    def _kill(self, now_s: float) -> None:
        name = self.rng.choice(("aggregator", "broker"))
        self.programs.end(name, signal.SIGKILL)
        self.done[f"{name}, SIGKILL"] += 1
        (self.programs.start_aggregator if name == "aggregator" else self.programs.start_broker)()
        next_s = now_s + self.rng.uniform(0.5, 1.5) * self.kill_every_s
        self._due_s["kill"] = next_s if next_s < self.killing_until_s else float("inf")
