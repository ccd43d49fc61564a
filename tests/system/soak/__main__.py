"""Soak test: real programs under random faults for some minutes; reports lost submissions and growth of resources.

mosquitto, an aggregator and devices that come and go, each time with one more image, run over a network that cuts,
delays, duplicates and reorders. Aggregator and broker are killed in the first half. At the end the faults stop, every
device runs, and the newest submission of each must be the one that counts.
"""

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
from PIL import Image

from aggregator.storage.open_store import open_store
from examples.quickstart.digits import CLASSES, load
from protocol.cli import run
from protocol.errors import ProtofleetError
from tests.support.fleets.fleet import Fleet, accepted_submissions, folder_bytes, write_task
from tests.support.network.brokers import Mosquitto, free_address, mosquitto_program
from tests.support.network.proxy import Faults, Proxy

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


SAMPLE_EVERY_S = 2.0
SETTLE_S = 420.0
PERMANENT_DEVICES = 5
FAULTS = Faults(cut=0.01, delay_s=0.02, duplicate=0.02, reorder=0.02, drop=0.02)
"""Faults of publications, in both directions."""
RESOURCES = {
    "memory_bytes": ("memory, MB", 1e6),
    "handles": ("open files", 1),
    "disk_bytes": ("disk, MB", 1e6),
}
"""Label and unit of each resource of a sample."""


@dataclass(frozen=True)
class Sample:
    """Resources of a process at a moment; `start` counts its starts, `disk_bytes` is of its state folder."""

    process: str
    at_s: float
    start: int
    memory_bytes: int
    handles: int
    disk_bytes: int


@click.command("soak")
@click.option("--minutes", type=click.FloatRange(min=0.2), default=10.0, show_default=True)
@click.option("--devices", type=click.IntRange(min=2), default=50, show_default=True)
@click.option("--stay-s", type=float, default=60.0, show_default=True, help="Mean running time of a device.")
@click.option("--away-s", type=float, default=20.0, show_default=True, help="Mean absence of a device.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here as well.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw memory, handles and disk to this file.")
@click.option("--keep", type=click.Path(path_type=Path), help="Run in this folder, and leave it.")
def soak(
    *, minutes: float, json_file: Path | None, plot: Path | None, keep: Path | None, **options: Any
) -> None:
    """Run a fleet under faults; report lost and duplicate submissions, and growth of memory, files and disk."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures, samples = run_soak(folder, seconds=minutes * 60, **options)
    if json_file:
        json_file.write_text(json.dumps({**figures, "samples": list(map(asdict, samples))}) + "\n")
    if plot:
        draw(samples, plot)
    _print(figures)
    if figures["submissions"]["lost"] or figures["submissions"]["twice"] or figures["crashed"]:
        raise ProtofleetError(
            "a submission was lost or counted twice, or a program ended by itself: see above"
        )


def run_soak(
    folder: Path, *, seconds: float, devices: int, stay_s: float, away_s: float, seed: int
) -> tuple[dict[str, Any], list[Sample]]:
    """Run a fleet under faults, then let it settle; returns the figures and the samples."""
    if mosquitto_program() is None:
        raise ProtofleetError("mosquitto is not installed: apt-get install mosquitto")
    rng = random.Random(seed)
    start_s = time.monotonic()
    samples: list[Sample] = []
    crashed: list[str] = []
    with (
        ChangingFleet(folder, devices, rng) as fleet,
        Proxy(fleet.proxy_address, fleet.broker, seed=seed, up=FAULTS, down=FAULTS) as proxy,
    ):
        schedule = Schedule(
            fleet,
            rng,
            stay_s=stay_s,
            away_s=away_s,
            permanent=frozenset(fleet.names[:PERMANENT_DEVICES]),
            killing_until_s=start_s + seconds / 2,
            kill_every_s=max(15.0, seconds / 12),
        )
        fleet.run("broker")
        fleet.run("aggregator")
        schedule.begin()
        with click.progressbar(length=int(seconds), label="soaking", file=sys.stderr) as bar:
            while (passed_s := time.monotonic() - start_s) < seconds:
                schedule.advance()
                crashed += _restart_crashed(fleet)
                samples += sample(fleet, at_s=passed_s)
                bar.update(int(passed_s) - bar.pos)
                time.sleep(SAMPLE_EVERY_S)
        proxy.calm()
        settled_s = settle(fleet)
        submissions = count_submissions(fleet)
    figures = {
        "seconds": seconds,
        "devices": devices,
        "seed": seed,
        "faults": {**schedule.done, **proxy.counts},
        "submissions": submissions,
        "settled_s": settled_s,
        "crashed": crashed,
        "growth": growth(samples, since_s=seconds / 2),
    }
    return figures, samples


def _restart_crashed(fleet: ChangingFleet) -> list[str]:
    """Restart devices that have ended by themselves, as systemd would."""
    crashed = fleet.crashed()
    for name in crashed:
        status = fleet.processes[name].returncode
        tail = fleet.log(name).splitlines()[-1:]
        click.echo(f"\n{name} ended by itself with status {status}: {tail}", err=True)
        fleet.running.discard(name)
        if name in fleet.names:
            fleet.run(name)
    return crashed


def sample(fleet: ChangingFleet, *, at_s: float) -> list[Sample]:
    samples = []
    for name in fleet.running:
        state = fleet.device_state(name) if name in fleet.names else fleet.root / name
        try:
            process = psutil.Process(fleet.pid(name))
            with process.oneshot():
                memory, handles = process.memory_info().rss, process.num_fds()
        except psutil.Error:
            continue
        samples.append(Sample(name, at_s, fleet.starts[name], memory, handles, folder_bytes(state)))
    return samples


def settle(fleet: ChangingFleet) -> float:
    """Start every device, and wait until each one's newest submission is received; returns the seconds it took."""
    start_s = time.monotonic()
    for name in fleet.names:
        if name not in fleet.running:
            fleet.run(name)
    while time.monotonic() - start_s < SETTLE_S and not all(newest_submissions(fleet).values()):
        time.sleep(SAMPLE_EVERY_S)
    return time.monotonic() - start_s


def newest_submissions(fleet: ChangingFleet) -> dict[str, bool]:
    """Return for each device whether its newest submission is the one that the aggregator has of it."""
    with closing(open_store(fleet.aggregator_state, read_only=True)) as store:
        accepted = store.submissions.all(store.served_task().digest)
    newest = {}
    for name in fleet.names:
        status, row = fleet.device_status(name), accepted.get(name)
        newest[name] = bool(
            status.get("received") and row is not None and row.entry.digest.hex() == status["submission"]
        )
    return newest


def count_submissions(fleet: ChangingFleet) -> dict[str, int]:
    """Count submissions made, accepted and accepted twice, and devices whose newest one counts or is lost."""
    newest = newest_submissions(fleet)
    made = sum(fleet.log(name).count("submission built") for name in fleet.names)
    # A device has one more image each time it starts, so that their number distinguishes its submissions.
    accepted = accepted_submissions(fleet.log("aggregator"))
    return {
        "made": made,
        "accepted": len(accepted),
        "devices": len(newest),
        "counted": sum(newest.values()),
        "lost": sum(not counted for counted in newest.values()),
        "twice": len(accepted) - len(set(accepted)),
    }


def growth(samples: Iterable[Sample], *, since_s: float) -> dict[str, dict[str, float]]:
    """Return the resources of long-running processes at the end as multiples of those at `since_s`.

    Medians over the last and the first quarter of that time, since the last start of each process.
    """
    processes: dict[str, list[Sample]] = {}
    for one in samples:
        if one.at_s >= since_s:
            processes.setdefault(one.process, []).append(one)
    found = {}
    for name, own in processes.items():
        last = [one for one in own if one.start == own[-1].start]
        if last[-1].at_s - last[0].at_s < since_s * 0.8:
            continue
        quarter = max(1, len(last) // 4)
        found[name] = {
            what: _median(last[-quarter:], what) / max(1.0, _median(last[:quarter], what))
            for what in RESOURCES
        }
    return found


def _median(samples: Sequence[Sample], what: str) -> float:
    return float(statistics.median(getattr(one, what) for one in samples))


def draw(samples: Sequence[Sample], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(9, 9), layout="constrained")
    colors = {"aggregator": "tab:red", "broker": "tab:blue"}
    runs: dict[tuple[str, int], list[Sample]] = {}
    for one in samples:
        runs.setdefault((one.process, one.start), []).append(one)
    for axis, (what, (label, unit)) in zip(axes, RESOURCES.items(), strict=True):
        for (name, start), own in runs.items():
            named = name in colors
            axis.plot(
                [one.at_s / 60 for one in own],
                [getattr(one, what) / unit for one in own],
                color=colors.get(name, "0.7"),
                linewidth=1.5 if named else 0.5,
                label=name if named and start == 1 else None,
                zorder=2 if named else 1,
            )
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, linewidth=0.3)
    axes[0].plot([], [], color="0.7", label="devices")
    axes[0].legend(loc="upper right")
    axes[-1].set_xlabel("minutes")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _print(figures: Mapping[str, Any]) -> None:
    print(f"{figures['devices']} devices, {figures['seconds'] / 60:.1f} minutes, seed {figures['seed']}\n")
    for name, times in sorted(figures["faults"].items()):
        print(f"{name:<40}{times:>8}")
    print()
    for name, number in figures["submissions"].items():
        print(f"submissions: {name:<27}{number:>8}")
    print(f"\n{'growth over the second half':<40}{'memory':>8}{'files':>8}{'disk':>8}")
    for name, ratios in sorted(figures["growth"].items()):
        print(f"{name:<40}" + "".join(f"{ratio:>7.2f}x" for ratio in ratios.values()))
    print(f"\nall settled {figures['settled_s']:.0f} s after the faults ended")


if __name__ == "__main__":
    run(soak, program="python -m tests.system.soak")
