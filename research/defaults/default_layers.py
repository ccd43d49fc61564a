"""`python -m research layers`: FedTC on other layers than the last, with few images, to choose a default."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.config.schema import Client
from benchmarks.data.features import BACKBONES, load_features
from benchmarks.data.images import DIGITS, PACS
from benchmarks.fleets import Settings, run_fleet
from benchmarks.options import repeated, selected
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ConfigError
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition

TODAY = ""
"""The network's own feature, not normalized, before this was decided."""

LAYERS = (TODAY, "residual", "last,residual")

AT_MOST = 2000
"""Images of each part of a data set whose features are computed."""

UNEVEN = Partition("dirichlet", 0.5)

CELLS = {
    **dict.fromkeys(("fashion_mnist", "cifar10", *DIGITS), (96,)),
    "pacs": (96, 224),
    "pacs_without_sketches": (96, 224),
}
"""The image sizes of each data set."""

COLUMNS = {
    "data": "<22", "px": ">4", "  backbone": "<27", "images": ">6", "last": ">8.1%", "residual": ">13",
    "last,residual": ">15",
}  # fmt: skip


@click.command("layers")
@selected("--data", "names", choices=CELLS)
@selected("--backbone", "backbones", choices=BACKBONES)
@repeated(
    "--images", "counts", type=click.IntRange(min=2), default=(20, 60), help="Of a class; may be repeated."
)
@click.option("--draws", type=click.IntRange(min=2), default=10, show_default=True)
@json_option
def command(
    *, names: tuple[str, ...], backbones: tuple[str, ...], counts: tuple[int, ...], draws: int,
    json_file: Path | None,
) -> None:  # fmt: skip
    """Compare residual sums, alone and beside the last layer, with the last layer.

    FedTC with its defaults; ten devices, four with PACS, share the drawn images by a Dirichlet distribution (0.5). The
    same draws for all layers; test images choose nothing. Differences are in points, ± the standard error over draws.
    """
    table = Table(COLUMNS, title=f"FedTC, {draws} draws: the last layer, and differences from it")
    runs = []
    for name in names:
        for size in CELLS[name]:
            for backbone in backbones:
                parts = [_load(name, backbone, layers, size) for layers in LAYERS]
                for count in counts:
                    found = np.array([
                        [_accuracy(part, count, draw, devices=4 if "pacs" in name else 10) for part in parts]
                        for draw in range(draws)
                    ])  # fmt: skip
                    table.row(name, size, f"  {backbone}", count, found[:, 0].mean(), *_differences(found))
                    cell = {"data": name, "image_size": size, "backbone": backbone, "images": count}
                    runs.append({**cell, "accuracies": found.tolist()})
    write_json(json_file, "layers", tables=[table, _summary(runs)], layers=LAYERS, draws=draws, runs=runs)


def _load(name: str, backbone: str, layers: str, size: int) -> Features:
    """Return the features of a data set, with all domains of PACS that are wanted in one."""
    domains = {"pacs": PACS, "pacs_without_sketches": PACS[:3]}.get(name, (name,))
    wanted = f"{backbone}:{layers}" if layers else backbone
    at_most = None if "pacs" in name else AT_MOST
    parts = [load_features(each, backbone=wanted, image_size=size, at_most=at_most) for each in domains]
    return replace(
        parts[0],
        train=np.concatenate([part.train for part in parts]),
        train_labels=np.concatenate([part.train_labels for part in parts]),
        test=np.concatenate([part.test for part in parts]),
        test_labels=np.concatenate([part.test_labels for part in parts]),
    )


def _accuracy(features: Features, count: int, draw: int, *, devices: int) -> float:
    """Return the accuracy on all test images of a head of `count` images a class.

    Raises:
        ConfigError: a class has fewer.
    """
    rng = np.random.default_rng(draw)
    members = [np.flatnonzero(features.train_labels == label) for label in range(features.classes)]
    if min(map(len, members)) < count:
        raise ConfigError(f"expected {count} images of each class, got {min(map(len, members))}")
    rows = np.concatenate([rng.permutation(each)[:count] for each in members])
    drawn = replace(features, train=features.train[rows], train_labels=features.train_labels[rows])
    defaults = Client()
    settings = Settings(
        clients=devices,
        alpha=defaults.alpha,
        batch_size=defaults.batch_size,
        recipe=RECIPES["default"],
        device="cpu",
    )
    return run_fleet(drawn, UNEVEN, settings, seed=draw).accuracy


def _differences(accuracies: NDArray[np.float64]) -> list[str]:
    """Return the mean differences of the later columns from the first one, (draws, layers), in points."""
    gains = 100 * (accuracies[:, 1:] - accuracies[:, :1])
    errors = gains.std(axis=0, ddof=1) / np.sqrt(len(gains))
    return [f"{mean:+.1f} ± {error:.1f}" for mean, error in zip(gains.mean(axis=0), errors, strict=True)]


def _summary(runs: Sequence[dict[str, Any]]) -> Table:
    """Return the mean and the least difference over the networks of each data set, size and number of images."""
    table = Table(
        {"data": "<22", "px": ">4", "images": ">7", **dict.fromkeys(("residual", "last,residual"), ">22")},
        title="Mean and least difference over the networks, in points",
    )
    for cell in dict.fromkeys((run["data"], run["image_size"], run["images"]) for run in runs):
        means = 100 * np.array([
            np.mean(run["accuracies"], axis=0)
            for run in runs
            if (run["data"], run["image_size"], run["images"]) == cell
        ])  # fmt: skip
        gains = (means[:, 1:] - means[:, :1]).T
        table.row(*cell, *(f"{each.mean():+.1f}, {each.min():+.1f}" for each in gains))
    return table
