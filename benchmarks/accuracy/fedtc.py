"""`python -m benchmarks accuracy fedtc`: FedTC on public data under the partitions of the paper."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, get_args

import click
import numpy as np

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedtc.recipe import recipe_of
from aggregator.coordination.bounds import MAX_MULTIPLE
from benchmarks.data.features import BackboneType, Precision, load_features, prepared
from benchmarks.data.images import NAMES
from benchmarks.fleets import Result, Settings, run_ceiling, train_fleet
from benchmarks.options import Option, repeated
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ConfigError
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, parse_partition

COLUMNS = {
    "partition": "<24",
    "seed": ">6",
    "top-1": ">8.2%",
    "ECE": ">7.1%",
    "devices": ">9",
    "prototypes": ">12,",
    "MB up": ">9.2f",
    "head kB": ">9,.0f",
    "train s": ">9.1f",
}

PARTITIONS = ("sharding:1", "sharding:2", "sharding:3", "dirichlet:0.01", "dirichlet:0.1", "dirichlet:0.5")


def _partitions_of(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> list[Partition]:
    try:
        return [parse_partition(value) for value in values]
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def partitions_option(*default: str) -> Option:
    """Return the option of how images are shared out over clients."""
    return repeated(
        "--partition",
        "partitions",
        default=default,
        callback=_partitions_of,
        help="sharding:CLASSES_PER_CLIENT or dirichlet:CONCENTRATION; may be repeated.",
    )


def fleet_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of data, backbone and fleet."""
    options = (
        click.option(
            "--data", type=click.Choice([*NAMES, "pacs"]), default="fashion_mnist", show_default=True
        ),
        click.option("--backbone", type=BackboneType(), default="mobilenetv2_100", show_default=True),
        click.option("--image-size", type=click.IntRange(min=32), default=96, show_default=True),
        click.option("--root", is_flag=True, help="Take the square root of features."),
        click.option(
            "--validation",
            is_flag=True,
            help="Evaluate on 10,000 training images that no device has, instead of the test images.",
        ),
        partitions_option(*PARTITIONS),
        click.option("--clients", type=click.IntRange(min=1), default=10, show_default=True),
        click.option(
            "--max-multiple",
            type=click.FloatRange(min=0),
            default=MAX_MULTIPLE,
            show_default=True,
            help="Times the median device's images that a device's count at most; 0 is without limit.",
        ),
    )
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


@click.command("fedtc")
@fleet_options
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default="float32",
    show_default=True,
    help="Of the backbone; int8 is calibrated on 200 training images.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), default=5, show_default=True, help="Images in a prototype."
)
@click.option(
    "--prototypes",
    type=click.Choice(["auto", "batches"]),
    default="auto",
    show_default=True,
    help="As `[client] prototypes` in the task file.",
)
@click.option("--recipe", type=click.Choice(["default", "paper"]), default="default", show_default=True)
@click.option(
    "--restore/--no-restore",
    default=None,
    help="Restore the variance of the prototypes, or not.  [default: the recipe's]",
)
@click.option(
    "--images",
    type=click.IntRange(min=1),
    help="Give the devices so many images of each class, others with each seed.  [default: all]",
)
@click.option("--epochs", type=click.IntRange(min=1), help="Of the training.  [default: the recipe's]")
@repeated("--seed", "seeds", type=int, default=(0,), help="May be repeated.")
@click.option(
    "--ceiling/--no-ceiling", default=True, show_default=True, help="Train on all features in one place, too."
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
    precision: Precision,
    batch: int,
    prototypes: Literal["auto", "batches"],
    recipe: Literal["default", "paper"],
    restore: bool | None,
    max_multiple: float,
    images: int | None,
    epochs: int | None,
    seeds: tuple[int, ...],
    ceiling: bool,
    json_file: Path | None,
) -> None:
    """Train a fleet's head with FedTC; report its accuracy and its cost."""
    settings = Settings(
        clients=clients,
        batch_size=batch,
        prototypes=prototypes,
        max_multiple=max_multiple,
        recipe=recipe_of(Training(recipe=recipe, restore=restore, epochs=epochs)),
    )
    loaded = load_features(data, backbone=backbone, image_size=image_size, precision=precision)
    features = prepared(loaded, root=root, validation=validation)
    title = f"{data}, {backbone} at {image_size}x{image_size}, {clients} clients, B {batch}, {recipe} recipe"
    table = Table(COLUMNS, title=title)
    results: dict[str, list[Result]] = {}
    parts = {seed: _few_of(features, images, seed) if images else features for seed in seeds}
    for result in _runs(parts, partitions, settings, ceiling=ceiling):
        results.setdefault(result.partition, []).append(result)
        table.row(*_cells(result))
    accuracy = {name: float(np.mean([one.accuracy for one in each])) for name, each in results.items()}
    if len(seeds) > 1:
        for name, mean in accuracy.items():
            table.row(name, "mean", mean, *(None,) * 6)
    write_json(
        json_file,
        "fedtc",
        tables=[table],
        **{"data": data, "backbone": backbone, "image_size": image_size, **asdict(settings)},
        precision=precision,
        root=root,
        validation=validation,
        images=images,
        runs=[asdict(result) for each in results.values() for result in each],
        accuracy=accuracy,
    )


def _few_of(features: Features, images: int, seed: int) -> Features:
    """Return features with so many random ones of each class for training."""
    rng, labels = np.random.default_rng(seed), features.train_labels
    members = [rng.permutation(np.flatnonzero(labels == label))[:images] for label in range(features.classes)]
    rows = np.concatenate(members)
    return replace(features, train=features.train[rows], train_labels=labels[rows])


def _runs(
    parts: Mapping[int, Features],
    partitions: Sequence[Partition],
    settings: Settings,
    *,
    ceiling: bool,
) -> Iterator[Result]:
    """Yield the results of the features of each seed."""
    for partition in partitions:
        for seed, features in parts.items():
            yield train_fleet(features, partition, settings, seed=seed)[0]
    if ceiling:
        for seed, features in parts.items():
            yield run_ceiling(features, settings, seed=seed)


def _cells(result: Result) -> tuple[object, ...]:
    """Return a row of the table."""
    fleet = (result.devices, result.prototypes, result.bytes_up / 1e6) if result.devices else (None,) * 3
    return (
        *(result.partition, result.seed, result.accuracy, result.calibration_error),
        *(*fleet, result.head_bytes / 1e3, result.train_seconds),
    )
