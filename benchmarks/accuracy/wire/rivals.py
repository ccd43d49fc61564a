"""Rivals of FedTC and statistics, with the rows of `statistics` and settings chosen on validation images.

AFL: He et al., "AFL: A single-round analytic approach for federated learning with pre-trained models", 2024.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.graphs.head_export import mapped
from benchmarks.accuracy import baselines
from benchmarks.accuracy.wire import methods
from benchmarks.accuracy.wire.methods import LAYERS, Fleet, Point, linear_head
from protocol.wire.codec import encode
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
RATES: Mapping[str, float] = MappingProxyType({"": 0.003, "residual": 0.01, "c384,c576": 0.01})
"""The learning rate with momentum, by layers: the best of `tune-wire`."""


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
    square, of_classes = sums(rows.train.astype(np.float64), rows.train_labels)
    weight = ridge(square, of_classes, LAST_RIDGE * float(np.trace(square)) / len(square))
    yield Point(
        setting=f"{len(square):,}",
        accuracy=accuracy_of(rows, rows.test @ weight),
        bytes_up=_sums_bytes(fleet, rows),
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


def sums(rows: NDArray[np.floating], labels: NDArray[np.int64]) -> tuple[Array, Array]:
    """Return the sums of the products of values (D, D), and of the rows of each class (D, C)."""
    of_class = np.eye(int(labels.max()) + 1, dtype=rows.dtype)[labels]
    return (rows.T @ rows).astype(np.float64), (rows.T @ of_class).astype(np.float64)


def ridge(square: Array, of_classes: Array, strength: float) -> Array:
    """Return the weights (D, C) of the regression to one-hot labels."""
    from scipy.linalg import solve

    return np.asarray(solve(square + strength * np.eye(len(square)), of_classes, assume_a="pos"), np.float64)


def accuracy_of(rows: Features, scores: NDArray[np.floating]) -> float:
    """Return the share of test images with the greatest score for their class."""
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


DEEPER = {"": "", **{f", {name}": layers for name, layers in LAYERS.items()}}
METHODS: Mapping[str, Callable[[Fleet], Iterator[Point]]] = MappingProxyType(
    {
        **methods.METHODS,
        **{
            f"FedAvg, momentum{name}": partial(momentum_head, rounds=(3, 10, 30), layers=layers)
            for name, layers in DEEPER.items()
        },
        **{f"AFL{name}": partial(afl, layers=layers) for name, layers in DEEPER.items()},
    }
)
