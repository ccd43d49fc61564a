"""A restless fleet: real programs that come and go and are killed, by chance from a seed."""

import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from examples.quickstart.digits import CLASSES, load
from tests.support.brokers import Mosquitto, free_address
from tests.support.fleet import Fleet

BACKBONE = Path("examples/quickstart/backbone.onnx")
FIRST_IMAGES = 12
TASK = """\
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
allow_anonymous true
persistence true
persistence_location {folder}/
autosave_interval 5
max_queued_messages 20000
"""


class RestlessFleet(Fleet):
    """A fleet whose devices have an image more each time that they start.

    Args:
        root: gets states, images and logs.
        devices: how many.
        rng: of the images.
    """

    def __init__(self, root: Path, devices: int, rng: random.Random) -> None:
        self.mosquitto = Mosquitto(free_address(), root, options=BROKER)
        self.device_address = free_address()
        """Where devices connect: the network proxy."""
        super().__init__(root, self.mosquitto.address, device_broker=self.device_address)
        self.names = [f"device-{number:02d}" for number in range(devices)]
        self.running: set[str] = set()
        self._rng = rng
        self._digits = load()
        self._task = root / "task.toml"
        text = TASK.format(
            classes=list(CLASSES),
            backbone=BACKBONE.resolve(),
            devices=devices,
            retrain_after=max(1, devices // 4),
        )
        self._task.write_text(text.replace("'", '"'))

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.mosquitto.stop()

    def run(self, name: str) -> None:
        """Start the broker, the aggregator or a device."""
        self.running.add(name)
        if name == "broker":
            self.mosquitto.start()
            self.starts[name] += 1
        elif name == "aggregator":
            self.start_aggregator(self._task)
        else:
            self._add_images(name)
            self.start_device(name, self.root / "images" / name, "--rescan-s", "20")

    def end(self, name: str, how: signal.Signals) -> None:
        """End a program, and wait until it has ended."""
        self.running.discard(name)
        if name == "broker":
            self.mosquitto.kill()
            return
        process = self.processes[name]
        process.send_signal(how)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def pid(self, name: str) -> int:
        """A program's process id."""
        return self.mosquitto.pid if name == "broker" else self.processes[name].pid

    def fallen(self) -> list[str]:
        """Programs that have ended by themselves."""
        return [name for name in self.running - {"broker"} if self.processes[name].poll() is not None]

    def _add_images(self, name: str) -> None:
        folder = self.root / "images" / name
        number = sum(1 for _ in folder.rglob("*.png")) if folder.exists() else 0
        for count in range(number, number + (1 if number else FIRST_IMAGES)):
            pick = self._rng.randrange(len(self._digits.labels))
            target = folder / CLASSES[self._digits.labels[pick]] / f"{count}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(self._digits.images[pick]).resize((32, 32)).save(target)


@dataclass
class Schedule:
    """When which program starts and ends: devices come and go; aggregator and broker are killed early on.

    Args:
        fleet: the programs.
        rng: of all chances.
        stay_s: how long a device runs, on average.
        away_s: how long it is away, on average.
        stayers: devices that are never ended; only the network fails them.
        killing_until_s: of `time.monotonic`, when aggregator and broker are killed no more.
        kill_every_s: between two kills of the aggregator or the broker, on average.
    """

    fleet: RestlessFleet
    rng: random.Random
    stay_s: float
    away_s: float
    stayers: frozenset[str]
    killing_until_s: float
    kill_every_s: float
    done: Counter[str] = field(default_factory=Counter)
    _due_s: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Schedule the first starts, spread over half a stay."""
        now_s = time.monotonic()
        for name in self.fleet.names:
            self._due_s[name] = now_s + self.rng.uniform(0, self.stay_s / 2)
        self._due_s["kill"] = now_s + self.kill_every_s

    def advance(self) -> None:
        """Do what is due."""
        now_s = time.monotonic()
        for name in [name for name, due_s in self._due_s.items() if due_s <= now_s]:
            if name == "kill":
                self._kill(now_s)
            elif name in self.fleet.running:
                how = self.rng.choice((signal.SIGKILL, signal.SIGTERM))
                self.fleet.end(name, how)
                self.done[f"device, {how.name}"] += 1
                self._due_s[name] = now_s + self.rng.expovariate(1 / self.away_s)
            else:
                self.fleet.run(name)
                stay_s = float("inf") if name in self.stayers else self.rng.expovariate(1 / self.stay_s)
                self._due_s[name] = now_s + stay_s

    def _kill(self, now_s: float) -> None:
        name = self.rng.choice(("aggregator", "broker"))
        self.fleet.end(name, signal.SIGKILL)
        self.done[f"{name}, SIGKILL"] += 1
        self.fleet.run(name)
        next_s = now_s + self.rng.uniform(0.5, 1.5) * self.kill_every_s
        self._due_s["kill"] = next_s if next_s < self.killing_until_s else float("inf")
