"""Soak test: real programs under random faults for some minutes; reports lost submissions and growth of resources.

mosquitto, an aggregator and devices that come and go, each time with more images, run over a network that cuts,
delays, duplicates and reorders. Aggregator and broker are killed in the first half. At the end the faults stop, every
device runs, and the newest submission of each must be the one that counts.
"""

import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from aggregator.storage.open_store import open_store
from protocol.cli import run
from protocol.errors import ProtofleetError
from tests.support.fleets.fleet import Fleet, accepted_submissions, folder_bytes, write_digits, write_task
from tests.support.network.brokers import Mosquitto, free_address, mosquitto_program
from tests.support.network.proxy import Faults, Proxy

BACKBONE = Path("examples/quickstart/backbone.onnx")
TABLES = "[client]\nbatch_size = 1\nmin_images = 1\n[training]\nepochs = 2\n"
BROKER = """\
allow_anonymous true
persistence true
persistence_location {folder}/
autosave_interval 5
max_queued_messages 20000
"""
SAMPLE_EVERY_S = 2.0
SETTLE_S = 420.0
PERMANENT_DEVICES = 5
"""Devices that are never ended."""
FAULTS = Faults(cut=0.01, delay_s=0.02, duplicate=0.02, reorder=0.02, drop=0.02)
"""Faults of publications, in both directions."""
RESOURCES = {
    "memory_bytes": ("memory, MB", 1e6),
    "handles": ("open files", 1),
    "disk_bytes": ("disk, MB", 1e6),
}
"""Label and unit of each resource of a sample."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long a soak takes, and how long its devices run and are away in the mean."""

    seconds: float
    devices: int
    seed: int
    stay_s: float = 60.0
    away_s: float = 20.0

    @property
    def kill_every_s(self) -> float:
        """Mean time between two kills of the aggregator or the broker."""
        return max(15.0, self.seconds / 12)


class ChangingFleet(Fleet):
    """A fleet behind a network proxy, of programs that start and end at random times."""

    forks = False

    def __init__(self, root: Path, plan: Plan) -> None:
        self.mosquitto = Mosquitto(free_address(), root, options=BROKER)
        self.proxy_address = free_address()
        super().__init__(root, self.mosquitto.address, device_broker=self.proxy_address)
        self.names = [f"device-{number:02d}" for number in range(plan.devices)]
        self.running: set[str] = set()
        self.ended: Counter[str] = Counter()
        """How often programs were ended, by name and signal."""
        self._plan = plan
        self._rng = random.Random(plan.seed)
        settings = {"quorum": plan.devices, "deadline_s": 60, "retrain_after": max(1, plan.devices // 4)}
        backbones = [str(BACKBONE.resolve())]
        self._task = write_task(root, feature_sizes=(), tables=TABLES, backbones=backbones, **settings)
        self._start_s = time.monotonic()
        self._due_s = {name: self._start_s + self._rng.uniform(0, plan.stay_s / 2) for name in self.names}
        self._due_s["kill"] = self._start_s + plan.kill_every_s

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
        self.ended[f"{name.partition('-')[0]}, {how.name}"] += 1
        if name == "broker":
            self.mosquitto.kill()
            return
        self.processes[name].send_signal(how)
        self.processes[name].wait(timeout=120)

    def advance(self) -> None:
        """Start and end what is due; in the first half also aggregator or broker."""
        now_s = time.monotonic()
        for name in [name for name, due_s in self._due_s.items() if due_s <= now_s]:
            after_s = float("inf")
            if name == "kill":
                killed = self._rng.choice(("aggregator", "broker"))
                self.end(killed, signal.SIGKILL)
                self.run(killed)
                if now_s + self._plan.kill_every_s < self._start_s + self._plan.seconds / 2:
                    after_s = self._rng.uniform(0.5, 1.5) * self._plan.kill_every_s
            elif name in self.running:
                self.end(name, self._rng.choice((signal.SIGKILL, signal.SIGTERM)))
                after_s = self._rng.expovariate(1 / self._plan.away_s)
            else:
                self.run(name)
                if name not in self.names[:PERMANENT_DEVICES]:
                    after_s = self._rng.expovariate(1 / self._plan.stay_s)
            self._due_s[name] = now_s + after_s

    def restart_crashed(self) -> list[str]:
        """Restart devices that have ended by themselves, as systemd would."""
        crashed = [name for name in self.running - {"broker"} if self.processes[name].poll() is not None]
        for name in crashed:
            tail = self.log(name).splitlines()[-1:]
            click.echo(f"\n{name} ended with status {self.processes[name].returncode}: {tail}", err=True)
            self.running.discard(name)
            if name in self.names:
                self.run(name)
        return crashed

    def _add_images(self, name: str) -> Path:
        """Add a device's first images of each class, or one more; returns their folder."""
        folder, number = self.root / "images" / name, self.starts[name]
        return write_digits(folder, classes=list(range(10)), start=number, each=1)


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
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here as well.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw memory, handles and disk to this file.")
def soak(*, minutes: float, devices: int, seed: int, json_file: Path | None, plot: Path | None) -> None:
    """Run a fleet under faults; report lost and duplicate submissions, and growth of memory, files and disk."""
    with tempfile.TemporaryDirectory() as folder:
        figures, samples = run_soak(Path(folder), Plan(seconds=minutes * 60, devices=devices, seed=seed))
    if json_file:
        json_file.write_text(json.dumps({**figures, "samples": list(map(asdict, samples))}) + "\n")
    if plot:
        draw(samples, plot)
    _print(figures)
    if figures["submissions"]["lost"] or figures["submissions"]["twice"] or figures["crashed"]:
        raise ProtofleetError(
            "a submission was lost or counted twice, or a program ended by itself: see above"
        )


def run_soak(folder: Path, plan: Plan) -> tuple[dict[str, Any], list[Sample]]:
    """Run a fleet under faults, then let it settle; returns the figures and the samples."""
    if mosquitto_program() is None:
        raise ProtofleetError("mosquitto is not installed: apt-get install mosquitto")
    start_s = time.monotonic()
    samples: list[Sample] = []
    crashed: list[str] = []
    with (
        ChangingFleet(folder, plan) as fleet,
        Proxy(fleet.proxy_address, fleet.broker, seed=plan.seed, up=FAULTS, down=FAULTS) as proxy,
        click.progressbar(length=int(plan.seconds), label="soaking", file=sys.stderr) as bar,
    ):
        fleet.run("broker")
        fleet.run("aggregator")
        while (passed_s := time.monotonic() - start_s) < plan.seconds:
            fleet.advance()
            crashed += fleet.restart_crashed()
            samples += sample(fleet, at_s=passed_s)
            bar.update(int(passed_s) - bar.pos)
            time.sleep(SAMPLE_EVERY_S)
        proxy.calm()
        settled_s = settle(fleet)
        submissions = count_submissions(fleet)
    figures = {
        **asdict(plan),
        "faults": {**fleet.ended, **proxy.counts},
        "submissions": submissions,
        "settled_s": settled_s,
        "crashed": crashed,
        "growth": growth(samples, since_s=plan.seconds / 2),
    }
    return figures, samples


def sample(fleet: ChangingFleet, *, at_s: float) -> list[Sample]:
    samples = []
    for name in fleet.running:
        state = fleet.device_state(name) if name in fleet.names else fleet.root / name
        try:
            processes = [psutil.Process(fleet.mosquitto.pid)] if name == "broker" else fleet.services(name)
            memory = sum(each.memory_info().rss for each in processes)
            handles = sum(each.num_fds() for each in processes)
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
    # A device has more images each time it starts, so that their number distinguishes its submissions.
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    colors = {"aggregator": "tab:red", "broker": "tab:blue"}
    for axis, (what, (label, unit)) in zip(figure.subplots(3, sharex=True), RESOURCES.items(), strict=True):
        for name, start in sorted({(one.process, one.start) for one in samples}):
            own = [one for one in samples if (one.process, one.start) == (name, start)]
            values = [getattr(one, what) / unit for one in own]
            axis.plot([one.at_s / 60 for one in own], values, color=colors.get(name, "0.7"))
        axis.set(xlabel="minutes", ylabel=label, ylim=(0, None))
        axis.set_title("red: aggregator; blue: broker; gray: devices")
    figure.savefig(file)


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
