"""A fleet of real programs that are started, stopped and killed at random times from a seed."""

import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from examples.quickstart.digits import CLASSES, load
from tests.support.fleets.fleet import Fleet, write_task
from tests.support.network.brokers import Mosquitto, free_address

BACKBONE = Path("examples/quickstart/backbone.onnx")
FIRST_IMAGES = 12
TABLES = "[client]\nbatch_size = 1\nmin_images = 1\n[training]\nepochs = 2\n"
BROKER = """\
allow_anonymous true
persistence true
persistence_location {folder}/
autosave_interval 5
max_queued_messages 20000
"""


class ChangingFleet(Fleet):
    """A fleet behind a network proxy, whose devices get another image each time they start."""

    forks = False

    def __init__(self, root: Path, devices: int, rng: random.Random) -> None:
        self.mosquitto = Mosquitto(free_address(), root, options=BROKER)
        self.proxy_address = free_address()
        super().__init__(root, self.mosquitto.address, device_broker=self.proxy_address)
        self.names = [f"device-{number:02d}" for number in range(devices)]
        self.running: set[str] = set()
        self._rng = rng
        self._digits = load()
        settings = {"quorum": devices, "deadline_s": 60, "retrain_after": max(1, devices // 4)}
        backbones = [str(BACKBONE.resolve())]
        self._task = write_task(root, feature_sizes=(), tables=TABLES, backbones=backbones, **settings)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.mosquitto.stop()

    def run(self, name: str) -> None:
        self.running.add(name)
        if name == "broker":
            self.mosquitto.start()
            self.starts[name] += 1
        elif name == "aggregator":
            self.start_aggregator(self._task)
        else:
            self.start_device(name, self._add_images(name), "--rescan-s", "20")

    def end(self, name: str, how: signal.Signals) -> None:
        """End a program, and wait until it has ended."""
        self.running.discard(name)
        if name == "broker":
            self.mosquitto.kill()
            return
        process = self.processes[name]
        process.send_signal(how)
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def pid(self, name: str) -> int:
        return self.mosquitto.pid if name == "broker" else self.processes[name].pid

    def crashed(self) -> list[str]:
        return [name for name in self.running - {"broker"} if self.processes[name].poll() is not None]

    def _add_images(self, name: str) -> Path:
        """Add a device's first images, or one more; returns their folder."""
        folder = self.root / "images" / name
        first = sum(1 for _ in folder.rglob("*.png"))
        for number in range(first, first + (1 if first else FIRST_IMAGES)):
            pick = self._rng.randrange(len(self._digits.labels))
            file = folder / CLASSES[self._digits.labels[pick]] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(self._digits.images[pick]).resize((32, 32)).save(file)
        return folder


@dataclass
class Schedule:
    """Starts and ends devices at random times; kills aggregator and broker until `killing_until_s`.

    Args:
        stay_s: mean running time of a device.
        away_s: mean absence of a device.
        permanent: devices that are never ended.
        killing_until_s: time of `time.monotonic`.
        kill_every_s: mean time between two kills of the aggregator or the broker.
    """

    fleet: ChangingFleet
    rng: random.Random
    stay_s: float
    away_s: float
    permanent: frozenset[str]
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
                stay_s = float("inf") if name in self.permanent else self.rng.expovariate(1 / self.stay_s)
                self._due_s[name] = now_s + stay_s

    def _kill(self, now_s: float) -> None:
        name = self.rng.choice(("aggregator", "broker"))
        self.fleet.end(name, signal.SIGKILL)
        self.done[f"{name}, SIGKILL"] += 1
        self.fleet.run(name)
        next_s = now_s + self.rng.uniform(0.5, 1.5) * self.kill_every_s
        self._due_s["kill"] = next_s if next_s < self.killing_until_s else float("inf")
