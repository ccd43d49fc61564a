"""A fleet of real programs under random faults for as long as you like: is anything lost, does anything grow?

`python -m tests.system.soak` runs mosquitto, an aggregator and devices that come and go, each time with an image
more, over a network that cuts, delays, doubles and reorders. Aggregator and broker are killed in the first half. At
the end the faults stop, everybody comes, and each device's newest submission must be the one that counts.
"""

import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from aggregator.storage.store import Store
from protocol.errors import ProtofleetError
from protocol.mqtt.session import BrokerAddress
from tests.support.network_proxy import Faults, Proxy
from tests.system.soak.programs import Fate, Programs

LOOK_EVERY_S = 2.0
SETTLE_S = 420.0
STAYERS = 5
RESTLESS = Faults(cut=0.01, delay_s=0.02, duplicate=0.02, reorder=0.02, drop=0.02)
"""What the network does to publications, in both directions."""


@dataclass(frozen=True)
class Sample:
    """What a process held at a moment.

    Args:
        at_s: seconds from the start of the soak.
        life: how often it had been started by then.
        disk_bytes: of its state folder.
    """

    process: str
    at_s: float
    life: int
    memory_bytes: int
    handles: int
    disk_bytes: int


@click.command("soak")
@click.option("--minutes", type=click.FloatRange(min=0.2), default=10.0, show_default=True)
@click.option("--devices", type=click.IntRange(min=2), default=50, show_default=True)
@click.option("--stay-s", type=float, default=60.0, show_default=True, help="Mean stay of a device.")
@click.option("--away-s", type=float, default=20.0, show_default=True, help="Mean absence of a device.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here as well.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw memory, handles and disk to this file.")
@click.option("--keep", type=click.Path(path_type=Path), help="Run in this folder, and leave it.")
def soak(
    *,
    minutes: float,
    devices: int,
    stay_s: float,
    away_s: float,
    seed: int,
    json_file: Path | None,
    plot: Path | None,
    keep: Path | None,
) -> None:
    """Run a restless fleet, and look for what is lost and what grows."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures, samples = run_soak(
            folder, seconds=minutes * 60, devices=devices, stay_s=stay_s, away_s=away_s, seed=seed
        )
    if json_file:
        json_file.write_text(json.dumps({**figures, "samples": list(map(asdict, samples))}) + "\n")
    if plot:
        draw(samples, plot)
    _show(figures)
    if figures["submissions"]["lost"] or figures["submissions"]["twice"] or figures["fallen"]:
        raise ProtofleetError("something was lost, counted twice, or ended by itself: see above")


def run_soak(
    folder: Path, *, seconds: float, devices: int, stay_s: float, away_s: float, seed: int
) -> tuple[dict[str, Any], list[Sample]]:
    """Run a fleet under faults for that long, then let it settle; returns the figures and what was sampled."""
    mosquitto = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
    if mosquitto is None:
        raise ProtofleetError("mosquitto is not installed: apt-get install mosquitto")
    rng = random.Random(seed)
    programs = Programs(folder, devices, mosquitto, rng)
    start_s = time.monotonic()
    fate = Fate(
        programs,
        rng,
        stay_s=stay_s,
        away_s=away_s,
        stayers=frozenset(programs.names[: min(STAYERS, devices)]),
        killing_until_s=start_s + seconds / 2,
        kill_every_s=max(15.0, seconds / 12),
    )
    samples: list[Sample] = []
    fallen: list[str] = []
    listen, broker = (
        BrokerAddress("127.0.0.1", port) for port in (programs.device_port, programs.broker_port)
    )
    with Proxy(listen, broker, seed=seed, up=RESTLESS, down=RESTLESS) as proxy:
        try:
            programs.start_broker()
            programs.start_aggregator()
            fate.begin()
            with click.progressbar(length=int(seconds), label="soaking", file=sys.stderr) as bar:
                while (passed_s := time.monotonic() - start_s) < seconds:
                    fate.advance()
                    fallen += _replace_fallen(programs)
                    samples += sample(programs, at_s=passed_s)
                    bar.update(int(passed_s) - bar.pos)
                    time.sleep(LOOK_EVERY_S)
            proxy.calm()
            waited_s = settle(programs)
        finally:
            programs.stop()
    figures = {
        "seconds": seconds,
        "devices": devices,
        "seed": seed,
        "faults": {**fate.done, **proxy.counts},
        "submissions": count_submissions(programs),
        "settled_s": waited_s,
        "fallen": fallen,
        "growth": growth(samples, since_s=seconds / 2),
    }
    return figures, samples


def _replace_fallen(programs: Programs) -> list[str]:
    """Devices that have ended by themselves, which nobody should; they are started again, as systemd would."""
    fallen = programs.fallen()
    for name in fallen:
        status = programs.running.pop(name).returncode
        tail = programs.log(name).splitlines()[-1:]
        click.echo(f"\n{name} ended by itself with status {status}: {tail}", err=True)
        if name.startswith("device"):
            programs.start_device(name)
    return fallen


def sample(programs: Programs, *, at_s: float) -> list[Sample]:
    """What every process holds now."""
    taken = []
    for name, process in programs.running.items():
        state = programs.folder / ("devices" if name.startswith("device") else "") / name
        try:
            running = psutil.Process(process.pid)
            with running.oneshot():
                memory, handles = running.memory_info().rss, running.num_fds()
        except psutil.Error:
            continue
        life = programs.starts[name]
        taken.append(Sample(name, at_s, life, memory, handles, folder_bytes(state)))
    return taken


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder, which may change meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def settle(programs: Programs) -> float:
    """Bring everybody back, and wait until each device's newest submission is received; seconds it took."""
    start_s = time.monotonic()
    for name in programs.names:
        if name not in programs.running:
            programs.start_device(name)
    while time.monotonic() - start_s < SETTLE_S:
        if all(newest_submissions(programs).values()):
            break
        time.sleep(LOOK_EVERY_S)
    return time.monotonic() - start_s


def newest_submissions(programs: Programs) -> dict[str, bool]:
    """For each device, whether its newest submission is the one that the aggregator has of it."""
    with_task = Store(programs.folder / "aggregator", read_only=True)
    taken = with_task.submissions.all(with_task.served_task().digest)
    with_task.close()
    newest = {}
    for name in programs.names:
        state = programs.folder / "devices" / name
        command = [sys.executable, "-m", "edge_client.cli", "status", "--json", "--state", str(state)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        status = json.loads(done.stdout) if done.returncode == 0 else {}
        row = taken.get(name)
        newest[name] = bool(
            status.get("received") and row is not None and row.entry.digest.hex() == status["submission"]
        )
    return newest


def count_submissions(programs: Programs) -> dict[str, int]:
    """How many were made, how many devices count with their newest, and how many do not."""
    newest = newest_submissions(programs)
    made = sum(programs.log(name).count(" prototypes of ") for name in programs.names)
    # A device has an image more each time it comes, so that their number tells its submissions apart.
    taken = re.findall(r"(device-\d+): \d+ prototypes of (\d+) images", programs.log("aggregator"))
    return {
        "made": made,
        "taken": len(taken),
        "devices": len(newest),
        "counted": sum(newest.values()),
        "lost": sum(not good for good in newest.values()),
        "twice": len(taken) - len(set(taken)),
    }


def growth(samples: Iterable[Sample], *, since_s: float) -> dict[str, dict[str, float]]:
    """For processes that lived on in peace: what they held at the end beside what they held at `since_s`.

    Medians over the last and the first quarter of that time, of the last life of each process.
    """
    lives: dict[str, list[Sample]] = {}
    for taken in samples:
        if taken.at_s >= since_s:
            lives.setdefault(taken.process, []).append(taken)
    found = {}
    for name, own in lives.items():
        last = [taken for taken in own if taken.life == own[-1].life]
        if last[-1].at_s - last[0].at_s < since_s * 0.8:
            continue
        quarter = max(1, len(last) // 4)
        found[name] = {
            what: _median(last[-quarter:], what) / max(1.0, _median(last[:quarter], what))
            for what in ("memory_bytes", "handles", "disk_bytes")
        }
    return found


def _median(samples: Sequence[Sample], what: str) -> float:
    return float(statistics.median(getattr(taken, what) for taken in samples))


def draw(samples: Sequence[Sample], file: Path) -> None:
    """Draw what each process held over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(9, 9), layout="constrained")
    panels = (
        ("memory_bytes", "memory, MB", 1e6),
        ("handles", "open files", 1),
        ("disk_bytes", "disk, MB", 1e6),
    )
    colors = {"aggregator": "tab:red", "broker": "tab:blue"}
    for axis, (what, label, unit) in zip(axes, panels, strict=True):
        for name in sorted({taken.process for taken in samples}):
            for life in {taken.life for taken in samples if taken.process == name}:
                own = [taken for taken in samples if (taken.process, taken.life) == (name, life)]
                named = name in colors
                axis.plot(
                    [taken.at_s / 60 for taken in own],
                    [getattr(taken, what) / unit for taken in own],
                    color=colors.get(name, "0.7"),
                    linewidth=1.5 if named else 0.5,
                    label=name if named and life == 1 else None,
                    zorder=2 if named else 1,
                )
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, linewidth=0.3)
    axes[0].plot([], [], color="0.7", label="devices")
    axes[0].legend(loc="upper right")
    axes[-1].set_xlabel("minutes")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _show(figures: Mapping[str, Any]) -> None:
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
