"""`python -m research blocks`: principal prototypes against means of batches, by accuracy and bytes."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from benchmarks.data.features import load_features
from benchmarks.fleets import Settings, run_fleet
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import parse_partition

COLUMNS = {"data": "<14", "layers": "<15", "images": ">8,", "devices": ">8", "partition": "<14"}
COLUMNS |= {"batches": ">14", "MB": ">7.2f", "auto": ">14", "MB auto": ">8.2f", "ECE auto": ">9.1%"}


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A simulated fleet."""

    data: str = "fashion_mnist"
    layers: str = "c384,c576"
    image_size: int = 96
    at_most: int | None = 6000
    """Images of the training part whose features are extracted; None for all."""
    images: int | None = None
    """Images of all devices, others with each seed; None for all that were extracted."""
    devices: int = 10
    partition: str = "dirichlet:0.1"


KINDS: tuple[Literal["batches", "auto"], ...] = ("batches", "auto")

PHOTOGRAPHS = Fleet(data="pacs", layers="c576,c960", image_size=224, at_most=None)

FLEETS = {
    "bars": (
        *(Fleet(data=data) for data in ("fashion_mnist", "cifar10")),
        *(Fleet(data=data, images=1000) for data in ("fashion_mnist", "cifar10")),
        *(PHOTOGRAPHS, Fleet(devices=100)),
    ),
    "layers": (
        *(Fleet(data=data, layers="last,residual") for data in ("fashion_mnist", "cifar10")),
        replace(PHOTOGRAPHS, layers="last,residual"),
    ),
    "even": (
        *(Fleet(data=data, partition="dirichlet:100") for data in ("fashion_mnist", "cifar10")),
        replace(PHOTOGRAPHS, partition="dirichlet:100"),
    ),
    "large": (Fleet(at_most=None),),
}


@click.command("blocks")
@repeated(
    "--fleets",
    "names",
    type=click.Choice(list(FLEETS)),
    default=("bars", "layers", "even"),
    help="May be repeated; `large` has 60,000 images.",
)
@click.option("--backbone", default="mobilenetv2_100", show_default=True)
@repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="May be repeated.")
@click.option("--max-multiple", type=click.FloatRange(min=0), default=0, show_default=True)
@json_option
def command(
    *,
    names: tuple[str, ...],
    backbone: str,
    seeds: tuple[int, ...],
    max_multiple: float,
    json_file: Path | None,
) -> None:
    """Compare FedTC's uploads: principal prototypes where there are enough images, and batches alone.

    The bytes are those of all devices' encoded submissions. Accuracies are in percent, ± the standard error over seeds.
    """
    table = Table(COLUMNS, title=f"FedTC, {backbone}, {len(seeds)} seeds")
    runs = []
    for fleet in (each for name in names for each in FLEETS[name]):
        features = load_features(
            fleet.data,
            backbone=":".join(filter(None, (backbone, fleet.layers))),
            image_size=fleet.image_size,
            at_most=fleet.at_most,
        )
        settings = Settings(clients=fleet.devices, max_multiple=max_multiple)
        found: dict[str, list[dict[str, Any]]] = {
            kind: list(_runs(features, fleet, replace(settings, prototypes=kind), seeds)) for kind in KINDS
        }
        runs.append({**asdict(fleet), **found})
        cells = [
            (_mean([run["accuracy"] for run in each]), np.mean([run["bytes_up"] for run in each]) / 1e6)
            for each in found.values()
        ]
        images = fleet.images or len(features.train)
        error = float(np.mean([run["calibration_error"] for run in found["auto"]]))
        table.row(
            *(fleet.data, fleet.layers, images, fleet.devices, fleet.partition), *cells[0], *cells[1], error
        )
    write_json(json_file, "blocks", tables=[table], backbone=backbone, seeds=seeds, runs=runs)


def _runs(
    features: Features, fleet: Fleet, settings: Settings, seeds: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        drawn = features if fleet.images is None else _drawn(features, fleet.images, seed)
        yield asdict(run_fleet(drawn, parse_partition(fleet.partition), settings, seed=seed))


def _drawn(features: Features, images: int, seed: int) -> Features:
    """Return features with so many random ones for training."""
    rows = np.random.default_rng(seed).permutation(len(features.train))[:images]
    return replace(features, train=features.train[rows], train_labels=features.train_labels[rows])


def _mean(accuracies: list[float]) -> str:
    """Return the mean in percent and its standard error."""
    values = 100 * np.array(accuracies)
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{values.mean():.1f} ± {error:.1f}"
