"""`python -m benchmarks growth`: what a million devices would take, calculated from the results of other benchmarks."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from scipy.optimize import nnls

from aggregator.training.robust.limited_means import explained
from aggregator.training.robust.outlier_statistics import ClassMeans
from benchmarks.cost.engines.jobs import DEVICE_PROTOTYPES
from benchmarks.cost.sums import CLASSES
from benchmarks.pages import ROOT, read_results
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ConfigError

DEVICES = 1_000_000
COMPARED = (4_000, 8_000)
"""Devices of a class whose comparison in pairs is measured."""

FAR_SHARE = 0.14
"""Share of honest devices that are far enough from the median of a class to be compared with all others."""

COMPARED_FEATURES = 128


@dataclass(frozen=True)
class Model:
    """A cost of n devices, `fixed + each * n`, fitted to measurements by least squares of their relative errors."""

    what: str
    unit: str
    fixed: float
    each: float
    largest: int
    """The largest n that was measured."""
    points: int
    residual: float
    """The greatest relative difference of a measurement from the model."""

    def at(self, number: int) -> float:
        """Return the cost of so many devices."""
        return self.fixed + self.each * number


def fitted(what: str, unit: str, points: Mapping[int, float]) -> Model:
    """Fit a model whose parts are not negative."""
    numbers, costs = np.array(list(points), np.float64), np.array(list(points.values()))
    (fixed, each), _ = nnls(np.stack([1 / costs, numbers / costs], axis=1), np.ones(len(costs)))
    residual = np.abs((fixed + each * numbers) / costs - 1).max()
    return Model(what, unit, float(fixed), float(each), int(numbers.max()), len(costs), float(residual))


def models_of(results: Mapping[str, Mapping[str, Any]]) -> list[Model]:
    """Return the models of stored results; raises ConfigError if some are missing."""
    names = ("engines", "engines-fedtc", "fleet")
    if missing := [name for name in names if name not in results]:
        raise ConfigError(f"no results of {', '.join(missing)}: run the benchmark with --json")
    sums, heads, fleets = (results[name]["runs"] for name in names)

    def median(costs: Sequence[Mapping[str, float]], name: str) -> float:
        return float(np.median([cost[name] for cost in costs]))

    models = [
        fitted("uploads, one receiver", "s", {run["devices"]: run["upload_s"] for run in fleets}),
        fitted("uploads, its processor", "CPU s", {run["devices"]: run["cpu_s"] for run in fleets}),
        fitted("uploads, its memory", "MB", {run["devices"]: run["peak_bytes"] / 1e6 for run in fleets}),
    ]
    for engine in ("local", "ray"):
        points = {run["devices"]: run[engine] for run in sums}
        models += [
            fitted(f"statistics, {engine}", "s", {n: median(each, "wall_s") for n, each in points.items()}),
            fitted(
                f"statistics, {engine}, memory",
                "MB",
                {n: median(each, "memory_bytes") / 1e6 for n, each in points.items()},
            ),
        ]
    times = Counter(run["engine"] for run in heads)
    for engine in (engine for engine, number in times.items() if number > 1):  # a line has two points
        # Not the memory: from 128 MiB on, arrays are in files.
        points = {
            run["prototypes"] // DEVICE_PROTOTYPES: run["cost"]["cpu_s"]
            for run in heads
            if run["engine"] == engine
        }
        models.append(fitted(f"fedtc, {engine}", "CPU s", points))
    return models


def _pair_s() -> dict[int, float]:
    """Return the seconds of a processor that a pair of devices takes of one class, for each number of devices."""
    found = {}
    for number in COMPARED:
        means = np.random.default_rng(0).normal(size=(number, COMPARED_FEATURES))
        ones = np.ones(number)
        one = ClassMeans(tuple(map(str, range(number))), means, ones, ones, ones, np.median(means, axis=0))
        started_s = time.process_time()
        explained(one, np.arange(number // 4), 0, {})
        found[number] = (time.process_time() - started_s) / (number // 4 * number)
    return found


@click.command("growth")
@click.option(
    "--results",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=ROOT / "benchmarks" / "results",
    help="Folder of JSON files.  [default: benchmarks/results]",
)
@json_option
def command(*, results: Path, json_file: Path | None) -> None:
    """Calculate what a million devices would take, from the stored results of engines, engines-fedtc and fleet."""
    models, pair_s = models_of(read_results(results)), _pair_s()
    fits = Table(
        {"cost of n devices": "<48", "unit": "<6", "fixed": ">10.4g", "for each": ">12.4g"}
        | {"measured up to n": ">16,", "points": ">7", "greatest residual": ">18.1%"},
        title="Fitted",
    )
    for model in models:
        fits.row(
            *(getattr(model, name) for name in ("what", "unit", "fixed", "each", "largest")),
            str(model.points),
            model.residual,
        )
    sizes = (DEVICES // 100, DEVICES // 10, DEVICES)
    table = Table(
        {"devices": "<48", "unit": "<6", **{f"{number:,}": ">12,.0f" for number in sizes}}, title="Calculated"
    )
    for model in models:
        table.row(model.what, model.unit, *(model.at(number) for number in sizes))
    each_s = float(np.mean(list(pair_s.values())))
    table.row(
        "fedtc, far devices compared in pairs",
        "CPU s",
        *(CLASSES * FAR_SHARE * number**2 * each_s for number in sizes),
    )
    write_json(
        json_file,
        "growth",
        tables=[fits, table],
        models=[asdict(model) for model in models],
        pair_s=pair_s,
    )
