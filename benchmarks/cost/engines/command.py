"""`python -m benchmarks cost engines`: whole jobs in one process, and on a Ray of this machine."""

import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

import click
import msgspec

from benchmarks.cost.engines.jobs import statistics_job
from benchmarks.cost.engines.processes import JobCost, run_job
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ProtofleetError

SIZES = (1_000, 10_000, 100_000)
ENGINES = ("local", "ray")


@click.command("engines")
@repeated("--devices", type=click.IntRange(min=1), default=SIZES)
@click.option("--features", type=click.IntRange(2, 4096), default=64, show_default=True)
@click.option("--turns", type=click.IntRange(min=1), default=1, show_default=True)
@json_option
def command(*, devices: tuple[int, ...], features: int, turns: int, json_file: Path | None) -> None:
    """Measure the job that makes a head of sums with each engine, in turns, of fleets of growing size."""
    table = Table(
        {"devices": ">9,", "engine": ">8", "seconds": ">9.1f", "CPU s": ">8.1f", "peak MB": ">9.0f"}
        | {"seconds, times local": ">22.2f", "memory, times local": ">21.2f"}
    )
    runs = []
    for number in sorted(devices):
        with tempfile.TemporaryDirectory() as folder:
            job = statistics_job(Path(folder), number, features)
            costs: dict[str, list[JobCost]] = {engine: [] for engine in ENGINES}
            for _ in range(turns):
                for engine, found in costs.items():
                    found.append(run_job(msgspec.structs.replace(job, engine=engine)))
        heads = {cost.head for found in costs.values() for cost in found}
        if len(heads) > 1:
            raise ProtofleetError("the engines make different heads")
        medians = {engine: _median(found) for engine, found in costs.items()}
        for engine, (seconds, cpu_s, peak) in medians.items():
            local_s, _, local_peak = medians["local"]
            table.row(number, engine, seconds, cpu_s, peak / 1e6, seconds / local_s, peak / local_peak)
        runs.append({"devices": number, **{name: [asdict(one) for one in c] for name, c in costs.items()}})
    write_json(json_file, "engines", tables=[table], features=features, runs=runs)


def _median(costs: list[JobCost]) -> tuple[float, float, float]:
    return (
        statistics.median(cost.wall_s for cost in costs),
        statistics.median(cost.cpu_s for cost in costs),
        statistics.median(cost.memory_bytes for cost in costs),
    )
