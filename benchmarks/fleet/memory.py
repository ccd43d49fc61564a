"""Memory of all programs of `aggregator run` at rest: supervisor, `serve`, `http` and the embedded broker.

The proportional set size (PSS, from `/proc/PID/smaps_rollup`) counts a page that processes share once in their sum.
`fleet memory --before FOLDER` compares an earlier checkout, with the same libraries.
"""

import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import click
import psutil

from benchmarks.fleet.load.programs import BACKBONE, START_TIMEOUT_S, until
from benchmarks.processes import ROOT, free_address, running_program, wait_for_log
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ProtofleetError

OURS, BEFORE = "aggregator", "aggregator before"
PROGRAMS: Mapping[str, str] = {
    "serve": "aggregator.server.program",
    "http": "aggregator.http",
    "embedded broker": "aggregator.messaging.broker_program",
}
"""The module of each program in its command line; the others are the supervisor."""

SUPERVISOR = "supervisor"
ALL = "all"


@click.command("memory")
@click.option(
    "--before",
    type=click.Path(file_okay=False, path_type=Path),
    help="Another checkout, whose aggregator is compared.",
)
@click.option("--rest", "rest_s", type=click.FloatRange(min=0), default=10.0, show_default=True)
@click.option("--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
@json_option
def command(*, before: Path | None, rest_s: float, repetitions: int, json_file: Path | None) -> None:
    """Measure the memory of the aggregator's programs at rest, once each has answered a request."""
    checkouts = {OURS: ROOT} | ({BEFORE: before.resolve()} if before else {})
    runs: dict[str, list[dict[str, int]]] = {name: [] for name in checkouts}
    for _ in range(repetitions):
        for name, checkout in checkouts.items():
            runs[name].append(measure(checkout, rest_s=rest_s))
    table = Table({"program": "<20", **{f"{name}, MB": f">{len(name) + 6}.1f" for name in checkouts}})
    for program in (*PROGRAMS, SUPERVISOR, ALL):
        medians = [statistics.median(each.get(program, 0) for each in runs[name]) for name in checkouts]
        table.row(program, *(size / 1e6 for size in medians))
    write_json(json_file, "memory", tables=[table], runs=runs)


def measure(checkout: Path, *, rest_s: float) -> dict[str, int]:
    """Return the bytes of each program of a checkout's aggregator, and of all."""
    with tempfile.TemporaryDirectory() as name:
        task, log, broker, http = (
            Path(name, "task.toml"),
            Path(name, "log"),
            free_address(),
            free_address(),
        )
        task.write_text(f'classes = ["a", "b", "c"]\nbackbones = ["{BACKBONE}"]\nquorum = 10\n')
        where = (
            "--task",
            str(task),
            "--state",
            f"{name}/state",
            "--broker",
            str(broker),
            "--http",
            str(http),
        )
        program = [sys.executable, "-P", "-m", "aggregator.cli", "run", "--embedded-broker", *where]
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            "PYTHONSAFEPATH": "1",  # children import nothing from the working directory
        }
        with running_program(program, log=log, environment=environment) as process:
            # A connection to a port of this range on which nothing listens yet may be one to itself.
            wait_for_log(log, "connected to the broker", timeout_s=START_TIMEOUT_S)
            until(lambda: _answers(f"http://{http}/readyz"), what="the aggregator")
            if not _answers(f"http://{http}/api/v1/status"):
                raise ProtofleetError("the aggregator has no status")
            time.sleep(rest_s)
            return _sizes(process.pid)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=START_TIMEOUT_S):  # noqa: S310 - of this module
            return True
    except OSError:
        return False


def _sizes(pid: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    supervisor = psutil.Process(pid)
    for each in (supervisor, *supervisor.children(recursive=True)):
        words = each.cmdline()
        name = next((name for name, module in PROGRAMS.items() if module in words), SUPERVISOR)
        sizes[name] = sizes.get(name, 0) + proportional_bytes(each.pid)
    return sizes | {ALL: sum(sizes.values())}


def proportional_bytes(pid: int) -> int:
    """Return a process's memory, in which a page that several share counts for each in part; Linux only."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(rollup.split("\nPss:")[1].split()[0]) * 1024
