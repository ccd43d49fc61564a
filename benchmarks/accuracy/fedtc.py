"""`python -m benchmarks fedtc`: FedTC on public data under the partitions of the paper."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click

from aggregator.config.schema import Training
from aggregator.training.train_head import recipe_of, torch_device
from benchmarks.accuracy.fedtc_fleet import Ceiling, Result, Settings, run_ceiling, run_fleet
from benchmarks.data.features import BACKBONES, load_features
from benchmarks.data.images import NAMES
from benchmarks.data.partitions import Partition, parse_partition
from protocol.errors import ConfigError

PARTITIONS = ("sharding:1", "sharding:2", "sharding:3", "dirichlet:0.01", "dirichlet:0.1", "dirichlet:0.5")


def partitions_of(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> list[Partition]:
    """Read an option's partitions."""
    try:
        return [parse_partition(value) for value in values]
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


@click.command("fedtc")
@click.option("--data", type=click.Choice(NAMES), default="fashion_mnist", show_default=True)
@click.option("--backbone", type=click.Choice(list(BACKBONES)), default="mobilenetv2_100", show_default=True)
@click.option("--image-size", type=click.IntRange(min=32), default=96, show_default=True)
@click.option(
    "--partition",
    "partitions",
    multiple=True,
    default=PARTITIONS,
    callback=partitions_of,
    help="sharding:CLASSES_PER_CLIENT or dirichlet:CONCENTRATION; may be repeated.  "
    f"[default: {', '.join(PARTITIONS)}]",
)
@click.option("--clients", type=click.IntRange(min=1), default=10, show_default=True)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.99,
    show_default=True,
    help="Share of each class that outlier filtering keeps.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), default=5, show_default=True, help="Images in a prototype."
)
@click.option("--recipe", type=click.Choice(["default", "paper"]), default="default", show_default=True)
@click.option(
    "--restore/--no-restore",
    default=None,
    help="Give the prototypes their variance back, or not.  [default: the recipe's]",
)
@click.option("--epochs", type=click.IntRange(min=1), help="Of the training.  [default: the recipe's]")
@click.option(
    "--seed", "seeds", type=int, multiple=True, default=(0,), show_default=True, help="May be repeated."
)
@click.option(
    "--ceiling/--no-ceiling", default=True, show_default=True, help="Train on all features in one place, too."
)
@click.option("--device", default="auto", show_default=True, help="Where to train: auto, cpu, cuda.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there."
)
def command(
    *,
    data: str,
    backbone: str,
    image_size: int,
    partitions: list[Partition],
    clients: int,
    alpha: float,
    batch: int,
    recipe: Literal["default", "paper"],
    restore: bool | None,
    epochs: int | None,
    seeds: tuple[int, ...],
    ceiling: bool,
    device: str,
    json_file: Path | None,
) -> None:
    """Train a fleet's head with FedTC and report what it gets right, and at what cost."""
    settings = Settings(
        clients=clients,
        alpha=alpha,
        batch_size=batch,
        recipe=recipe_of(Training(recipe=recipe, restore=restore, epochs=epochs)),
        device=torch_device(device),
    )
    features = load_features(data, backbone=backbone, image_size=image_size)
    click.echo(
        f"{data}, {backbone} at {image_size}x{image_size}, {clients} clients, B {batch}, {recipe} recipe"
    )
    click.echo(HEADINGS)
    results = []
    for partition in partitions:
        for seed in seeds:
            results.append(run_fleet(features, partition, settings, seed=seed))
            click.echo(_row(results[-1]))
    top = run_ceiling(features, settings, seed=seeds[0]) if ceiling else None
    if top:
        click.echo(f"{'all features':<16}{'':>6}{top.accuracy:>8.2%}{'':>30}{top.train_seconds:>9.1f}")
    if json_file:
        setting = {"data": data, "backbone": backbone, "image_size": image_size, **asdict(settings)}
        json_file.write_text(json.dumps(_report(setting, results, top), indent=2) + "\n", encoding="utf-8")


HEADINGS = (
    f"{'partition':<16}{'seed':>6}{'top-1':>8}{'devices':>9}{'prototypes':>12}{'MB up':>9}{'train s':>9}"
)


def _row(result: Result) -> str:
    return (
        f"{result.partition:<16}{result.seed:>6}{result.accuracy:>8.2%}{result.devices:>9}"
        f"{result.prototypes:>12,}{result.bytes_up / 1e6:>9.2f}{result.train_seconds:>9.1f}"
    )


def _report(setting: dict[str, Any], results: list[Result], top: Ceiling | None) -> dict[str, Any]:
    return {
        **setting,
        "runs": [asdict(result) for result in results],
        "ceiling": asdict(top) if top else None,
        "accuracy": {
            "lowest": min(result.accuracy for result in results),
            "highest": max(result.accuracy for result in results),
        },
    }
