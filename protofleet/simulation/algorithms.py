"""Every algorithm with its default settings on one simulated fleet, and the heads that a fleet competes with."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import OneShot, RoundAlgorithm
from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.algorithms.statistics.feature_map import Statistics
from aggregator.config.schema import Client as ClientSettings
from aggregator.config.schema import Robust
from aggregator.training.robust.weights import Counting
from protofleet.simulation import fedtc, statistics
from protofleet.simulation.fleet import Client, pooled

Logits = Sequence[NDArray[np.float32]]

SEED = 0
"""Of all algorithms, as by default: a fleet's seed draws the devices' images."""

NO_OUTLIERS = Robust(detect_outliers=False)

TINY = 1e-30
"""Added to probabilities before their logarithm."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The heads that an algorithm makes for a fleet, and their cost."""

    logits: Logits
    """Of each client's test images, (K) times (m, C)."""
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


def fedtc_settings(clients: Sequence[Client], *, robust: Robust = NO_OUTLIERS) -> fedtc.Settings:
    """Return the settings that the aggregator has by default, on the CPU."""
    defaults = ClientSettings()
    return fedtc.Settings(
        clients=len(clients),
        alpha=defaults.alpha,
        batch_size=defaults.batch_size,
        max_multiple=robust.max_multiple,
        detect_outliers=robust.detect_outliers,
        recipe=RECIPES["default"],
        device="cpu",
    )


def train_fedtc(
    clients: Sequence[Client], *, robust: Robust = NO_OUTLIERS, method: OneShot | None = None
) -> Trained:
    """Return the result of FedTC, or of another algorithm of prototypes; the clients have the same test images."""
    features, owners = pooled(clients)
    started_s = time.process_time()
    settings = fedtc_settings(clients, robust=robust)
    made, head = fedtc.train_clients(features, owners, settings, seed=SEED, method=method)
    return Trained(
        logits=[logits_of(head, features.test)] * len(clients),
        uploads=1,
        up_bytes=made.bytes_up / len(clients),
        down_bytes=len(statistics.head_file(features, head)),
        seconds=time.process_time() - started_s,
        quarantined=made.quarantined,
        counting=made.counting,
    )


def train_statistics(clients: Sequence[Client], *, batch_size: int, robust: Robust = NO_OUTLIERS) -> Trained:
    """Return the result of `statistics`; the clients have the same test images."""
    features, owners = pooled(clients)
    started_s = time.process_time()
    data = statistics.map_features(features, random_features=Statistics().features, seed=SEED)
    made = statistics.run_fleet(data, owners, batch_size=batch_size, seed=SEED, robust=robust)
    return Trained(
        logits=[made.logits] * len(clients),
        uploads=1,
        up_bytes=made.bytes_up / len(clients),
        down_bytes=made.map_bytes + made.head_bytes,
        seconds=time.process_time() - started_s,
        quarantined=tuple(made.quarantined),
        counting=made.counting,
    )


def train_rounds(
    algorithm: RoundAlgorithm, clients: Sequence[Client], *, classes: int, robust: Robust | None = None
) -> Trained:
    """Return the result of an algorithm of rounds."""
    from protofleet.simulation.rounds import run_rounds  # onnxscript and torch

    outcome = run_rounds(algorithm, clients, classes=classes, seed=SEED, robust=robust or Robust())
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
    _, head = fedtc.train_ceiling(features, fedtc_settings(clients), seed=SEED)
    logits = logits_of(head, features.test)
    return Trained(logits=[logits] * len(clients), seconds=time.process_time() - started_s)


def train_alone(clients: Sequence[Client], *, classes: int) -> Trained:
    """Return a linear discriminant of each client's own features: what a device reaches without the fleet."""
    started_s = time.process_time()
    recipe = replace(RECIPES["default"], restore=False, mix=False, adapter=False)
    logits = []
    for client in clients:
        labels = client.train_labels
        data = TrainingSet(client.train, labels, np.ones_like(labels), classes, widths=client.widths)
        made = train_head(data, recipe, seed=SEED, device="cpu")
        logits.append(logits_of(made.layers, client.test))
    return Trained(logits=logits, seconds=time.process_time() - started_s)
