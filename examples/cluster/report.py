"""Output of the example: the state of each program while it runs, and the result."""

from typing import Literal

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protocol.cli import counted

COLOURS = {
    "running": "green",
    "leading": "bold green",
    "standby": "cyan",
    "training": "bold green",
    "starting": "yellow",
}


def _colour(state: str) -> str:
    return "green" if state.endswith(" shards") else COLOURS.get(state, "bold red")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A killed or paused program, and how the fleet went on."""

    program: str
    action: str
    """`killed` (SIGKILL) or `paused` (SIGSTOP)."""
    at_s: float
    """Seconds after the start of the first device."""
    waiting: int
    """Devices that had started and whose submission was not acknowledged."""
    next_s: float
    """Seconds until the next submission was acknowledged; for a trainer, until the first device used the head."""
    all_s: float
    """Seconds until all of them were; for a trainer, until all devices used the head."""
    leads_s: float | None
    """For a coordinator: seconds until the other one led."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result, as `--json` writes it."""

    is_same: bool
    """The same head as that of one process, with each submission in it once."""
    head: str
    """sha256 of head.onnx of the cluster."""
    single_head: str
    """The same of one process."""
    devices: int
    submissions: int
    """Submissions in the cluster's head."""
    lost: tuple[str, ...]
    """Devices whose acknowledged submission is not in the head."""
    counted_twice: tuple[str, ...]
    """Devices whose submission was accepted more than once."""
    broker: str
    faults: tuple[Fault, ...]
    seconds: float


def progress(
    programs: dict[str, dict[str, str]], *, devices: int, started: int, submitted: int, with_head: int
) -> RenderableType:
    """Return the state of all programs, for a terminal: for each role, the state of each program."""
    table = Table(box=None, padding=(0, 2, 0, 1), show_header=False)
    for role, states in programs.items():
        cells = [Text.assemble((f"{name} ", ""), (state, _colour(state))) for name, state in states.items()]
        table.add_row(Text(role, style="dim"), Text("   ").join(cells))
    for what, number in (
        ("started", started),
        ("submission accepted", submitted),
        ("head in use", with_head),
    ):
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=devices, completed=number, width=28), f"{number}/{devices} {what}")
        table.add_row(Text("devices" if what == "started" else "", style="dim"), grid)
    return Group("", table)


def show(result: Result, console: Console) -> None:
    """Print what was done to the programs, and the result."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("at", "program", "", "waiting", "next after", "all after", "new leader"):
        justify: Literal["left", "right"] = "left" if header in {"program", ""} else "right"
        table.add_column(header, justify=justify, no_wrap=True)
    for fault in result.faults:
        table.add_row(
            f"{fault.at_s:.0f} s",
            *(fault.program, fault.action, str(fault.waiting)),
            *(f"{fault.next_s:.1f} s", f"{fault.all_s:.1f} s"),
            "" if fault.leads_s is None else f"{fault.leads_s:.1f} s",
        )
    console.print(table)
    lines = [f"{result.submissions} of {counted(result.devices, 'submission')} in the cluster's head"]
    lines += [f"[red]LOST[/]: {name}" for name in result.lost]
    lines += [f"[red]COUNTED TWICE[/]: {name}" for name in result.counted_twice]
    lines += [
        f"head.onnx of the cluster      {result.head}",
        f"head.onnx of a single process {result.single_head}",
    ]
    lines += ["[bold green]SAME HEAD[/]" if result.head == result.single_head else "[bold red]OTHER HEAD[/]"]
    for line in lines:
        console.print(f" {line}", highlight=False, soft_wrap=True)
