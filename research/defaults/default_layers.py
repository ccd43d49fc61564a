"""`python -m research layers`: FedTC with few images on selections of a network's blocks, to choose the default."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.recipe import RECIPES
from benchmarks.data.features import load_features
from benchmarks.data.images import DIGITS, PACS
from benchmarks.fleets import Settings, run_fleet
from benchmarks.options import repeated, selected
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ConfigError
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition

_MOBILENET_V2 = ("c384", "c576", "c960")
DEPTHWISE: Mapping[str, tuple[str, ...]] = {
    "mobilenetv2_100": _MOBILENET_V2,
    "mobilenetv2_100_birds": _MOBILENET_V2,
    "mobilenetv2_100_insects": _MOBILENET_V2,
    "tf_mobilenetv3_small_100": ("c144", "c288", "c576"),
}
"""What `--layers depthwise` takes of each backbone."""

AT_MOST = 6000
"""Images of each part of a data set whose features are computed."""

UNEVEN, DEVICES = Partition("dirichlet", 0.1), 10

CELLS = {
    **dict.fromkeys(("fashion_mnist", "cifar10", *DIGITS), 96),
    "pacs": 224,
    "pacs_without_sketches": 224,
}
"""The image size of each data set."""


def selections(backbone: str) -> dict[str, str]:
    """Return the selections of a backbone's blocks by name, as in `export-backbone --layers`; the first is compared."""
    names = DEPTHWISE[backbone]
    return {
        "last,residual": "last,residual",
        "last": "last",
        "last depthwise": names[-1],
        "last two": ",".join(names[-2:]),
        "last three": ",".join(names),
        "the two before the last": ",".join(names[:-1]),
    }


OTHERS = list(selections("mobilenetv2_100"))[1:]

COLUMNS = {
    "data": "<22", "px": ">4", "  backbone": "<27", "images": ">6", "last,residual": ">14.1%", "MB": ">6.2f",
}  # fmt: skip
"""Columns before those of OTHERS."""


@click.command("layers")
@selected("--data", "names", choices=CELLS)
@selected("--backbone", "backbones", choices=DEPTHWISE)
@repeated(
    "--images", "counts", type=click.IntRange(min=2), default=(20, 50),
    help="Of a class, or all that it has; may be repeated.",
)  # fmt: skip
@click.option(
    "--prototypes", type=click.Choice(["auto", "batches"]), default="auto", show_default=True,
    help="As in the task file.",
)  # fmt: skip
@click.option("--draws", type=click.IntRange(min=2), default=10, show_default=True)
@click.option(
    "--test", is_flag=True, help="Evaluate on test images, not on training images that are not drawn."
)
@json_option
def command(
    *, names: tuple[str, ...], backbones: tuple[str, ...], counts: tuple[int, ...],
    prototypes: Literal["auto", "batches"], draws: int, test: bool, json_file: Path | None,
) -> None:  # fmt: skip
    """Compare depthwise activations, the last layer and residual sums: the columns are differences from last,residual.

    FedTC with its defaults and the head in closed form; ten devices share the drawn images by a Dirichlet distribution
    (0.1). The same draws for all layers. Differences are in points, ± the standard error over draws.
    """
    settings = Settings(
        clients=DEVICES,
        prototypes=prototypes,
        max_multiple=0,
        recipe=replace(RECIPES["default"], adapter=False),
    )
    images = "test" if test else "held-out training"
    table = Table(
        COLUMNS | {name: f">{max(13, len(name) + 2)}" for name in OTHERS},
        title=f"FedTC, {prototypes}, {draws} draws, {images} images: last,residual, and differences",
    )
    runs = []
    for name in names:
        for backbone in backbones:
            parts = [_load(name, backbone, layers) for layers in selections(backbone).values()]
            for count in counts:
                cell = {"data": name, "image_size": CELLS[name], "backbone": backbone, "images": count}
                found = np.array(
                    [list(_figures(parts, count, draw, settings, test=test)) for draw in range(draws)]
                )
                accuracies, sizes = found[..., 0], found[..., 1].mean(axis=0)
                table.row(*cell.values(), accuracies[:, 0].mean(), sizes[0] / 1e6, *_differences(accuracies))
                runs.append({**cell, "accuracies": accuracies.tolist(), "bytes_up": sizes.tolist()})
    tables = [table, _summary(runs)]
    write_json(
        json_file,
        "layers",
        tables=tables,
        layers=["last,residual", *OTHERS],
        prototypes=prototypes,
        draws=draws,
        runs=runs,
    )


def _load(name: str, backbone: str, layers: str) -> Features:
    """Return the features of a data set, with all domains of PACS that are wanted in one."""
    domains = {"pacs": PACS, "pacs_without_sketches": PACS[:3]}.get(name, (name,))
    at_most = None if "pacs" in name else AT_MOST
    parts = [
        load_features(each, backbone=f"{backbone}:{layers}", image_size=CELLS[name], at_most=at_most)
        for each in domains
    ]
    return replace(
        parts[0],
        train=np.concatenate([part.train for part in parts]),
        train_labels=np.concatenate([part.train_labels for part in parts]),
        test=np.concatenate([part.test for part in parts]),
        test_labels=np.concatenate([part.test_labels for part in parts]),
    )


def _figures(
    parts: Sequence[Features], count: int, draw: int, settings: Settings, *, test: bool
) -> Iterator[tuple[float, int]]:
    """Yield accuracy and uploaded bytes of a fleet with `count` images a class for each selection of blocks.

    Raises:
        ConfigError: all images of a class are drawn, and none is held out.
    """
    rng = np.random.default_rng(draw)
    labels = parts[0].train_labels
    members = [rng.permutation(np.flatnonzero(labels == label)) for label in range(parts[0].classes)]
    fewest = min(map(len, members))
    if count >= fewest and not test:
        raise ConfigError(f"expected --images below {fewest}, or --test, got {count}")
    rows = np.concatenate([each[:count] for each in members])
    others = np.setdiff1d(np.arange(len(labels)), rows)
    for part in parts:
        drawn = replace(part, train=part.train[rows], train_labels=labels[rows])
        if not test:
            drawn = replace(drawn, test=part.train[others], test_labels=labels[others])
        made = run_fleet(drawn, UNEVEN, settings, seed=draw)
        yield made.accuracy, made.bytes_up


def _differences(accuracies: NDArray[np.float64]) -> list[str]:
    """Return the mean differences of the later columns from the first one, (draws, layers), in points."""
    gains = 100 * (accuracies[:, 1:] - accuracies[:, :1])
    errors = gains.std(axis=0, ddof=1) / np.sqrt(len(gains))
    return [f"{mean:+.1f} ± {error:.1f}" for mean, error in zip(gains.mean(axis=0), errors, strict=True)]


def _summary(runs: Sequence[dict[str, Any]]) -> Table:
    """Return mean and least difference and the bytes over the networks of each data set, size and number of images."""
    table = Table(
        {"data": "<22", "px": ">4", "images": ">7", **dict.fromkeys(OTHERS, ">25")},
        title="Mean and least difference from last,residual over the networks, in points; times its bytes",
    )
    for cell in dict.fromkeys((run["data"], run["image_size"], run["images"]) for run in runs):
        of = [run for run in runs if (run["data"], run["image_size"], run["images"]) == cell]
        means = 100 * np.array([np.mean(run["accuracies"], axis=0) for run in of])
        gains = (means[:, 1:] - means[:, :1]).T
        sizes = np.mean([np.divide(run["bytes_up"][1:], run["bytes_up"][0]) for run in of], axis=0)
        texts = (
            f"{each.mean():+.1f}, {each.min():+.1f}; {times:.2f}"
            for each, times in zip(gains, sizes, strict=True)
        )
        table.row(*cell, *texts)
    return table
