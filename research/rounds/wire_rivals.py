"""Further rivals of `benchmarks accuracy wire`, and the choice of all rivals' settings on validation images.

`python -m research wire` measures FedCOF and Fed3R-RF beside the methods of `benchmarks accuracy wire`;
`python -m research tune-wire` compares settings.

FedCOF: Goswami et al., "Covariances for free: exploiting mean distributions for training-free federated learning",
NeurIPS 2025. Fed3R-RF: Fanì et al., "Accelerating heterogeneous federated learning with closed-form classifiers",
ICML 2024.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.intake.validation import Prototypes
from benchmarks.accuracy.wire import methods
from benchmarks.accuracy.wire.command import DATA, fleet_of, loaded, measure, wire_options
from benchmarks.accuracy.wire.methods import DEEPER, LINEAR, Fleet, Point, linear_head, momentum_head
from benchmarks.accuracy.wire.sums import HEADS, accuracy_of, ridge, rows_of, sums_of
from benchmarks.accuracy.wire.tuned import Momentum, tuned
from benchmarks.data.features import SPLIT_SEED
from benchmarks.options import repeated
from benchmarks.report import Table
from protocol.wire.codec import encode
from protocol.wire.quantization import dequantize, prototype_fields, quantize
from protofleet.simulation.fleet import Features
from protofleet.submissions import submission_of

GROUPS = (0, 5)
"""Images of a mean that FedCOF sends; 0 is all of a class."""

RANDOM_FEATURES = 4096
ROUNDS = 30
LINEAR_GRID = tuple(
    replace(LINEAR, learning_rate=rate, epochs=epochs)
    for rate in (0.001, 0.003, 0.01, 0.03)
    for epochs in (1, 5)
)
MOMENTUM_GRID = tuple(
    Momentum(learning_rate, epochs, calibrated)
    for learning_rate in (0.001, 0.003, 0.01, 0.03, 0.1)
    for epochs in (1, 5)
    for calibrated in (False, True)
)
STRENGTHS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("AFL", "FedCGS"), (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)),
        "GH-LDA": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9),
    }
)
"""Ridges of heads of sums, and shrinkages."""
SHRINKAGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""FedCOF's gamma, relative to the mean square of the means' values."""

RIDGES, WIDTHS = (0.001, 0.01, 0.1, 1.0), (0.5, 1.0, 2.0)
"""Fed3R-RF's lambda, and the width of its Gaussian kernel for rows of length 1."""


def fedcof(fleet: Fleet, *, shrinkage: float, group: int = 0, layers: str = "") -> Iterator[Point]:
    """Yield the classifier of class means, of each device's images of a class or of groups of them.

    The covariance of a class is that of its means times their images; with the shrinkage, these are the sums that a
    regression needs, without the scatter between classes. A class's weights are divided by their length. Means are
    sent as FedTC's prototypes are.
    """
    fleet = fleet.of_layers(layers)
    rows = rows_of(fleet.features)
    sent, size = _class_means(fleet, rows, group)
    labels = np.concatenate([part.labels for part in sent])
    counts = np.concatenate([part.counts for part in sent])
    means = np.concatenate([part.values for part in sent]).astype(np.float64)
    shrunk = shrinkage * float(np.square(means).mean())
    scatter, sums = np.zeros((means.shape[1],) * 2), np.zeros((rows.classes, means.shape[1]))
    for label in range(rows.classes):
        mine, images = means[labels == label], counts[labels == label]
        sums[label] = images @ mine
        away = mine - sums[label] / images.sum()
        covariance = (away * images[:, None]).T @ away / max(len(mine) - 1, 1)
        scatter += (images.sum() - 1) * (covariance + shrunk * np.eye(len(scatter)))
    weight = ridge(scatter, sums.T, 0.0)
    weight /= np.linalg.norm(weight, axis=0)
    yield Point(
        setting=f"groups of {group}" if group else "class means",
        accuracy=accuracy_of(rows, (weight, np.zeros(rows.classes))),
        bytes_up=float(size),
    )


def _fedcof_rows(fleet: Fleet, *, layers: str) -> Iterator[Point]:
    for group, shrinkage in zip(GROUPS, tuned(fleet.data, layers).fedcof, strict=True):
        yield from fedcof(fleet, group=group, shrinkage=shrinkage, layers=layers)


def _class_means(fleet: Fleet, rows: Features, group: int) -> tuple[list[Prototypes], int]:
    """Return each device's means as they are received, and the bytes of all their messages."""
    received, sent = [], 0
    for client in np.unique(fleet.owners):
        mine = np.flatnonzero(fleet.owners == client)
        images = np.random.default_rng([fleet.seed, int(client)]).permutation(mine)
        parts = [
            (label, part)
            for label in np.unique(rows.train_labels[mine])
            for part in _cut(images[rows.train_labels[images] == label], group)
        ]
        values = np.array([rows.train[part].mean(axis=0) for _, part in parts]).astype(np.float16)
        means = Prototypes(
            values=dequantize(*quantize(values)),
            labels=np.array([label for label, _ in parts]),
            counts=np.array([len(part) for _, part in parts]),
        )
        message = submission_of(
            means.labels, means.counts, task=bytes(32), images=len(mine), **prototype_fields(values)
        )
        received.append(means)
        sent += len(encode(message))
    return received, sent


def _cut(images: NDArray[np.int64], group: int) -> list[NDArray[np.int64]]:
    """Cut images into groups; the remainder joins them."""
    return np.array_split(images, max(len(images) // group, 1) if group else 1)


def fed3r_rf(
    fleet: Fleet,
    *,
    ridges: Sequence[float] = (0.01,),
    width: float = 2.0,
    number: int = RANDOM_FEATURES,
) -> Iterator[Point]:
    """Yield ridge regressions of random features of a Gaussian kernel, whose sums devices send in float32."""
    rows = rows_of(fleet.features)
    length = float(np.linalg.norm(rows.train, axis=1).mean())
    rng = np.random.default_rng(fleet.seed)
    directions = (rng.normal(size=(rows.train.shape[1], number)) / width / length).astype(np.float32)
    phases = rng.uniform(0, 2 * np.pi, number).astype(np.float32)
    train, test = (
        np.sqrt(2 / number) * np.cos(part @ directions + phases) for part in (rows.train, rows.test)
    )
    sums = sums_of(train, rows.train_labels)
    randomized = replace(rows, train=train, test=test)
    values = number * (number + 1) // 2 + rows.classes * number
    for strength in ridges:
        weight = ridge(sums.square, sums.of_classes, strength)
        yield Point(
            setting=f"{number:,}",
            accuracy=accuracy_of(randomized, (weight, np.zeros(rows.classes))),
            bytes_up=float(methods.FLOAT32 * values * len(np.unique(fleet.owners))),
        )


METHODS: Mapping[str, Callable[[Fleet], Iterator[Point]]] = MappingProxyType(
    {
        **methods.METHODS,
        **{f"FedCOF{name}": partial(_fedcof_rows, layers=layers) for name, layers in DEEPER.items()},
        "Fed3R-RF": fed3r_rf,
    }
)


@click.command("wire")
@wire_options(METHODS)
def command(**options: Any) -> None:
    """Measure bytes and accuracy of every algorithm and of more rivals."""
    measure(METHODS, **options)


Candidate = tuple[str, str, str]
"""A method, layers and a setting."""


@click.command("tune-wire")
@click.option("--data", type=click.Choice(DATA), default="fashion_mnist", show_default=True)
@click.option("--images", type=click.IntRange(min=1), help="Training images of all devices.  [default: all]")
@repeated(
    "--layers", "names", default=tuple(DEEPER.values()), help="As in `export-backbone`; may be repeated."
)
@repeated(
    "--seed",
    "seeds",
    type=int,
    default=(0,),
    help="Of the devices' and the validation images; may be repeated.",
)
def tune(*, data: str, images: int | None, names: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    """Show the accuracy of every candidate of the rivals' settings on validation images, mean of the seeds."""
    table = Table({"method": "<30", "layers": "<16", "setting": "<44", "validation": ">12.2%"})
    for layers in names:
        found: dict[Candidate, list[float]] = {}
        for seed in seeds:
            fleet = fleet_of(data, loaded(data, validation=SPLIT_SEED + seed), images, seed)
            for candidate, accuracy in _candidates(fleet, layers):
                found.setdefault(candidate, []).append(accuracy)
        for candidate, accuracies in found.items():
            table.row(*candidate, float(np.mean(accuracies)))


def _candidates(fleet: Fleet, layers: str) -> Iterator[tuple[Candidate, float]]:
    """Yield the accuracy of every setting of these layers."""
    rows = rows_of(fleet.of_layers(layers).features)
    sums = sums_of(rows.train.astype(np.float64), rows.train_labels)
    for method, strengths in STRENGTHS.items():
        for strength in strengths:
            accuracy = accuracy_of(rows, HEADS[method][0](sums, strength))
            yield (method, layers, f"strength {strength:g}"), accuracy
    for group in GROUPS:
        for shrinkage in SHRINKAGES:
            (point,) = fedcof(fleet, group=group, shrinkage=shrinkage, layers=layers)
            yield (f"FedCOF, {point.setting}", layers, f"shrinkage {shrinkage:g}"), point.accuracy
    for momentum in MOMENTUM_GRID:
        (point,) = momentum_head(fleet, rounds=(ROUNDS,), layers=layers, momentum=momentum)
        yield ("FedAvg, momentum", layers, str(momentum)), point.accuracy
    if not layers:
        yield from _last_layer(fleet)


def _last_layer(fleet: Fleet) -> Iterator[tuple[Candidate, float]]:
    """Yield the accuracy of every setting of methods that are measured on the last layer only."""
    for recipe in LINEAR_GRID:
        (point,) = linear_head(fleet, rounds=(ROUNDS,), recipe=recipe)
        setting = f"learning rate {recipe.learning_rate:g}, {recipe.epochs} epochs"
        yield ("FedAvg", "", setting), point.accuracy
    for width in WIDTHS:
        points = fed3r_rf(fleet, ridges=RIDGES, width=width, number=RANDOM_FEATURES)
        for strength, point in zip(RIDGES, points, strict=True):
            yield ("Fed3R-RF", "", f"width {width:g}, ridge {strength:g}"), point.accuracy
