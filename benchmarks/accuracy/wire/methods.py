"""The methods of the benchmark, and their settings, all of which are listed here before anything is measured.

AFL: He et al., "AFL: A single-round analytic approach for federated learning with pre-trained models", 2024.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.config.schema import Robust
from aggregator.graphs.head_export import mapped
from benchmarks import fleets
from benchmarks.accuracy import baselines
from benchmarks.pages import ROOT
from protocol.wire.codec import encode
from protofleet.simulation import rounds, statistics
from protofleet.simulation.fleet import Client, Features
from protofleet.simulation.statistics import ROWS_PER_RUN, sums_submission

UNBOUNDED = Robust(detect_outliers=False, max_multiple=0)
LAYERS: Mapping[str, str] = MappingProxyType({"residual": "residual", "c384 + c576": "c384,c576"})
"""Deeper features by their name in tables."""

CLIENTS = 10
ALPHA = 0.99
RANDOM_FEATURES = 1024
FLOWER = ("Flower, FedAvg", "Flower, FedProx")
FLOWER_ROUNDS = (1, 3, 10, 25)
LINEAR = baselines.Recipe(
    rounds=1,
    epochs=1,
    batch_size=64,
    optimizer="sgd",
    learning_rate=0.003,
    weight_decay=0.0,
    standardize=False,
    adapter_size=0,
)
"""Of FedAvg of a linear head; the learning rate and the epochs are the best of `research tune-wire`."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A setting of a method."""

    setting: str
    accuracy: float
    """On the test images, the mean over devices where each has a head of its own."""
    bytes_up: float
    """Of all uploads of all devices."""
    uploads: int = 1
    """Of each device."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The devices of a seed."""

    owners: NDArray[np.int64]
    """The device of each training image, (n,)."""
    seed: int
    features: Features
    deeper: Callable[[str], Features]
    """Returns the same images' features of these layers."""

    def of_layers(self, layers: str) -> "Fleet":
        """Return the devices with features of these layers, of the last one if there are none."""
        return replace(self, features=self.deeper(layers)) if layers else self

    @property
    def clients(self) -> list[Client]:
        """The devices, all of which are evaluated on all test images alike."""
        data, number = self.features, len(self.features.test_labels)
        return [
            Client(
                domain="",
                train=data.train[mine],
                train_labels=data.train_labels[mine],
                test=data.test,
                test_labels=data.test_labels,
                weights=np.full(number, 1 / number),
            )
            for mine in (self.owners == client for client in np.unique(self.owners))
        ]

    def settings(self, *, batch: int) -> fleets.Settings:
        """Return FedTC's settings."""
        return fleets.Settings(batch_size=batch, max_multiple=0)


def _fedtc(fleet: Fleet, *, batches: Sequence[int], layers: str = "") -> Iterator[Point]:
    features = fleet.of_layers(layers).features
    for batch in batches:
        made, _ = fleets.train_clients(features, fleet.owners, fleet.settings(batch=batch), seed=fleet.seed)
        yield Point(setting=f"B {batch}", accuracy=made.accuracy, bytes_up=made.bytes_up)


def _all_features(fleet: Fleet, *, layers: str = "") -> Iterator[Point]:
    """Yield FedTC's head of all features in one place, and the bytes of these in float32."""
    features = fleet.of_layers(layers).features
    made = fleets.run_ceiling(features, fleet.settings(batch=1), seed=fleet.seed)
    yield Point(setting="", accuracy=made.accuracy, bytes_up=float(features.train.nbytes))


def _statistics(fleet: Fleet, *, batch: int, random_features: int = 0, layers: str = "") -> Iterator[Point]:
    """Yield the head from sums (B 1) or rows of groups."""
    features = fleet.of_layers(layers).features
    data = statistics.map_features(features, random_features=random_features, seed=fleet.seed)
    made = statistics.run_fleet(data, fleet.owners, batch_size=batch, seed=fleet.seed, robust=UNBOUNDED)
    width = f"{features.train.shape[1]:,}" + (f" + {random_features:,}" if random_features else "")
    yield Point(setting=f"B {batch}, {width}", accuracy=made.accuracy, bytes_up=made.bytes_up)


def _rounds(fleet: Fleet, *, algorithm: RoundAlgorithm) -> Iterator[Point]:
    clients, robust = fleet.clients, Robust(max_multiple=0)
    classes = fleet.features.classes
    outcome = rounds.run_rounds(algorithm, clients, classes=classes, seed=fleet.seed, robust=robust)
    accuracies = [
        client.accuracy(probabilities.argmax(axis=1))
        for client, probabilities in zip(clients, outcome.probabilities, strict=True)
    ]
    yield Point(
        setting=f"{algorithm.rounds} rounds",
        accuracy=float(np.mean(accuracies)),
        bytes_up=float(outcome.up_bytes.sum()) * len(clients),
        uploads=algorithm.rounds,
    )


def linear_head(fleet: Fleet, *, rounds: Sequence[int], recipe: baselines.Recipe = LINEAR) -> Iterator[Point]:
    """Yield FedAvg of a linear head, whose bytes are those of its parameters in float16."""
    clients, classes = fleet.clients, fleet.features.classes
    each = baselines.linear_bytes(feature_size=fleet.features.train.shape[1], classes=classes)
    for number in rounds:
        reached = baselines.average_accuracies(
            clients, replace(recipe, rounds=number), classes=classes, seed=fleet.seed
        )
        yield Point(
            setting=f"{number} rounds",
            accuracy=float(reached.mean()),
            bytes_up=float(each * number * len(clients)),
            uploads=number,
        )


def _flower(fleet: Fleet, *, method: str) -> Iterator[Point]:
    """Yield the rounds of a measured run of Flower's programs on the same images, which is of seed 0."""
    stored = flower_run()
    if fleet.seed == 0 and len(fleet.owners) == int(stored["images"]):
        for number, each in enumerate(stored["runs"][method]["rounds"], 1):
            if number not in FLOWER_ROUNDS:
                continue
            yield Point(
                setting=f"{number} rounds",
                accuracy=each["accuracy"],
                bytes_up=float(each["bytes_up"]),
                uploads=number,
            )


def flower_run() -> dict[str, Any]:
    """Return the stored result of `benchmarks flower`, with the number of its training images."""
    stored: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "flower.json").read_text("utf-8"))
    words = stored["command"].split()
    return {**stored, "images": words[words.index("--images") + 1]}


def flower_bytes() -> float:
    """Return the bytes that Flower's ten clients together send in a round."""
    rounds = flower_run()["runs"][FLOWER[0]]["rounds"]
    return float(rounds[-1]["bytes_up"]) / len(rounds)


Array = NDArray[np.float64]

FLOAT32 = 4
LAST_RIDGE = 1e-9
"""AFL's ridge, relative to the mean square of a row's values: rows have nearly the mean 0, so that one direction is
nearly without values."""

MOMENTUM = replace(LINEAR, server_momentum=0.9)
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
        "FedTC": partial(_fedtc, batches=(100, 25, 10, 5, 3, 2)),
        **{f"FedTC, {name}": partial(_fedtc, batches=(5,), layers=layers) for name, layers in LAYERS.items()},
        "statistics, groups": partial(_statistics, batch=5),
        "statistics, sums": partial(_statistics, batch=1),
        **{
            f"statistics, sums, {name}": partial(_statistics, batch=1, layers=layers)
            for name, layers in LAYERS.items()
        },
        "statistics, sums, random features": partial(_statistics, batch=1, random_features=RANDOM_FEATURES),
        "hierarchical": partial(_rounds, algorithm=Hierarchical()),
        "fedproto": partial(_rounds, algorithm=FedProto()),
        "fedpcl": partial(_rounds, algorithm=FedPCL()),
        "fpl": partial(_rounds, algorithm=FPL()),
        "all features": _all_features,
        **{f"all features, {name}": partial(_all_features, layers=layers) for name, layers in LAYERS.items()},
        "FedAvg of a linear head": partial(linear_head, rounds=(1, 3, 10, 30, 100)),
        **{name: partial(_flower, method=name) for name in FLOWER},
        **{
            f"FedAvg, momentum{name}": partial(momentum_head, rounds=(3, 10, 30), layers=layers)
            for name, layers in DEEPER.items()
        },
        **{f"AFL{name}": partial(afl, layers=layers) for name, layers in DEEPER.items()},
    }
)
