"""The methods of the benchmark, and their settings, all of which are listed here before anything is measured."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.config.schema import Robust
from benchmarks import fleets
from benchmarks.accuracy import baselines
from benchmarks.accuracy.wire.sums import HEADS, Sums, accuracy_of, rows_of, sums_bytes, sums_of
from benchmarks.accuracy.wire.tuned import DEFAULT, Momentum, tuned
from benchmarks.pages import ROOT
from protofleet.simulation import rounds, statistics
from protofleet.simulation.fleet import Client, Features
from protofleet.simulation.partitions import Partition, share_out

UNBOUNDED = Robust(detect_outliers=False, max_multiple=0)
LAYERS: Mapping[str, str] = MappingProxyType(
    {"residual": "residual", "c384 + c576": "c384,c576", "c384 + c576 + c960": DEFAULT}
)
"""Deeper features by their name in tables; the last ones are the default of `export-backbone`."""

CLIENTS = 10
PARTITION = Partition("dirichlet", 0.1)
ALPHA = 0.99
RANDOM_FEATURES = 1024
FLOWER = ("Flower, FedAvg", "Flower, FedProx")
FLOWER_ROUNDS = (1, 3, 10, 25)
FLOWER_DATA = "fashion_mnist"
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

    data: str
    """The data set's name."""
    seed: int
    load: Callable[[str], Features]
    """Returns all devices' images as features of these layers, of the last one if there are none."""
    layers: str = ""

    def of_layers(self, layers: str) -> "Fleet":
        """Return the devices with features of these layers."""
        return replace(self, layers=layers)

    @property
    def features(self) -> Features:
        """The features of all images."""
        return self.load(self.layers)

    @property
    def owners(self) -> NDArray[np.int64]:
        """The device of each training image, (n,)."""
        rng = np.random.default_rng(self.seed)
        return share_out(self.features.train_labels, PARTITION, clients=CLIENTS, rng=rng)

    @property
    def clients(self) -> list[Client]:
        """The devices, all of which are evaluated on all test images alike."""
        data, owners = self.features, self.owners
        number = len(data.test_labels)
        return [
            Client(
                domain="",
                train=data.train[mine],
                train_labels=data.train_labels[mine],
                test=data.test,
                test_labels=data.test_labels,
                weights=np.full(number, 1 / number),
            )
            for mine in (owners == client for client in np.unique(owners))
        ]

    def settings(self, *, batch: int, prototypes: Literal["auto", "batches"] = "batches") -> fleets.Settings:
        """Return FedTC's settings."""
        return fleets.Settings(batch_size=batch, prototypes=prototypes, max_multiple=0)


def _fedtc(fleet: Fleet, *, layers: str = "") -> Iterator[Point]:
    """Yield FedTC with the prototypes that devices upload by default."""
    yield _fedtc_point(fleet.of_layers(layers), "auto", fleet.settings(batch=5, prototypes="auto"))


def _batches(fleet: Fleet, *, batches: Sequence[int], layers: str = "") -> Iterator[Point]:
    for batch in batches:
        yield _fedtc_point(fleet.of_layers(layers), f"B {batch}", fleet.settings(batch=batch))


def _fedtc_point(fleet: Fleet, setting: str, settings: fleets.Settings) -> Point:
    made, _ = fleets.train_clients(fleet.features, fleet.owners, settings, seed=fleet.seed)
    return Point(setting=setting, accuracy=made.accuracy, bytes_up=made.bytes_up)


def _all_features(fleet: Fleet, *, layers: str = "") -> Iterator[Point]:
    """Yield FedTC's head of all features in one place, and the bytes of these in float32."""
    features = fleet.of_layers(layers).features
    made = fleets.run_ceiling(features, fleet.settings(batch=1), seed=fleet.seed)
    yield Point(setting="", accuracy=made.accuracy, bytes_up=float(features.train.nbytes))


def _statistics(fleet: Fleet, *, batch: int, random_features: int = 0, layers: str = "") -> Iterator[Point]:
    """Yield the head from sums (B 1) or rows of groups."""
    fleet = fleet.of_layers(layers)
    data = statistics.map_features(fleet.features, random_features=random_features, seed=fleet.seed)
    made = statistics.run_fleet(data, fleet.owners, batch_size=batch, seed=fleet.seed, robust=UNBOUNDED)
    width = f"{fleet.features.train.shape[1]:,}" + (f" + {random_features:,}" if random_features else "")
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
    if fleet.data == FLOWER_DATA and fleet.seed == 0 and len(fleet.owners) == int(stored["images"]):
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


FLOAT32 = 4


def momentum_head(
    fleet: Fleet, *, rounds: Sequence[int], layers: str = "", momentum: Momentum | None = None
) -> Iterator[Point]:
    """Yield FedAvg of a linear head with server momentum, of rows standardized by the moments of all devices.

    Each device first sends the sums of its rows' values and of their squares, in float32.
    """
    fleet = fleet.of_layers(layers)
    rows = rows_of(fleet.features)
    mean, deviation = rows.train.mean(axis=0), rows.train.std(axis=0)
    divisor = np.where(deviation > 0, deviation, 1.0)
    train, test = ((part - mean) / divisor for part in (rows.train, rows.test))
    moments = FLOAT32 * 2 * rows.train.shape[1] * len(np.unique(fleet.owners))
    standardized = replace(rows, train=train, test=test)
    recipe = replace(LINEAR, server_momentum=0.9, **asdict(momentum or tuned(fleet.data, layers).momentum))
    for point in linear_head(replace(fleet, load=lambda _: standardized), rounds=rounds, recipe=recipe):
        yield replace(point, bytes_up=point.bytes_up + moments)


def of_sums(fleet: Fleet, *, method: str, layers: str = "") -> Iterator[Point]:
    """Yield one of HEADS of the sums that `statistics` sends, as published and with the best strength of its ridge."""
    rows, sums, sent = _summed(fleet.of_layers(layers))
    head, published = HEADS[method]
    best = tuned(fleet.data, layers).strengths.get(method, published)
    size = f"{len(sums.square):,}"
    for strength in dict.fromkeys((published, best)):
        yield Point(
            setting=size if strength == published else f"{size}, strength {strength:g}",
            accuracy=accuracy_of(rows, head(sums, strength)),
            bytes_up=sent,
        )


@lru_cache(maxsize=1)
def _summed(fleet: Fleet) -> tuple[Features, Sums, float]:
    """Return the rows, their sums, and the bytes of all devices' sums."""
    rows = rows_of(fleet.features)
    sums = sums_of(rows.train.astype(np.float64), rows.train_labels)
    return rows, sums, sums_bytes(rows, fleet.owners)


DEEPER = {"": "", **{f", {name}": layers for name, layers in LAYERS.items()}}
METHODS: Mapping[str, Callable[[Fleet], Iterator[Point]]] = MappingProxyType(
    {
        **{f"FedTC{name}": partial(_fedtc, layers=layers) for name, layers in DEEPER.items()},
        "FedTC, batches": partial(_batches, batches=(100, 25, 10, 5, 3, 2)),
        **{
            f"FedTC, batches, {name}": partial(_batches, batches=(5,), layers=layers)
            for name, layers in LAYERS.items()
        },
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
        **{
            f"{method}{name}": partial(of_sums, method=method, layers=layers)
            for method in HEADS
            for name, layers in DEEPER.items()
        },
    }
)
