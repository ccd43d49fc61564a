"""FedTC in process: the devices' and the aggregator's own functions and messages, without a network.

Measured are the head's accuracy on images that no device has, the cost of its training and the bytes uploaded, and
the accuracy of the same head trained on all the features themselves: the ceiling.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import OneShot, Training
from aggregator.algorithms.fedtc.head import Dense, logits_of
from aggregator.algorithms.fedtc.recipe import Recipe
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.config.schema import MAX_MULTIPLE, Robust
from aggregator.intake.validation import Expectation, Prototypes, check_submission, read_message
from aggregator.training.robust.training_set import judged_set, pool
from aggregator.training.robust.weights import Counting
from protocol.wire.codec import digest_of, encode, to_unsigned
from protocol.wire.messages import BlobRef, Submission, TaskManifest
from protocol.wire.quantization import prototype_fields
from protofleet.prototypes import average_class
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, share_out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all runs of a measurement share."""

    clients: int
    alpha: float
    """Share of each class's features that filtering keeps."""
    batch_size: int
    """Images in a prototype, B."""
    max_multiple: float = MAX_MULTIPLE
    """Times the median device's images that a device's count at most; 0 is without limit."""
    detect_outliers: bool = False
    """Quarantine outliers, as the aggregator does by default."""
    recipe: Recipe
    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One fleet's head."""

    partition: str
    seed: int
    accuracy: float
    calibration_error: float
    devices: int
    """Clients that had something to send."""
    images: int
    """Averaged in the prototypes."""
    prototypes: int
    bytes_up: int
    """Bytes of all submissions, as encoded for the wire."""
    tensor_bytes: int
    """Bytes of the prototypes among them."""
    head_bytes: int
    """Bytes of the head's arrays."""
    epochs: int
    train_seconds: float
    quarantined: tuple[str, ...] = ()
    counting: Counting | None = None


ALL_FEATURES = "all features"
"""In place of a partition: a head of all features themselves, in one place."""


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
    features: Features,
    owners: NDArray[np.int64],
    settings: Settings,
    *,
    seed: int,
    method: OneShot | None = None,
) -> tuple[Result, Sequence[Dense]]:
    """Return the result and the head of a fleet whose images are divided already.

    `owners` are the clients of the training images, (n,). Without a `method`, the head is FedTC's, by its recipe.
    """
    expectation = _expectation(features, settings)
    payloads = _submissions(features, owners, settings, seed=seed)
    data, judgment, counting = judged_set(
        {client: decoded(payload, expectation) for client, payload in payloads.items()},
        classes=expectation.manifest.classes,
        widths=features.widths,
        robust=Robust(detect_outliers=settings.detect_outliers, max_multiple=settings.max_multiple),
    )
    result, head = _trained(data, features, settings.recipe, settings, seed=seed, method=method)
    fleet = dataclasses.replace(
        result,
        partition="given",
        devices=len(payloads),
        bytes_up=sum(map(len, payloads.values())),
        quarantined=tuple(sorted(judgment.quarantined)),
        counting=counting,
    )
    return fleet, head


def fleet_prototypes(
    features: Features, partition: Partition, settings: Settings, *, seed: int
) -> dict[str, Prototypes]:
    """Return the checked submission of each client that has something to send."""
    expectation = _expectation(features, settings)
    owners = _owners(features, partition, settings, seed=seed)
    payloads = _submissions(features, owners, settings, seed=seed)
    return {client: decoded(payload, expectation) for client, payload in payloads.items()}


def run_ceiling(features: Features, settings: Settings, *, seed: int) -> Result:
    """Train the same head by the same recipe on every feature itself."""
    return train_ceiling(features, settings, seed=seed)[0]


def train_ceiling(features: Features, settings: Settings, *, seed: int) -> tuple[Result, Sequence[Dense]]:
    """Return the result of `run_ceiling`, and the head."""
    everything = Prototypes(features.train, features.train_labels, np.ones_like(features.train_labels))
    recipe = dataclasses.replace(settings.recipe, restore=False, mix=False)
    return _trained(training_set(everything, features), features, recipe, settings, seed=seed)


def _trained(
    data: TrainingSet,
    features: Features,
    recipe: Recipe,
    settings: Settings,
    *,
    seed: int,
    method: OneShot | None = None,
) -> tuple[Result, Sequence[Dense]]:
    """Return a head's result, of no devices, and the head."""
    started_s = time.perf_counter()
    if method is None:
        trained = train_head(data, recipe, seed=seed, device=settings.device)
    else:
        trained = method.train(data, Training(seed=seed, device=settings.device))
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
        tensor_bytes=data.values.size,
        head_bytes=sum(layer.nbytes for layer in trained.layers),
        epochs=trained.epochs,
        train_seconds=seconds,
    )
    return result, trained.layers


def task_manifest(algorithm: str, classes: int, **settings: Any) -> TaskManifest:
    """Return the manifest of a task whose features are given."""
    return TaskManifest(
        fleet="simulation",
        algorithm=algorithm,
        classes=tuple(map(str, range(classes))),
        backbones=(BlobRef(digest=bytes(32), size_bytes=1, name="features are given"),),
        **settings,
    )


def _expectation(features: Features, settings: Settings) -> Expectation:
    """Return the task as the aggregator would publish it."""
    manifest = task_manifest(
        "fedtc",
        features.classes,
        alpha=settings.alpha,
        batch_size=settings.batch_size,
        min_images=min(2, settings.batch_size),
        seed=0,
    )
    return Expectation(digest_of(encode(manifest)), manifest, features.train.shape[1])


def _owners(features: Features, partition: Partition, settings: Settings, *, seed: int) -> NDArray[np.int64]:
    """Return the client of each training image, (n,)."""
    rng = np.random.default_rng(seed)
    return share_out(features.train_labels, partition, clients=settings.clients, rng=rng)


def _submissions(
    features: Features, owners: NDArray[np.int64], settings: Settings, *, seed: int
) -> dict[str, bytes]:
    """Return each client's encoded submission, except of clients with nothing to send."""
    task = _expectation(features, settings).task
    return {
        client: encode(
            submission_of(
                mine,
                task=task,
                images=int(np.count_nonzero(owners == int(client))),
                **prototype_fields(mine.values.astype(np.float16)),
            )
        )
        for client, mine in client_prototypes(features, owners, settings, seed=seed).items()
    }


def submission_of(mine: Prototypes, *, task: bytes, images: int, **fields: Any) -> Submission:
    """Return a client's submission, with the values of its prototypes as `fields`."""
    return Submission(
        task=task,
        sequence=1,
        labels=to_unsigned(mine.labels),
        counts=to_unsigned(mine.counts),
        images=images,
        **fields,
    )


def client_prototypes(
    features: Features, owners: NDArray[np.int64], settings: Settings, *, seed: int
) -> dict[str, Prototypes]:
    """Return the prototypes of each client that has any, before they are rounded for the wire."""
    expectation = _expectation(features, settings)
    made = {}
    for client in np.unique(owners):
        rng = np.random.default_rng([seed, int(client)])
        of_class = [
            _prototypes(
                features.train[(owners == client) & (features.train_labels == label)], label, expectation, rng
            )
            for label in range(features.classes)
        ]
        mine = pool(of_class)
        if len(mine.labels):
            made[str(client)] = mine
    return made


def _prototypes(
    features: NDArray[np.float32], label: int, expectation: Expectation, rng: np.random.Generator
) -> Prototypes:
    """Return a client's prototypes of one class."""
    task = expectation.manifest
    values, counts = average_class(features, batch=task.batch_size, rng=rng, alpha=task.alpha)
    return Prototypes(values, np.full(len(counts), label), counts.astype(np.int64))


def decoded(payload: bytes, expectation: Expectation) -> Prototypes:
    """Return the checked prototypes of an encoded submission."""
    message = read_message(payload)
    if not isinstance(message, Submission):
        raise TypeError(f"a simulated client sent {type(message).__name__}")
    return check_submission(message, expectation)


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
