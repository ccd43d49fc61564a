"""Rivals of FedTC and statistics, with the rows of `statistics` and settings chosen on validation images.

AFL: He et al., "AFL: A single-round analytic approach for federated learning with pre-trained models", 2024.
FedCOF: Goswami et al., "Covariances for free: exploiting mean distributions for training-free federated learning",
NeurIPS 2025. Fed3R-RF: Fanì et al., "Accelerating heterogeneous federated learning with closed-form classifiers",
ICML 2024.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.graphs.head_export import mapped
from aggregator.intake.validation import Prototypes
from benchmarks.accuracy import baselines
from benchmarks.accuracy.wire import methods
from benchmarks.accuracy.wire.methods import LAYERS, Fleet, Point, linear_head
from protocol.wire.codec import encode
from protocol.wire.quantization import dequantize, prototype_fields, quantize
from protofleet.simulation.fedtc import submission_of
from protofleet.simulation.fleet import Features
from protofleet.simulation.statistics import ROWS_PER_RUN, sums_submission

Array = NDArray[np.float64]

FLOAT32 = 4
LAST_RIDGE = 1e-9
"""AFL's ridge, relative to the mean square of a row's values: rows have nearly the mean 0, so that one direction is
nearly without values."""

MOMENTUM = baselines.Recipe(
    rounds=1,
    epochs=1,
    batch_size=64,
    optimizer="sgd",
    learning_rate=0.003,
    weight_decay=0.0,
    standardize=False,
    adapter_size=0,
    server_momentum=0.9,
)
GROUPS = (0, 5)
"""Images of a mean that FedCOF sends; 0 is all of a class."""

RATES: Mapping[str, float] = MappingProxyType({"": 0.003, "residual": 0.01, "c384,c576": 0.01})
SHRINKAGE: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"": (3.0, 0.3), "residual": (1.0, 0.03), "c384,c576": (0.03, 0.1)}
)
"""The learning rate with momentum, and FedCOF's gamma for each of GROUPS, by layers: the best of `tune-wire`."""

RANDOM_FEATURES = 4096


def momentum_head(
    fleet: Fleet, *, rounds: Sequence[int], layers: str = "", recipe: baselines.Recipe | None = None
) -> Iterator[Point]:
    """Yield FedAvg of a linear head with server momentum, of rows standardized by the moments of all devices.

    Each device first sends the sums of its rows' values and of their squares, in float32.
    """
    rows = rows_of(fleet.of_layers(layers).features)
    mean, deviation = rows.train.mean(axis=0), rows.train.std(axis=0)
    divisor = np.where(deviation > 0, deviation, 1.0)
    train, test = ((part - mean) / divisor for part in (rows.train, rows.test))
    moments = FLOAT32 * 2 * rows.train.shape[1] * len(np.unique(fleet.owners))
    standardized = replace(fleet, features=replace(rows, train=train, test=test))
    recipe = recipe or replace(MOMENTUM, learning_rate=RATES[layers])
    for point in linear_head(standardized, rounds=rounds, recipe=recipe):
        yield replace(point, bytes_up=point.bytes_up + moments)


def afl(fleet: Fleet, *, layers: str = "") -> Iterator[Point]:
    """Yield the regression without an intercept of the sums that `statistics` sends, with a ridge of almost 0."""
    rows = rows_of(fleet.of_layers(layers).features)
    square, sums = _sums(rows.train.astype(np.float64), rows.train_labels)
    weight = _ridge(square, sums, LAST_RIDGE * float(np.trace(square)) / len(square))
    yield Point(
        setting=f"{len(square):,}",
        accuracy=_accuracy(rows, rows.test @ weight),
        bytes_up=_sums_bytes(fleet, rows),
    )


def fedcof(fleet: Fleet, *, shrinkage: float, group: int = 0, layers: str = "") -> Iterator[Point]:
    """Yield the classifier of class means, of each device's images of a class or of groups of them.

    The covariance of a class is that of its means times their images; with the shrinkage, these are the sums that a
    regression needs, without the scatter between classes. A class's weights are divided by their length. Means are
    sent as FedTC's prototypes are.
    """
    rows = rows_of(fleet.of_layers(layers).features)
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
    weight = np.linalg.solve(scatter, sums.T)
    weight /= np.linalg.norm(weight, axis=0)
    yield Point(
        setting=f"groups of {group}" if group else "class means",
        accuracy=_accuracy(rows, rows.test @ weight),
        bytes_up=float(size),
    )


def _fedcof_rows(fleet: Fleet, *, layers: str) -> Iterator[Point]:
    for group, shrinkage in zip(GROUPS, SHRINKAGE[layers], strict=True):
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
    square, sums = _sums(train, rows.train_labels)
    values = number * (number + 1) // 2 + rows.classes * number
    for ridge in ridges:
        yield Point(
            setting=f"{number:,}",
            accuracy=_accuracy(rows, test @ _ridge(square, sums, ridge)),
            bytes_up=float(FLOAT32 * values * len(np.unique(fleet.owners))),
        )


def rows_of(features: Features) -> Features:
    """Return the rows of `statistics` in place of features, of training and test images."""
    feature_map = FeatureMap(features.train.shape[1], 0, 0, normalized=features.normalized)
    train, test = (
        np.concatenate(
            [mapped(feature_map, part[at : at + ROWS_PER_RUN]) for at in range(0, len(part), ROWS_PER_RUN)]
        )
        for part in (features.train, features.test)
    )
    return replace(features, train=train, test=test)


def _sums(rows: NDArray[np.floating], labels: NDArray[np.int64]) -> tuple[Array, Array]:
    """Return the sums of the products of values (D, D), and of the rows of each class (D, C)."""
    of_class = np.eye(int(labels.max()) + 1, dtype=rows.dtype)[labels]
    return (rows.T @ rows).astype(np.float64), (rows.T @ of_class).astype(np.float64)


def _ridge(square: Array, sums: Array, ridge: float) -> Array:
    """Return the weights (D, C) of the regression to one-hot labels."""
    from scipy.linalg import solve

    return np.asarray(solve(square + ridge * np.eye(len(square)), sums, assume_a="pos"), np.float64)


def _accuracy(rows: Features, scores: NDArray[np.floating]) -> float:
    return float((scores.argmax(axis=1) == rows.test_labels).mean())


def _sums_bytes(fleet: Fleet, rows: Features) -> float:
    """Return the bytes of all devices' sums of single images, packed and encoded as those of `statistics`."""
    total = 0
    for client in np.unique(fleet.owners):
        mine = fleet.owners == client
        labels = rows.train_labels[mine]
        of_class = {
            int(label): rows.train[mine][labels == label].astype(np.int8) for label in np.unique(labels)
        }
        total += len(encode(sums_submission(of_class, task=bytes(32), images=len(labels))))
    return float(total)


_DEEPER = {"": "", **{f", {name}": layers for name, layers in LAYERS.items()}}
METHODS: Mapping[str, Callable[[Fleet], Iterator[Point]]] = MappingProxyType(
    {
        **methods.METHODS,
        **{
            f"FedAvg, momentum{name}": partial(momentum_head, rounds=(3, 10, 30), layers=layers)
            for name, layers in _DEEPER.items()
        },
        **{f"AFL{name}": partial(afl, layers=layers) for name, layers in _DEEPER.items()},
        **{f"FedCOF{name}": partial(_fedcof_rows, layers=layers) for name, layers in _DEEPER.items()},
        "Fed3R-RF": fed3r_rf,
    }
)
