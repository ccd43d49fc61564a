"""Every algorithm with its default settings on one simulated fleet, and the heads that a fleet competes with."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Algorithm, OneShot, RoundAlgorithm, Training
from aggregator.algorithms.fedtc.head import Dense, logits_of, require_layers
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.algorithms.statistics.feature_map import Statistics
from aggregator.config.schema import Client as ClientSettings
from aggregator.config.schema import Robust
from aggregator.graphs.head_export import head_to_onnx
from aggregator.training.robust.training_set import judged_set
from aggregator.training.robust.weights import Counting
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import HeadMetadata
from protofleet.simulation import fedtc, statistics
from protofleet.simulation.engine import LOCAL, Engine
from protofleet.simulation.fleet import Client, Features, pooled
from protofleet.submissions import decoded

Logits = Sequence[NDArray[np.float32]]

SEED = 0
"""Of all algorithms, as by default: a fleet's seed draws the devices' images."""

TRAINING = Training(seed=SEED, device="cpu")

NO_OUTLIERS = Robust(detect_outliers=False)

TINY = 1e-30
"""Added to probabilities before their logarithm."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The heads that an algorithm makes for a fleet, and their cost."""

    logits: Logits
    """Of each client's test images, (K) times (m, C)."""
    is_shared: bool = False
    """True if all clients have one head, whose predictions a device adjusts to its classes."""
    uploads: int = 0
    up_bytes: float = 0.0
    """Bytes of all of a device's uploads, mean over the devices."""
    down_bytes: float = 0.0
    """Bytes of all of a device's downloads but the backbone."""
    seconds: float
    """Processor time of all devices and the aggregator, without backbones, the export of graphs and evaluation."""
    quarantined: tuple[str, ...] = ()
    """Numbers of the clients that were quarantined as outliers; unknown in rounds."""
    counting: Counting | None = None
    """How many images the head is made of; unknown in rounds."""


def train(
    method: Algorithm, clients: Sequence[Client], *, classes: int, robust: Robust, engine: Engine = LOCAL
) -> Trained:
    """Return the result of an algorithm with the default settings of devices."""
    if isinstance(method, RoundAlgorithm):
        return train_rounds(method, clients, classes=classes, robust=robust, engine=engine)
    if isinstance(method, Statistics):
        batch_size, features = ClientSettings().batch_size, method.features
        return train_statistics(
            clients, batch_size=batch_size, features=features, robust=robust, engine=engine
        )
    if isinstance(method, OneShot) and not method.sums:
        return train_prototypes(method, clients, robust=robust, engine=engine)
    raise ConfigError(f"{method.name}: expected an algorithm of rounds, or a OneShot of prototypes")


def train_prototypes(
    method: OneShot,
    clients: Sequence[Client],
    *,
    robust: Robust = NO_OUTLIERS,
    training: Training = TRAINING,
    engine: Engine = LOCAL,
) -> Trained:
    """Return the result of an algorithm of prototypes; the clients have the same test images."""
    features, owners = pooled(clients)
    started_s = engine.processor_s()
    defaults = ClientSettings()
    task = fedtc.expectation_of(
        features,
        alpha=defaults.alpha,
        batch_size=defaults.batch_size,
        prototypes="auto" if method.blocks and training.recipe == "default" else "batches",
    )
    payloads = fedtc.fleet_submissions(features, owners, task, seed=SEED, engine=engine)
    data, judgment, counting = judged_set(
        {client: decoded(payload, task) for client, payload in payloads.items()},
        classes=task.manifest.classes,
        widths=features.widths,
        robust=robust,
    )
    head = method.train(data, training).layers
    require_layers(head, features=data.values.shape[1], classes=data.num_classes)
    return Trained(
        logits=[logits_of(head, features.test)] * len(clients),
        is_shared=True,
        uploads=1,
        up_bytes=sum(map(len, payloads.values())) / len(clients),
        down_bytes=_head_bytes(head, features),
        seconds=engine.processor_s() - started_s,
        quarantined=tuple(sorted(judgment.quarantined)),
        counting=counting,
    )


def _head_bytes(head: Sequence[Dense], features: Features) -> int:
    """Return the size of the ONNX file that devices download."""
    metadata = HeadMetadata(
        classes=tuple(map(str, range(features.classes))),
        version=1,
        task="",
        backbones=(),
        feature_size=features.train.shape[1],
        training={},
    )
    return len(head_to_onnx(head, metadata=metadata))


def train_statistics(
    clients: Sequence[Client],
    *,
    batch_size: int,
    features: int = Statistics().features,
    robust: Robust = NO_OUTLIERS,
    engine: Engine = LOCAL,
) -> Trained:
    """Return the result of `statistics`; the clients have the same test images."""
    pool, owners = pooled(clients)
    started_s = engine.processor_s()
    data = statistics.map_features(pool, random_features=features, seed=SEED)
    made = statistics.run_fleet(data, owners, batch_size=batch_size, seed=SEED, robust=robust, engine=engine)
    return Trained(
        logits=[made.logits] * len(clients),
        is_shared=True,
        uploads=1,
        up_bytes=made.bytes_up / len(clients),
        down_bytes=made.bytes_down,
        seconds=engine.processor_s() - started_s,
        quarantined=tuple(made.quarantined),
        counting=made.counting,
    )


def train_rounds(
    algorithm: RoundAlgorithm,
    clients: Sequence[Client],
    *,
    classes: int,
    robust: Robust | None = None,
    engine: Engine = LOCAL,
) -> Trained:
    """Return the result of an algorithm of rounds."""
    from protofleet.simulation.rounds import run_rounds  # onnxscript and torch

    outcome = run_rounds(
        algorithm, clients, classes=classes, seed=SEED, robust=robust or Robust(), engine=engine
    )
    return Trained(
        logits=[np.log(mine + TINY) for mine in outcome.probabilities],
        uploads=algorithm.rounds,
        up_bytes=float(outcome.up_bytes.sum()),
        down_bytes=float(outcome.down_bytes.sum()) + outcome.once_bytes,
        seconds=outcome.seconds,
    )


def train_in_one_place(clients: Sequence[Client]) -> Trained:
    """Return FedTC's head of all features themselves: what uploading all images would reach."""
    features, _ = pooled(clients)
    started_s = time.process_time()
    logits = _logits_of_features(features, features.classes, adapter=True)
    return Trained(logits=[logits] * len(clients), is_shared=True, seconds=time.process_time() - started_s)


def train_alone(clients: Sequence[Client], *, classes: int, engine: Engine = LOCAL) -> Trained:
    """Return a linear discriminant of each client's own features: what a device reaches without the fleet.

    The clients have the same test images.
    """
    started_s = engine.processor_s()
    items = ((client.train, client.train_labels) for client in clients)
    shared = (clients[0].test, clients[0].test_labels, clients[0].widths, classes)
    logits = list(engine.map(_logits_alone, shared, items, count=len(clients)))
    return Trained(logits=logits, seconds=engine.processor_s() - started_s)


def _logits_alone(
    shared: tuple[NDArray[np.float32], NDArray[np.int64], tuple[int, ...], int],
    device: tuple[NDArray[np.float32], NDArray[np.int64]],
) -> NDArray[np.float32]:
    test, truth, widths, classes = shared
    return _logits_of_features(Features(*device, test, truth, widths=widths), classes, adapter=False)


def _logits_of_features(data: Features, classes: int, *, adapter: bool) -> NDArray[np.float32]:
    """Return the test images' logits, (m, C), by a head of features that no device has averaged."""
    recipe = replace(RECIPES["default"], restore=False, mix=False, adapter=adapter)
    labels = data.train_labels
    everything = TrainingSet(data.train, labels, np.ones_like(labels), classes, widths=data.widths)
    return logits_of(train_head(everything, recipe, seed=SEED, device="cpu").layers, data.test)
