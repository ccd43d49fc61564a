"""Output of the demo: the progress of each device, and the result."""

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from examples.quickstart.folder import Folder
from protocol.cli import counted

STEPS = 4
"""Steps of a device: connected, uploaded, head received, head evaluated."""


class Accuracy(msgspec.Struct, frozen=True):
    """Shares of the images of no device that a head classifies correctly."""

    own: float
    """Of the images of the device's own classes; the mean over devices, of several heads."""
    all: float
    """Of all images."""


class DeviceResult(msgspec.Struct, frozen=True, kw_only=True):
    """One device's row."""

    device: str
    classes: tuple[str, ...]
    images: int
    prototypes: int
    """Or the images in them, where devices may upload principal prototypes; of all devices as well."""
    bytes_up: int
    cpu_s: float
    """CPU time of its process, seconds."""
    peak_memory_bytes: int
    """Peak of its process's resident memory; 0 where there is no /proc."""
    fleet: Accuracy
    """Of its head from the fleet, with the prior that `edge-client predict` has by default."""
    alone: Accuracy
    """Of a head that is trained on its own images only."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result, as `--json` writes it."""

    algorithm: str
    rounds: int
    """0 for an algorithm without."""
    fleet: Accuracy
    """Of the heads that the devices have from the fleet, mean over the devices."""
    alone: Accuracy
    """Of heads of one device's images, mean over the devices."""
    nearest_mean_accuracy: float
    """Of the nearest class mean, with the images of all devices in one place."""
    logistic_regression_accuracy: float
    """Of logistic regression, with the images of all devices in one place."""
    devices: int
    submissions: int
    prototypes: int
    bytes_up: int
    """Bytes of all submissions; with rounds, of the last one."""
    onnx_max_difference: float | None
    """Largest difference between head.onnx and its layers in NumPy; None with rounds."""
    seconds: float
    held_out_images: int
    head: str
    model: str
    per_device: tuple[DeviceResult, ...]


def progress(summary: dict[str, Any], names: Sequence[str]) -> RenderableType:
    """Return the progress of every device, for a terminal; the summary is that of `aggregator status --json`."""
    known = {row["device"]: row for row in summary.get("devices", [])}
    of_images = summary.get("counted") == "images"
    steps = [
        _step(known.get(name), has_head=bool(summary.get("heads")), of_images=of_images) for name in names
    ]
    table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
    for name, (step, words) in zip(names, steps, strict=True):
        bar = ProgressBar(total=STEPS, completed=step, width=16)
        table.add_row(name, bar, words, style="green" if step == STEPS else "")
    return Group(Spinner("dots", text=_fleet_line(summary, [step for step, _ in steps])), table)


def _step(row: dict[str, Any] | None, *, has_head: bool, of_images: bool) -> tuple[int, str]:
    """Return a device's number of completed steps, and its current one.

    With `of_images`, the row's prototypes are the images in them.
    """
    if row is None or (row["state"] != "online" and not row["prototypes"]):
        return 0, "starting"
    if not row["prototypes"]:
        return 1, "fetching the backbone, extracting features"
    if row["accuracy"] is None:
        number = row["prototypes"]
        what = f"prototypes of {counted(number, 'image')}" if of_images else counted(number, "prototype")
        sent = f"uploaded {what}, {_kilobytes(row['bytes'])}"
        return (3, f"{sent}; evaluating the head") if has_head else (2, sent)
    return (
        STEPS,
        f"accuracy {row['accuracy']:.1%} on its held-out images ({row['correct']}/{row['correct'] + row['incorrect']})",
    )


def _fleet_line(summary: dict[str, Any], steps: list[int]) -> str:
    seen = summary.get("round")
    if seen and not seen["over"]:
        return f"round {seen['number'] + 1} of {seen['rounds']}"
    if summary.get("heads"):
        return f"{steps.count(STEPS)} of {len(steps)} devices have evaluated the head"
    if training := summary.get("training"):
        epoch = f": epoch {training['epoch']} of {training['epochs']}" if "epoch" in training else ""
        return f"training a head on the prototypes of all devices{epoch}"
    return f"{sum(step >= 2 for step in steps)} of {len(steps)} devices have uploaded their prototypes"


def show(result: Result, folder: Folder, console: Console) -> None:
    """Print the result, and what to do next."""
    head, model = (_short(Path(path)) for path in (result.head, result.model))
    first = result.per_device[0]
    unseen = [path for path in folder.held_out_images() if path.parent.name not in first.classes]
    predict = (
        f"{_program('edge-client')} predict --prior none --state {_short(folder.state(first.device))} "
        f"{_short(unseen[-1])}"
    )
    status = f"{_program('aggregator')} status --state {_short(folder.aggregator)}"
    console.print("", _devices(result), _gain(first), "", _verdict(result), "", sep="\n", highlight=False)
    difference = result.onnx_max_difference
    for line in (
        f"Uploaded {_uploaded(result)}, and no image.",
        f"A device, on average: {_cost(result)}.",
        *(
            []
            if difference is None
            else [f"Maximum difference of head.onnx from its layers in NumPy: {difference:.0e}."]
        ),
        f"[bold]{head}[/]   features to probabilities",
        f"[bold]{model}[/]  images to probabilities",
        "",
        f"[dim]{first.device} classifies a digit of which it has no image:[/]",
        f"  {predict}",
        "[dim]the aggregator's status:[/]",
        f"  {status}",
    ):
        console.print(f" {line}", highlight=False, soft_wrap=True)


def _devices(result: Result) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, padding=(0, 1, 0, 0), pad_edge=False)
    for header, footer in (
        ("\ndevice", f"{result.devices} devices"),
        ("\ndigits", ""),
        ("\nimages", f"{sum(row.images for row in result.per_device):,}"),
        ("\nbytes up", f"{result.bytes_up:,}"),
        *zip(
            ("own digits:\nfleet", "\nalone", "all digits:\nfleet", "\nalone"), _shares(result), strict=True
        ),
    ):
        justify: Literal["left", "right"] = "left" if header in {"\ndevice", "\ndigits"} else "right"
        table.add_column(header, footer, justify=justify, no_wrap=True)
    for row in result.per_device:
        numbers = (f"{number:,}" for number in (row.images, row.bytes_up))
        table.add_row(row.device, " ".join(row.classes), *numbers, *_shares(row))
    return table


def _shares(row: DeviceResult | Result) -> list[str]:
    return [f"{share:.1%}" for share in (row.fleet.own, row.alone.own, row.fleet.all, row.alone.all)]


def _gain(row: DeviceResult) -> str:
    """Return what a device gains from the fleet."""
    fleet, alone = row.fleet, row.alone
    return (
        f" {row.device} has seen two digits and now knows ten: {fleet.all:.1%} ({alone.all:.1%} alone).\n"
        f" On its own two digits it has {fleet.own:.1%} ({alone.own:.1%} alone)."
    )


def _verdict(result: Result) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, share, style in (
        ("head of the fleet", result.fleet.all, "green"),
        ("nearest class mean, pooled images", result.nearest_mean_accuracy, "cyan"),
        ("logistic regression, pooled images", result.logistic_regression_accuracy, "cyan"),
        ("head of one device, of two digits", result.alone.all, "red"),
    ):
        bar = ProgressBar(total=1, completed=share, width=28, complete_style=style, finished_style=style)
        table.add_row(name, bar, f"[bold {style}]{share:.1%}[/]")
    title = f" Accuracy on all ten digits, {result.held_out_images} images that no device has"
    return Group(title, Padding(table, (0, 0, 0, 3)))


_IN_ROUNDS = {
    "fpl": "averaged projections and changes of parameters",
    "hierarchical": "averaged features and directions",
}


def _uploaded(result: Result) -> str:
    size = _kilobytes(result.bytes_up)
    if result.rounds:
        when = f"in each of {result.rounds} rounds" if result.rounds > 1 else "in one round"
        return f"{when}: {size} of {_IN_ROUNDS.get(result.algorithm, 'averaged projections')}"
    return f"in all: {size}"


def _cost(result: Result) -> str:
    """Return what a device sends and uses, mean over the devices."""
    sent = statistics.mean(row.bytes_up for row in result.per_device)
    seconds = statistics.mean(row.cpu_s for row in result.per_device)
    memory = statistics.mean(row.peak_memory_bytes for row in result.per_device)
    used = f"{_kilobytes(sent)} uploaded{' in a round' if result.rounds else ''}, {seconds:.1f} s of CPU time"
    return f"{used}, {memory / 1e6:.0f} MB of memory at its peak" if memory else used


def _kilobytes(size_bytes: float) -> str:
    return f"{size_bytes / 1000:,.1f} kB"


def _short(path: Path) -> str:
    """Return a path as one types it in this folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _program(name: str) -> str:
    """Return how one starts a program of the project in this folder."""
    beside = Path(sys.executable).with_name(name)
    return _short(beside) if beside.is_file() else name
