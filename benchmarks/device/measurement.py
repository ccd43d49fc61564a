"""Whole programs, measured as processes in turns, since the machine may be busy: read the ratios, not the seconds."""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.processes import free_address, running
from protocol.errors import ProtofleetError

Command = Sequence[str]
"""Arguments of the Python interpreter."""


POLL_S = 0.01


@dataclass(frozen=True)
class Cost:
    """The cost of one run of a program."""

    wall_s: float
    cpu_s: float
    """Of the process and of those that it has waited for."""
    memory_bytes: int
    """Peak, without workers."""


def run(command: Command) -> Cost:
    """Run a program to its end; Linux only.

    Raises:
        ProtofleetError: it failed.
    """
    with tempfile.TemporaryFile() as errors:
        started_s = time.perf_counter()
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=errors)
        peak = 0
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            peak = max(peak, peak_memory(process.pid))
            time.sleep(POLL_S)
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise ProtofleetError(f"{' '.join(command)}: {errors.read().decode(errors='replace')[-2000:]}")
    return Cost(wall_s, used.ru_utime + used.ru_stime, peak)


def peak_memory(pid: int) -> int:
    """Return the kernel's record of a process's peak memory, bytes; 0 if it has ended.

    `getrusage` would include that of the process that started it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def in_turns(
    programs: Mapping[str, Callable[[], Command]], *, repetitions: int, warm_up: bool = True
) -> dict[str, list[Cost]]:
    """Run all programs one after the other, so many times, with `warm_up` after one time that does not count.

    Each function prepares a run, which is not measured, and returns its command.
    """
    runs: dict[str, list[Cost]] = {name: [] for name in programs}
    for number in range(not warm_up, repetitions + 1):
        for name, make in programs.items():
            cost = run(make())
            if number:
                runs[name].append(cost)
    return runs


def ratio(runs: Sequence[object], others: Sequence[object], figure: str) -> float:
    """Return the median ratio of a figure between runs that followed each other."""
    return statistics.median(ratios(runs, others, figure))


def ratios(runs: Sequence[object], others: Sequence[object], figure: str) -> list[float]:
    """Return the ratio of a figure between each two runs that followed each other; NaN where the kernel counted 0."""
    pairs: list[tuple[float, float]] = [
        (getattr(one, figure), getattr(other, figure)) for one, other in zip(runs, others, strict=True)
    ]
    return [one / other if other else math.nan for one, other in pairs]


def median(runs: Sequence[object], figure: str) -> float:
    """Return the median of a figure."""
    values: list[float] = [getattr(one, figure) for one in runs]
    return statistics.median(values)


CLASSES = ("china", "flower")
THREADS = 2
"""Of each program."""

LABELED = 20
"""Images that the head of a device is made of."""
TIMEOUT_S = 600.0


def write_photographs(folder: Path, *, count: int) -> None:
    """Cut `count` JPEG files of 200 to 400 pixels out of scikit-learn's two photographs, a class each."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(0)
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for number in range(count):
        label = number % len(CLASSES)
        photograph = photographs[label]
        edge = int(random.integers(200, 401))
        left, top = (int(random.integers(side - edge)) for side in photograph.size)
        path = folder / CLASSES[label] / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph.crop((left, top, left + edge, top + edge)).save(path, quality=90)


def link_some(source: Path, target: Path, *, count: int) -> None:
    """Make a folder of the first `count` of another's images, without copying them."""
    for path in sorted(source.glob("*/*.jpg"), key=lambda path: path.name)[:count]:
        link = target / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.hardlink_to(path)


def export_random(model: str, *, image_size: int, folder: Path) -> Path:
    """Export a network with random weights, for images resized without a crop."""
    from export.backbones import Choice, load_backbone
    from export.to_onnx import export_module

    path = folder / f"{model}-{image_size}.onnx"
    loaded = load_backbone(Choice(model, random=True, image_size=image_size, crop_pct=1.0))
    export_module(loaded.module, loaded.metadata, path=path)
    return path


def train_head(folder: Path, backbone: Path, images: Path) -> None:
    """Run an aggregator and one device until it has a head; their states are `aggregator` and `device`.

    Raises:
        ProtofleetError: the device failed.
    """
    folder.mkdir()
    task, broker = folder / "task.toml", str(free_address())
    task.write_text(f"classes = {json.dumps(CLASSES)}\nbackbones = [{json.dumps(str(backbone))}]\n")
    serve = (
        "--embedded-broker",
        "--broker",
        broker,
        "--task",
        str(task),
        "--state",
        str(folder / "aggregator"),
    )
    device = ("--broker", broker, "--once", "--data", str(images), "--state", str(folder / "device"))
    with (
        running("aggregator.cli", "run", *serve, log=folder / "aggregator.log"),
        running("edge_client.cli", *device, log=folder / "device.log") as process,
    ):
        if process.wait(TIMEOUT_S):
            raise ProtofleetError(f"the device failed:\n{(folder / 'device.log').read_text()[-2000:]}")
