"""Simulated fleets and what the benchmarks measure of them: accuracy, calibration and bytes."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.head import Dense, logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES, Recipe
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.config.schema import Robust
from aggregator.coordination.bounds import MAX_MULTIPLE
from aggregator.intake.validation import Expectation, Prototypes
from aggregator.training.robust.training_set import judged_set
from protofleet.simulation.fedtc import expectation_of, fleet_submissions
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, share_out
from protofleet.submissions import decoded

ALL_FEATURES = "all features"
"""In place of a partition: a head of all features themselves, in one place."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all runs of a measurement share."""

    clients: int = 10
    alpha: float = 0.99
    """Share of each class's features that filtering keeps."""
    batch_size: int = 5
    """Images in a prototype, B."""
    prototypes: Literal["auto", "batches"] = "auto"
    """As `[client] prototypes` in the task file."""
    max_multiple: float = MAX_MULTIPLE
    """Times the median device's images that a device's count at most; 0 is without limit."""
    recipe: Recipe = RECIPES["default"]
    device: str = "cpu"

    def expectation(self, features: Features) -> Expectation:
        """Return the task as the aggregator would publish it."""
        # The paper's recipe has no principal prototypes.
        prototypes = self.prototypes if self.recipe.closed_form else "batches"
        return expectation_of(features, alpha=self.alpha, batch_size=self.batch_size, prototypes=prototypes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The head of FedTC on a fleet."""

    partition: str
    seed: int
    accuracy: float
    calibration_error: float
    devices: int
    """Clients that had something to send."""
    images: int
    """Averaged in the prototypes."""
    prototypes: int
    """With principal prototypes, the means of classes on devices."""
    bytes_up: int
    """Bytes of all submissions, as encoded for the wire."""
    tensor_bytes: int
    """Bytes of the values among them."""
    head_bytes: int
    """Bytes of the head's arrays."""
    epochs: int
    train_seconds: float


def run_fleet(features: Features, partition: Partition, settings: Settings, *, seed: int) -> Result:
    """Divide the images, encode every client's submission, train on the decoded ones, and evaluate the head."""
    return train_fleet(features, partition, settings, seed=seed)[0]


def train_fleet(
    features: Features, partition: Partition, settings: Settings, *, seed: int
) -> tuple[Result, Sequence[Dense]]:
    """Return the result of `run_fleet`, and the head."""
    owners = _owners(features, partition, settings, seed=seed)
    result, head = train_clients(features, owners, settings, seed=seed)
    return dataclasses.replace(result, partition=str(partition)), head


def train_clients(
    features: Features, owners: NDArray[np.int64], settings: Settings, *, seed: int
) -> tuple[Result, Sequence[Dense]]:
    """Return the result and the head of a fleet whose images are divided already.

    `owners` are the clients of the training images, (n,).
    """
    expectation = settings.expectation(features)
    payloads = fleet_submissions(features, owners, expectation, seed=seed)
    data, _, _ = judged_set(
        {client: decoded(payload, expectation) for client, payload in payloads.items()},
        classes=expectation.manifest.classes,
        widths=features.widths,
        robust=Robust(detect_outliers=False, max_multiple=settings.max_multiple),
    )
    result, head = _trained(data, features, settings.recipe, settings, seed=seed)
    size = sum(map(len, payloads.values()))
    return dataclasses.replace(result, partition="given", devices=len(payloads), bytes_up=size), head


def fleet_prototypes(
    features: Features, partition: Partition, settings: Settings, *, seed: int
) -> dict[str, Prototypes]:
    """Return the checked submission of each client that has something to send."""
    expectation = settings.expectation(features)
    owners = _owners(features, partition, settings, seed=seed)
    payloads = fleet_submissions(features, owners, expectation, seed=seed)
    return {client: decoded(payload, expectation) for client, payload in payloads.items()}


def run_ceiling(features: Features, settings: Settings, *, seed: int) -> Result:
    """Train the same head by the same recipe on every feature itself."""
    everything = Prototypes(features.train, features.train_labels, np.ones_like(features.train_labels))
    recipe = dataclasses.replace(settings.recipe, restore=False, mix=False)
    return _trained(training_set(everything, features), features, recipe, settings, seed=seed)[0]


def _trained(
    data: TrainingSet, features: Features, recipe: Recipe, settings: Settings, *, seed: int
) -> tuple[Result, Sequence[Dense]]:
    """Return a head's result, of no devices, and the head."""
    started_s = time.perf_counter()
    trained = train_head(data, recipe, seed=seed, device=settings.device)
    seconds = time.perf_counter() - started_s
    logits = logits_of(trained.layers, features.test)
    result = Result(
        partition=ALL_FEATURES,
        seed=seed,
        accuracy=float((logits.argmax(axis=1) == features.test_labels).mean()),
        calibration_error=calibration_error(logits, features.test_labels),
        devices=0,
        images=int(data.counts.sum()),
        prototypes=len(data.labels),
        bytes_up=0,
        tensor_bytes=data.values.size + (0 if data.scatter is None else data.scatter.size),
        head_bytes=sum(layer.nbytes for layer in trained.layers),
        epochs=trained.epochs,
        train_seconds=seconds,
    )
    return result, trained.layers


def _owners(features: Features, partition: Partition, settings: Settings, *, seed: int) -> NDArray[np.int64]:
    """Return the client of each training image, (n,)."""
    rng = np.random.default_rng(seed)
    return share_out(features.train_labels, partition, clients=settings.clients, rng=rng)


def training_set(prototypes: Prototypes, features: Features) -> TrainingSet:
    """Return prototypes that all count alike, to train a head from."""
    return TrainingSet(
        *(prototypes.values, prototypes.labels, prototypes.counts, features.classes), widths=features.widths
    )


def accuracy_of(layers: Sequence[Dense], features: Features) -> float:
    """Return the head's accuracy on the test images."""
    return float((logits_of(layers, features.test).argmax(axis=1) == features.test_labels).mean())


def calibration_error(logits: NDArray[np.float32], truth: NDArray[np.int64], *, bins: int = 15) -> float:
    """Return the expected calibration error (Guo et al., ICML 2017, eq. 3) of logits (n, C)."""
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    confidence, correct = odds.max(axis=1) / odds.sum(axis=1), logits.argmax(axis=1) == truth
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [correct[place == each].sum() - confidence[place == each].sum() for each in range(bins)]
    return float(np.abs(gaps).sum() / len(truth))
