"""Memory of a device that trains in rounds, beside one that makes prototypes for FedTC.

`python -m benchmarks memory` runs the real programs: an aggregator with its own broker, and one device, for each
algorithm in turn, on the same images, and compares the peak of the device's process.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.cost.device import CLASSES, write_photographs
from benchmarks.cost.processes import free_address, running
from benchmarks.data.features import backbone_file
from benchmarks.programs.measurement import peak_memory
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ProtofleetError

SOURCES = ("mobilenetv2_100", "mobilenetv2_100_birds", "mobilenetv2_100_insects")
ROUNDS = 3
TIMEOUT_S = 600.0


@click.command("memory")
@click.option("--images", type=click.IntRange(min=10), default=200, show_default=True)
@click.option("--image-size", type=click.IntRange(min=32), default=96, show_default=True)
@json_option
def memory(*, images: int, image_size: int, json_file: Path | None) -> None:
    """Compare the peak memory of a device that trains with one that does not."""
    files = [backbone_file(name, image_size=image_size) for name in SOURCES]
    figures: dict[str, int] = {}
    table = Table({"algorithm": "<26", "peak MB": ">9.1f", "of FedTC": ">10.2f"})
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "images"
        write_photographs(data, count=images)
        for name, algorithm, backbones in (
            ("fedtc", "fedtc", files[:1]),
            ("fedpcl, one backbone", "fedpcl", files[:1]),
            ("fedpcl, three backbones", "fedpcl", files),
            ("fpl, one backbone", "fpl", files[:1]),
            ("fpl, three backbones", "fpl", files),
        ):
            task = write_task(Path(folder) / f"{len(figures)}", algorithm, backbones)
            figures[name] = run_fleet_of_one(task, data)
            table.row(name, figures[name] / 1e6, figures[name] / figures["fedtc"])
    write_json(json_file, "memory", tables=[table], images=images, peak_bytes=figures)


def write_task(folder: Path, algorithm: str, backbones: Sequence[Path]) -> Path:
    """Write a task file for a fleet of one."""
    folder.mkdir()
    lines = [f"classes = {json.dumps(CLASSES)}", f"backbones = {json.dumps(list(map(str, backbones)))}"]
    lines.append(f'algorithm = "{algorithm}"')
    if algorithm != "fedtc":
        lines += ["[rounds]", "grace_s = 0", f"[{algorithm}]", f"rounds = {ROUNDS}"]
    task = folder / "task.toml"
    task.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return task


def run_fleet_of_one(task: Path, data: Path) -> int:
    """Run an aggregator and a device until its last head; return the peak memory of the device's process, bytes.

    Raises:
        ProtofleetError: the device failed or timed out.
    """
    broker, folder = str(free_address()), task.parent
    serve = ("run", "--embedded-broker", "--broker", broker, "--task", str(task), "--state")
    device = ("--broker", broker, "--once", "--data", str(data), "--state", str(folder / "device"))
    with (
        running("aggregator.cli", *serve, str(folder / "aggregator"), log=folder / "aggregator.log"),
        running("edge_client.cli", *device, log=folder / "device.log") as process,
    ):
        return _watch(process)


def _watch(process: subprocess.Popen[bytes]) -> int:
    """Return the peak memory of a process, read until it ends; Linux only."""
    peak, deadline_s = 0, time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        peak = max(peak, peak_memory(process.pid))
        if process.poll() is not None:
            if process.returncode:
                raise ProtofleetError(f"a device ended with status {process.returncode}")
            return peak
        time.sleep(0.02)
    raise ProtofleetError(f"a device took longer than {TIMEOUT_S:.0f} s")
