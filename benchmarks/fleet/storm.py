"""Storms: how all devices of a fleet come back at once, to its broker and its aggregator.

`fleet storm` kills the broker during the uploads of all devices, the aggregator, and the broker again. Devices,
aggregator and mosquitto are those of `fleet size`: a connection, a presence with a will and signatures of every device.
No head is made, so that only messages cost time.

It fails if a submission was lost.
"""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.fleet.load.programs import Programs, require, until
from benchmarks.report import Table, json_option, write_json

COLUMNS = {
    "killed": "<32", "seconds": ">9.1f", "connections": ">13,", "frames": ">9,", "aggregator CPU s": ">18.2f",
    "peak MB": ">9.0f", "broker CPU s": ">14.2f", "broker peak MB": ">16.0f",
}  # fmt: skip


@click.command("storm")
@click.option("--devices", type=click.IntRange(min=2), default=3000, show_default=True)
@click.option(
    "--processes", type=click.IntRange(min=1), default=2, show_default=True, help="That simulate devices."
)
@json_option
def command(*, devices: int, processes: int, json_file: Path | None) -> None:
    """Measure how all devices return after `kill -9` of the broker and of the aggregator."""
    table = Table(COLUMNS)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        programs = Programs(Path(folder), stack, devices, processes=processes, quorum=devices + 1)
        runs = _measure(programs, devices, table)
    write_json(json_file, "storm", tables=[table], runs=runs)


def _measure(programs: Programs, devices: int, table: Table) -> list[dict[str, Any]]:
    """Return the figures of each storm; one begins before the program is killed, and ends when all are served."""
    runs: list[dict[str, Any]] = []
    loads = programs.loads

    def measure(name: str, restart: Callable[[], None], is_over: Callable[[], bool]) -> None:
        with programs.measured() as costs:
            restart()
            until(is_over, what=f"the devices, after: {name}")
        require(programs.submitted() == devices, "a submission was lost")
        runs.append({"killed": name, **costs})
        table.row(
            *(name, costs["seconds"], costs["attempts"], costs["frames"]),
            *(costs["aggregator_cpu_s"], costs["aggregator_peak_bytes"] / 1e6),
            *(costs["broker_cpu_s"], costs["broker_peak_bytes"] / 1e6),
        )

    def during_uploads() -> None:
        loads.begin()
        until(lambda: programs.submitted() >= devices // 2, what="half of the submissions")
        programs.restart_broker()

    def are_back() -> bool:
        return loads.sum("connected") == devices == programs.online()

    measure(
        "broker, during the uploads", during_uploads, lambda: are_back() and loads.sum("received") == devices
    )
    receipts, frames = loads.sum("receipts"), loads.sum("frames")
    measure(
        "aggregator",
        programs.restart_aggregator,
        lambda: (
            are_back()
            and loads.sum("receipts") >= receipts + devices  # of which some may be late ones
            and loads.sum("frames") >= frames + devices
        ),
    )
    measure("broker, at rest", programs.restart_broker, are_back)
    return runs
