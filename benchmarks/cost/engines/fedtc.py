"""`python -m benchmarks engines-fedtc`: whole jobs of FedTC in one process, and with workers of a Ray cluster."""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgspec
import numpy as np
import onnxruntime
from numpy.typing import NDArray

from aggregator.training.jobs import HeadJob
from benchmarks.cost.engines.jobs import head_job
from benchmarks.cost.engines.processes import JobCost, environment, machines, run_job
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json

SIZES = (10_000, 100_000, 1_000_000)
LOCAL = "local"
COLUMNS = {
    "prototypes": ">11,", "engine": ">16", "seconds": ">9.1f", "CPU s": ">8.1f", "peak MB": ">9.0f",
    "without files, MB": ">19.0f", "seconds, times local": ">22.2f", "difference": ">12.1e",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One job."""

    prototypes: int
    engine: str
    cost: JobCost
    difference: float
    """Greatest difference of the probabilities from those of the local head."""


@click.command("engines-fedtc")
@repeated("--prototypes", type=click.IntRange(min=1000), default=SIZES)
@click.option("--features", type=click.IntRange(2, 4096), default=128, show_default=True)
@click.option("--epochs", type=click.IntRange(min=1), default=1, show_default=True, help="Of the adapter.")
@repeated("--workers", type=click.IntRange(min=0), default=(1, 2), help="On Ray; 0 for none.")
@click.option(
    "--resume",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File that --json wrote earlier: its runs are not repeated.",
)
@json_option
def command(
    *,
    prototypes: tuple[int, ...],
    features: int,
    epochs: int,
    workers: tuple[int, ...],
    resume: Path | None,
    json_file: Path | None,
) -> None:
    """Measure the job of FedTC with each engine, of growing numbers of prototypes."""
    stored = json.loads(resume.read_text(encoding="utf-8"))["runs"] if resume else []
    runs = msgspec.convert(stored, list[Run])
    for number in prototypes:
        if number not in {run.prototypes for run in runs}:
            runs += _measured(number, features, epochs, workers)
    runs.sort(key=lambda run: run.prototypes)
    table = Table(COLUMNS)
    for run in runs:
        local = next(each.cost for each in runs if (each.prototypes, each.engine) == (run.prototypes, LOCAL))
        table.row(
            run.prototypes,
            run.engine,
            run.cost.wall_s,
            run.cost.cpu_s,
            run.cost.memory_bytes / 1e6,
            run.cost.program_bytes / 1e6,
            run.cost.wall_s / local.wall_s,
            run.difference,
        )
    write_json(
        json_file,
        "engines-fedtc",
        tables=[table],
        features=features,
        epochs=epochs,
        runs=[asdict(run) for run in runs],
    )


def _measured(prototypes: int, features: int, epochs: int, workers: tuple[int, ...]) -> list[Run]:
    with tempfile.TemporaryDirectory() as folder:
        job = head_job(Path(folder), prototypes, features, epochs=epochs)
        runs = [Run(prototypes, LOCAL, run_job(job), 0.0)]
        expected = _probabilities(job)
        on_ray = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, engine="ray"))
        for number in filter(None, workers):
            with machines(number) as address, environment(RAY_ADDRESS=address):
                cost = run_job(on_ray)
            difference = float(np.abs(_probabilities(job) - expected).max())
            runs.append(Run(prototypes, f"ray, {number} worker{'s' * (number > 1)}", cost, difference))
    return runs


def _probabilities(job: HeadJob) -> NDArray[np.float32]:
    """Return the head's answers for random features."""
    session = onnxruntime.InferenceSession(Path(job.folder) / "head.onnx")
    features = np.random.default_rng(1).normal(size=(1000, job.feature_size)).astype(np.float32)
    (found,) = session.run(["probabilities"], {"feature": features})
    return np.asarray(found)
