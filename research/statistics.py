"""`python -m research statistics`: heads in closed form from sums, beside FedTC's head and linear discriminant."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import click
import numpy as np

from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.config.schema import Robust
from benchmarks import fleets
from benchmarks.accuracy.fedtc import fleet_options
from benchmarks.data.features import load_features, prepared
from benchmarks.fleets import ALL_FEATURES
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, share_out
from protofleet.simulation.statistics import Result, map_features, run_fleet

COLUMNS = {
    "method": "<32", "partition": "<16", "seed": ">6", "top-1": ">8.2%", "ECE": ">7.1%", "devices": ">9",
    "rows": ">9,", "MB a device": ">13.2f", "seconds": ">9.1f",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """One head."""

    method: str
    partition: str
    """ALL_FEATURES for a ceiling. `benchmarks fedtc` has FedTC's."""
    seed: int
    accuracy: float
    calibration_error: float
    seconds: float
    """The time to make the head."""
    devices: int | None = None
    rows: int | None = None
    """That devices sent: images in sums, groups of images, or prototypes."""
    bytes_up: int | None = None
    """Bytes of all submissions."""


@dataclass(frozen=True)
class Fleet:
    """The settings that all runs share."""

    features: Features
    partitions: Sequence[Partition]
    clients: int
    max_multiple: float
    ceiling: bool


@click.command("statistics")
@fleet_options
@repeated(
    "--features", "sizes", type=click.IntRange(0, 4096), default=(0, 1024),
    help="Random features beside the backbone's; may be repeated.",
)  # fmt: skip
@repeated(
    "--batch", "batches", type=click.IntRange(min=1), default=(1, 5),
    help="Images in a group, 1 for sums of single images; may be repeated. FedTC has 5.",
)  # fmt: skip
@repeated(
    "--seed",
    "seeds",
    type=int,
    default=(0,),
    help="Of the partition and the random features; may be repeated.",
)
@click.option(
    "--ceiling/--no-ceiling",
    default=True,
    show_default=True,
    help="Solve for heads of all features, too.",
)
@json_option
def command(
    *,
    data: str,
    backbone: str,
    image_size: int,
    root: bool,
    validation: bool,
    partitions: list[Partition],
    clients: int,
    sizes: tuple[int, ...],
    batches: tuple[int, ...],
    max_multiple: float,
    seeds: tuple[int, ...],
    ceiling: bool,
    json_file: Path | None,
) -> None:
    """Solve for a fleet's head from sums, and train FedTC's on its prototypes; report accuracy and cost."""
    loaded = load_features(data, backbone=backbone, image_size=image_size)
    fleet = Fleet(
        features=prepared(loaded, root=root, validation=validation),
        partitions=partitions,
        clients=clients,
        max_multiple=max_multiple,
        ceiling=ceiling,
    )
    table = Table(COLUMNS, title=f"{data}, {backbone} at {image_size}x{image_size}, {clients} clients")
    runs = []
    for seed in seeds:
        for run in chain(_statistics(fleet, seed, sizes=sizes, batches=batches), _fedtc(fleet, seed)):
            runs.append(run)
            table.row(*_cells([run], seed))
    means = {(run.method, run.partition): list[Run]() for run in runs}
    for run in runs:
        means[run.method, run.partition].append(run)
    if len(seeds) > 1:
        for each in means.values():
            table.row(*_cells(each, "mean"))
    write_json(
        json_file,
        "statistics",
        tables=[table],
        data=data,
        backbone=backbone,
        image_size=image_size,
        root=root,
        validation=validation,
        clients=clients,
        max_multiple=max_multiple,
        runs=[asdict(run) for run in runs],
        accuracy=[
            {"method": method, "partition": partition, "mean": float(np.mean([run.accuracy for run in each]))}
            for (method, partition), each in means.items()
        ],
    )


def _statistics(fleet: Fleet, seed: int, *, sizes: Sequence[int], batches: Sequence[int]) -> Iterator[Run]:
    robust = Robust(detect_outliers=False, max_multiple=fleet.max_multiple)
    for size in sizes:
        data = map_features(fleet.features, random_features=size, seed=seed)
        name = f"statistics, {f'+ {size:,}' if size else 'identity'}"
        for partition in fleet.partitions:
            rng = np.random.default_rng(seed)
            owners = share_out(fleet.features.train_labels, partition, clients=fleet.clients, rng=rng)
            for batch in batches:
                result = run_fleet(data, owners, batch_size=batch, seed=seed, robust=robust)
                yield _run(f"{name}, B {batch}", str(partition), seed, result, fleet)
        if fleet.ceiling:
            yield _run(
                name,
                ALL_FEATURES,
                seed,
                run_fleet(data, np.zeros(len(data.rows), np.int64), batch_size=1, seed=0),
                fleet,
            )


def _run(method: str, partition: str, seed: int, result: Result, fleet: Fleet) -> Run:
    is_ceiling = partition == ALL_FEATURES
    return Run(
        method=method,
        partition=partition,
        seed=seed,
        accuracy=result.accuracy,
        calibration_error=fleets.calibration_error(result.logits, fleet.features.test_labels),
        seconds=result.solve_seconds,
        devices=None if is_ceiling else result.devices,
        rows=result.rows,
        bytes_up=None if is_ceiling else result.bytes_up,
    )


def _fedtc(fleet: Fleet, seed: int) -> Iterator[Run]:
    """Yield FedTC's head, and the linear discriminant that it chooses from, of the same prototypes."""
    default = fleets.Settings(
        clients=fleet.clients,
        alpha=0.99,
        batch_size=5,
        prototypes="batches",
        max_multiple=fleet.max_multiple,
        recipe=RECIPES["default"],
        device="cpu",
    )
    linear = replace(default, recipe=replace(default.recipe, adapter=False))
    for method, settings in {"FedTC, B 5": default, "LDA of FedTC's prototypes, B 5": linear}.items():
        for partition in fleet.partitions:
            made = fleets.run_fleet(fleet.features, partition, settings, seed=seed)
            yield Run(
                method=method,
                partition=str(partition),
                seed=seed,
                accuracy=made.accuracy,
                calibration_error=made.calibration_error,
                seconds=made.train_seconds,
                devices=made.devices,
                rows=made.prototypes,
                bytes_up=made.bytes_up,
            )


def _cells(runs: Sequence[Run], seed: int | str) -> tuple[object, ...]:
    """Return a row of the table: means over runs of one method."""
    first = runs[0]
    accuracy, error, seconds = (
        float(np.mean([getattr(run, name) for run in runs]))
        for name in ("accuracy", "calibration_error", "seconds")
    )
    sent = [run.bytes_up / run.devices / 1e6 for run in runs if run.bytes_up and run.devices]
    megabytes = float(np.mean(sent)) if sent else None
    return first.method, first.partition, seed, accuracy, error, first.devices, first.rows, megabytes, seconds
