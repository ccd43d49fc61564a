"""Storms: how all devices of a fleet come back at once, to its broker and its aggregator.

`fleet storm` kills the broker during the uploads of all devices, the aggregator, and the broker again. Devices,
aggregator and mosquitto are those of `fleet size`: a connection, a presence with a will and signatures of every device.
No head is made, so that only messages cost time.

It fails if a submission was lost.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.device.measurement import peak_memory
from benchmarks.fleet.load.observation import online, submitted, usage
from benchmarks.fleet.load.processes import Loads, running_aggregator, running_loads, until
from benchmarks.processes import free_address, running_mosquitto
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ProtofleetError

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
        programs = _Programs(Path(folder), stack, quorum=devices + 1)
        loads = stack.enter_context(
            running_loads(Path(folder), programs.broker, devices, processes=processes)
        )
        runs = _measure(programs, loads, devices, state=Path(folder) / "state", table=table)
    write_json(json_file, "storm", tables=[table], runs=runs)


class _Programs:
    """Broker and aggregator, which can be killed and started again."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, *, quorum: int) -> None:
        self.broker = free_address()
        self._folder = folder
        self._quorum = quorum
        self._of_broker = stack.enter_context(contextlib.ExitStack())
        self._of_aggregator = stack.enter_context(contextlib.ExitStack())
        self._start_broker()
        self._start_aggregator()

    def _start_broker(self) -> None:
        self.mosquitto = self._of_broker.enter_context(running_mosquitto(self._folder, self.broker))

    def _start_aggregator(self) -> None:
        running = running_aggregator(self._folder, self.broker, quorum=self._quorum)
        self.aggregator = self._of_aggregator.enter_context(running)

    def restart_broker(self, loads: Loads) -> None:
        self.mosquitto.kill()
        self._of_broker.close()
        until(lambda: loads.sum("connected") == 0, what="the end of all connections")
        self._start_broker()

    def restart_aggregator(self) -> None:
        self.aggregator.kill()
        self._of_aggregator.close()
        self._start_aggregator()


def _measure(
    programs: _Programs, loads: Loads, devices: int, *, state: Path, table: Table
) -> list[dict[str, Any]]:
    """Return the figures of each storm; one begins before the program is killed, and ends when all are served."""
    runs: list[dict[str, Any]] = []

    def measure(name: str, restart: Callable[[], None], is_over: Callable[[], bool]) -> None:
        began_s, attempts, frames = time.monotonic(), loads.sum("attempts"), loads.sum("frames")
        before = {each.pid: usage(each.pid).cpu_s for each in (programs.aggregator, programs.mosquitto)}
        restart()
        until(is_over, what=f"the devices, after: {name}")
        _require(submitted(state) == devices, "a submission was lost")
        ours, theirs = programs.aggregator.pid, programs.mosquitto.pid
        run = {
            "killed": name,
            "seconds": time.monotonic() - began_s,
            "connections": loads.sum("attempts") - attempts,
            "frames": loads.sum("frames") - frames,
            "aggregator_cpu_s": usage(ours).cpu_s - before.get(ours, 0.0),
            "aggregator_peak_mb": peak_memory(ours) / 1e6,
            "broker_cpu_s": usage(theirs).cpu_s - before.get(theirs, 0.0),
            "broker_peak_mb": peak_memory(theirs) / 1e6,
        }
        table.row(*run.values())
        runs.append(run)

    def during_uploads() -> None:
        loads.begin()
        until(lambda: submitted(state) >= devices // 2, what="half of the submissions")
        programs.restart_broker(loads)

    def are_back() -> bool:
        return loads.sum("connected") == devices == online(state)

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
    measure("broker, at rest", lambda: programs.restart_broker(loads), are_back)
    return runs


def _require(is_true: object, otherwise: str) -> None:
    if not is_true:
        raise ProtofleetError(otherwise)
