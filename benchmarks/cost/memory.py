"""What a device that trains in rounds holds in memory, beside one that makes prototypes for FedTC.

`python -m benchmarks memory` runs the real programs: an aggregator with its own broker, and one device, for each
algorithm in turn, on the same images. Compared is the most that the device's process ever held.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.cost.device import CLASSES, write_photographs
from benchmarks.data.features import backbone_file
from protocol.errors import ProtofleetError

SOURCES = ("mobilenetv2_100", "mobilenetv2_100_birds", "mobilenetv2_100_insects")
ROUNDS = 3
PATIENCE_S = 600.0


@click.command("memory")
@click.option("--images", type=click.IntRange(min=10), default=200, show_default=True)
@click.option("--image-size", type=click.IntRange(min=32), default=96, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here as well.")
def memory(*, images: int, image_size: int, json_file: Path | None) -> None:
    """Weigh a device that trains against one that does not."""
    files = [backbone_file(name, image_size=image_size) for name in SOURCES]
    figures: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "images"
        write_photographs(data, count=images)
        for name, algorithm, backbones in (
            ("fedtc", "fedtc", files[:1]),
            ("fedpcl, one backbone", "fedpcl", files[:1]),
            ("fedpcl, three backbones", "fedpcl", files),
            ("fpl, one backbone", "fpl", files[:1]),
        ):
            task = write_task(Path(folder) / f"{len(figures)}", algorithm, backbones)
            figures[name] = peak_bytes(task, data)
            ratio = figures[name] / figures["fedtc"]
            click.echo(f"{name:<26}{figures[name] / 1e6:>8.1f} MB{ratio:>8.2f} x")
    if json_file:
        json_file.write_text(json.dumps({"images": images, "peak_bytes": figures}, indent=2) + "\n")


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


def peak_bytes(task: Path, data: Path) -> int:
    """The most memory that a device's process held, from its start to its last head.

    Raises:
        ProtofleetError: the device did not come to an end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        broker = f"127.0.0.1:{probe.getsockname()[1]}"
    aggregator = _start(
        task, "aggregator", "run", "--embedded-broker", "--broker", broker,
        "--task", str(task), "--state", str(task.parent / "aggregator"),
    )  # fmt: skip
    device = _start(
        task, "edge_client", "--broker", broker, "--once", "--data", str(data),
        "--state", str(task.parent / "device"),
    )  # fmt: skip
    try:
        return _watch(device)
    finally:
        for process in (device, aggregator):
            process.terminate()
            process.wait(timeout=30)


def _start(task: Path, package: str, *arguments: str) -> subprocess.Popen[bytes]:
    with (task.parent / f"{package}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", f"{package}.cli", *arguments], stderr=log, stdout=log)


def _watch(process: subprocess.Popen[bytes]) -> int:
    """The kernel's own record of the most that a process held, read until it ends; Linux only."""
    peak, give_up_s = 0, time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            peak = max(peak, int(status.split("VmHWM:")[1].split()[0]) * 1024)
        except (OSError, IndexError):
            pass  # it has ended, and left no record
        if process.poll() is not None:
            if process.returncode:
                raise ProtofleetError(f"a device ended with status {process.returncode}")
            return peak
        time.sleep(0.02)
    raise ProtofleetError(f"a device took longer than {PATIENCE_S:.0f} s")
