"""Submissions a second: `aggregator run`, and one or several `aggregator receive` beside `aggregator coordinate`.

`cost receivers --store postgresql://...` sends the same packets of many devices through the same mosquitto to each
arrangement, in turns. The time is from the first packet until the last receipt. The schema of the fleet `ingest` in the
database is dropped after each run.
"""

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.cost.uploads.databases import deleted, store_option
from benchmarks.cost.uploads.ingest import FLEET, Cost, time_aggregator, write_load, write_task
from benchmarks.device.measurement import median, ratio
from benchmarks.processes import mosquitto
from benchmarks.report import Table, json_option, write_json

SIZE_BYTES = 100_000
"""Of a submission."""

RUN, RUN_HERE = "aggregator run", "aggregator run, SQLite"

COLUMNS = {
    "programs": "<22", "submissions/s": ">13.1f", "CPU ms/submission": ">17.2f", "speed, ratio": ">14.2f",
}  # fmt: skip


@click.command("receivers")
@store_option
@click.option("--devices", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--submissions", type=click.IntRange(min=1), default=8, show_default=True, help="Of each device."
)
@click.option("--receivers", type=click.IntRange(min=1), multiple=True, default=(1, 2), show_default=True)
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@json_option
def command(
    *,
    database: str,
    devices: int,
    submissions: int,
    receivers: tuple[int, ...],
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Compare receivers with a single aggregator, on PostgreSQL."""
    several = {f"{count} receiver{'s' if count > 1 else ''}": count for count in receivers}
    arrangements = {RUN_HERE: 0, RUN: 0, **several}
    runs: dict[str, list[Cost]] = {name: [] for name in arrangements}
    with tempfile.TemporaryDirectory() as name, mosquitto(Path(name)) as broker:
        folder = Path(name)
        task, state = write_task(folder), folder / "state"
        load = write_load(folder, task, devices=devices, submissions=submissions, size_bytes=SIZE_BYTES)
        for number in range(repetitions + 1):
            for each, count in arrangements.items():
                options = () if each == RUN_HERE else ("--store", database)
                with deleted(database, FLEET):
                    cost = time_aggregator(broker, load, task, state, *options, receivers=count)
                shutil.rmtree(state)
                if number:  # the first runs fill caches
                    runs[each].append(cost)
    table = Table(COLUMNS, title=f"Submissions of {SIZE_BYTES // 1000} kB from {devices} devices")
    for name, costs in runs.items():
        speed, count = ratio(runs[RUN], costs, "wall_s"), costs[0].submissions
        table.row(name, count / median(costs, "wall_s"), 1000 * median(costs, "receiver_s") / count, speed)
    every = {name: [asdict(run) for run in each] for name, each in runs.items()}
    write_json(json_file, "receivers", tables=[table], runs=every)
