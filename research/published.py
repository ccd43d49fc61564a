"""`python -m research published`: one upload, beside published results of frozen ResNet-18 features."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.config.schema import Robust
from benchmarks import fleets
from benchmarks.accuracy.fedtc import partitions_option
from benchmarks.data.features import BackboneType, load_features
from benchmarks.data.images import MissingFile
from benchmarks.options import selected
from benchmarks.report import Table, json_option, write_json
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, share_out
from protofleet.simulation.statistics import map_features, run_fleet

DATA = ("cifar10", "cifar100", "tiny_imagenet")
BACKBONE, IMAGE_SIZE = "resnet18.tv_in1k", 224
"""Of the published results: torchvision's weights."""

AFL, LDA = "ridge of sums as AFL", "LDA of sums"

PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "AFL": {"cifar10": 0.8075, "cifar100": 0.5856, "tiny_imagenet": 0.5467},
    "GH-LDA": {"cifar10": 0.8605, "cifar100": 0.6392},
    "DeepAFL, 41 rounds": {"cifar10": 0.8643, "cifar100": 0.6698, "tiny_imagenet": 0.6235},
    "SAFLe": {"cifar10": 0.9073, "cifar100": 0.7061, "tiny_imagenet": 0.6458},
}
"""AFL: arXiv 2405.16240; GH-LDA: 2602.01186; DeepAFL: 2603.00579; SAFLe: 2512.03336."""

CHECKED = frozenset({("AFL", "tiny_imagenet")})
"""Figures that another source confirms; the others were not compared with the papers' tables."""

RIDGE = 1e-6
"""Relative to the mean square of a value: AFL removes its ridge at the end, but dead features are not invertible."""
SHRINKAGE = 1e-3
"""Of LDA's covariance, relative to its mean variance."""

COLUMNS = {
    "method": "<24", "layers": "<24", "partition": "<16", "values": ">8,", "top-1": ">8.2%", "MB a device": ">13.2f",
    "source": ">28",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """One head, measured or published."""

    data: str
    method: str
    layers: str = ""
    partition: str = "any"
    values: int | None = None
    """In a feature."""
    accuracy: float
    megabytes: float | None = None
    """Mean of the devices' submissions."""
    source: str = "measured"


@click.command("published")
@selected("--data", "names", choices=DATA)
@click.option("--backbone", type=BackboneType(), default=BACKBONE, show_default=True)
@click.option("--layers", default="all", show_default=True, help="Blocks of the deeper features.")
@click.option("--image-size", type=click.IntRange(min=32), default=IMAGE_SIZE, show_default=True)
@click.option("--images", type=click.IntRange(min=1), help="Use so many images of each part.  [default: all]")
@partitions_option("dirichlet:0.1")
@click.option("--clients", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def command(
    *,
    names: tuple[str, ...],
    backbone: str,
    layers: str,
    image_size: int,
    images: int | None,
    partitions: list[Partition],
    clients: int,
    seed: int,
    json_file: Path | None,
) -> None:
    """Compare heads of one upload with published ones; data or weights that are missing are skipped."""
    tables, runs = [], []
    for name in names:
        try:
            last, deep = (
                load_features(name, backbone=each, image_size=image_size, at_most=images)
                for each in (backbone, f"{backbone}:{layers}")
            )
        except MissingFile as missing:
            click.echo(f"{name}: skipped: {missing}")
            continue
        table = Table(COLUMNS, title=f"{name}, {backbone} at {image_size}x{image_size}, {clients} clients")
        tables.append(table)
        is_same_setting = (backbone, image_size, images) == (BACKBONE, IMAGE_SIZE, None)
        for run in chain(
            _of_sums(name, last),
            _of_fleets(name, last, "last", partitions, clients=clients, seed=seed),
            _of_fleets(name, deep, layers, partitions, clients=clients, seed=seed),
            _as_published(name) if is_same_setting else (),
        ):
            runs.append(run)
            table.row(*(value for key, value in asdict(run).items() if key != "data"))
    write_json(
        json_file,
        "published",
        tables=tables,
        backbone=backbone,
        layers=layers,
        image_size=image_size,
        images=images,
        clients=clients,
        seed=seed,
        runs=[asdict(run) for run in runs],
    )


def _of_sums(data: str, features: Features) -> Iterator[Run]:
    """Yield the heads of exact sums, which are the same however the images are divided."""
    values = features.train.shape[1]
    for method, head in ((AFL, _afl), (LDA, _lda)):
        yield Run(data=data, method=method, layers="last", values=values, accuracy=head(features))


def _of_fleets(
    data: str,
    features: Features,
    layers: str,
    partitions: Sequence[Partition],
    *,
    clients: int,
    seed: int,
) -> Iterator[Run]:
    """Yield the heads of `statistics` from sums of single images, and of FedTC, without a limit for any device."""
    mapped = map_features(features, random_features=0, seed=seed)
    unbounded = Robust(detect_outliers=False, max_multiple=0)
    settings = fleets.Settings(
        clients=clients, alpha=0.99, batch_size=5, max_multiple=0, recipe=RECIPES["default"], device="cpu"
    )
    for partition in partitions:
        owners = share_out(features.train_labels, partition, clients=clients, rng=np.random.default_rng(seed))
        sums = run_fleet(mapped, owners, batch_size=1, seed=seed, robust=unbounded)
        prototypes = fleets.run_fleet(features, partition, settings, seed=seed)
        for method, accuracy, sent, devices in (
            ("statistics, B 1", sums.accuracy, sums.bytes_up, sums.devices),
            ("FedTC, B 5", prototypes.accuracy, prototypes.bytes_up, prototypes.devices),
        ):
            yield Run(
                data=data,
                method=method,
                layers=layers,
                values=features.train.shape[1],
                partition=str(partition),
                accuracy=accuracy,
                megabytes=sent / devices / 1e6,
            )


def _as_published(data: str) -> Iterator[Run]:
    for method, accuracies in PUBLISHED.items():
        if data in accuracies:
            note = "" if (method, data) in CHECKED else ", not checked"
            yield Run(data=data, method=method, accuracy=accuracies[data], source=f"as published{note}")


def _afl(features: Features) -> float:
    """Return the accuracy of AFL's head: least squares to one-hot labels, without an intercept or centering."""
    rows = features.train.astype(np.float64)
    moment = rows.T @ rows
    strength = RIDGE * np.trace(moment) / len(moment)
    weights = np.linalg.solve(moment + strength * np.eye(len(moment)), _class_sums(features).T)
    return _accuracy(features.test @ weights, features)


def _lda(features: Features) -> float:
    """Return the accuracy of a linear discriminant of the class means and the covariance within classes."""
    counts = np.bincount(features.train_labels, minlength=features.classes)
    means = _class_sums(features) / counts[:, None]
    rows = features.train.astype(np.float64)
    covariance = (rows.T @ rows - means.T @ (counts[:, None] * means)) / len(rows)
    strength = SHRINKAGE * np.trace(covariance) / len(covariance)
    directions = np.linalg.solve(covariance + strength * np.eye(len(covariance)), means.T)
    offsets = np.log(counts / len(rows)) - (means * directions.T).sum(axis=1) / 2
    return _accuracy(features.test @ directions + offsets, features)


def _class_sums(features: Features) -> NDArray[np.float64]:
    """Return the sum of each class's features, (C, L)."""
    return np.eye(features.classes)[features.train_labels].T @ features.train.astype(np.float64)


def _accuracy(logits: NDArray[np.floating], features: Features) -> float:
    return float((logits.argmax(axis=1) == features.test_labels).mean())
