"""Every algorithm with its default settings on one fleet, by the functions of the other benchmarks."""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Algorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fedtc.head import Dense, logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.algorithms.layers import log_prior
from aggregator.config.schema import Client as ClientSettings
from aggregator.config.schema import StatisticsSettings
from benchmarks.accuracy import fedpcl, fedtc_fleet, statistics_fleet
from benchmarks.accuracy.baselines import baseline_logits
from benchmarks.accuracy.rounds import run_rounds
from benchmarks.data.domains import Client
from benchmarks.data.features import Features

Logits = Sequence[NDArray[np.float32]]

FEDTC = "fedtc"
REFINED = "fedtc, `refine = true`"
STATISTICS = "statistics"
SINGLE_IMAGES = "statistics, `batch_size = 1`"
ALONE = "each device alone"
ALL_FEATURES = "all features in one place"

IN_ROUNDS: tuple[Algorithm, ...] = (Hierarchical(), FedPCL(), FPL(), FedProto())

NAMES = (
    *(FEDTC, REFINED, STATISTICS, SINGLE_IMAGES),
    *(algorithm.name for algorithm in IN_ROUNDS),
    *(ALONE, ALL_FEATURES),
)
"""Rows of the tables, in their order; before a comma, the algorithm's name."""

SEED = 0
"""Of all algorithms, as by default: a fleet's seed draws the devices' images."""

TINY = 1e-30
"""Added to probabilities before their logarithm."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The heads that an algorithm makes for a fleet, and their cost."""

    logits: Logits
    """Of each client's test images, (K) times (m, C)."""
    with_prior: Logits = ()
    """Likewise, with the class prior of the client's own images; empty if the client's training has it anyway."""
    uploads: int = 0
    up_bytes: float = 0.0
    """Bytes of all of a device's uploads, mean over the devices."""
    down_bytes: float = 0.0
    """Bytes of all of a device's downloads but the backbone."""
    seconds: float
    """Processor time of all devices and the aggregator, without backbones, the export of graphs and evaluation."""


def train_all(
    clients: Sequence[Client], *, classes: int, prior: bool, names: Collection[str] = NAMES
) -> Iterator[tuple[str, Trained]]:
    """Yield what each algorithm makes of a fleet, by its name in tables; all clients have the same test images.

    Of `names`, the two of FedTC come together. Without `prior` there is no `with_prior` of an algorithm that would have
    to train again for it.
    """
    features, owners = _pooled(clients)
    if FEDTC in names or REFINED in names:
        head, trained = _fedtc(clients, features, owners)
        yield FEDTC, trained
        yield REFINED, _refined(trained, clients, features, owners, head)
    for name, batch_size in ((STATISTICS, ClientSettings().batch_size), (SINGLE_IMAGES, 1)):
        if name in names:
            yield name, _statistics(clients, features, owners, batch_size=batch_size)
    for algorithm in IN_ROUNDS:
        if algorithm.name in names:
            yield algorithm.name, _rounds(algorithm, clients, classes=classes, prior=prior)
    if ALONE in names:
        yield ALONE, _alone(clients, classes=classes)
    if ALL_FEATURES in names:
        yield ALL_FEATURES, _in_one_place(clients, features)


def _pooled(clients: Sequence[Client]) -> tuple[Features, NDArray[np.int64]]:
    """Return the images of all clients as one data set, and the client of each."""
    features = Features(
        train=np.concatenate([client.train for client in clients]),
        train_labels=np.concatenate([client.train_labels for client in clients]),
        test=clients[0].test,
        test_labels=clients[0].test_labels,
    )
    return features, np.repeat(np.arange(len(clients)), [len(client.train) for client in clients])


def _fedtc(
    clients: Sequence[Client], features: Features, owners: NDArray[np.int64]
) -> tuple[Sequence[Dense], Trained]:
    started_s = time.process_time()
    made, head = fedtc_fleet.train_clients(features, owners, _settings(clients), seed=SEED)
    trained = _one_head(
        logits_of(head, features.test),
        clients,
        uploads=1,
        up_bytes=made.bytes_up / len(clients),
        down_bytes=len(statistics_fleet.head_file(features, head)),
        seconds=time.process_time() - started_s,
    )
    return head, trained


def _settings(clients: Sequence[Client]) -> fedtc_fleet.Settings:
    defaults = ClientSettings()
    return fedtc_fleet.Settings(
        clients=len(clients),
        alpha=defaults.alpha,
        batch_size=defaults.batch_size,
        recipe=RECIPES["default"],
        device="cpu",
    )


def _refined(
    first: Trained,
    clients: Sequence[Client],
    features: Features,
    owners: NDArray[np.int64],
    head: Sequence[Dense],
) -> Trained:
    """Return FedTC's head made again of its adapter's features; without an adapter there is no second upload."""
    if len(head) == 1:
        return first
    started_s = time.process_time()
    data = statistics_fleet.map_by_adapter(features, head)
    made = statistics_fleet.run_fleet(data, owners, batch_size=ClientSettings().batch_size, seed=SEED)
    return _one_head(
        made.logits,
        clients,
        uploads=2,
        up_bytes=first.up_bytes + made.bytes_up / len(clients),
        down_bytes=first.down_bytes + made.map_bytes + made.head_bytes,
        seconds=first.seconds + time.process_time() - started_s,
    )


def _statistics(
    clients: Sequence[Client], features: Features, owners: NDArray[np.int64], *, batch_size: int
) -> Trained:
    started_s = time.process_time()
    data = statistics_fleet.map_features(features, random_features=StatisticsSettings().features, seed=SEED)
    made = statistics_fleet.run_fleet(data, owners, batch_size=batch_size, seed=SEED)
    return _one_head(
        made.logits,
        clients,
        uploads=1,
        up_bytes=made.bytes_up / len(clients),
        down_bytes=made.map_bytes + made.head_bytes,
        seconds=time.process_time() - started_s,
    )


def _rounds(algorithm: Algorithm, clients: Sequence[Client], *, classes: int, prior: bool) -> Trained:
    outcome = run_rounds(algorithm, clients, classes=classes, seed=SEED)
    logits = [np.log(mine + TINY) for mine in outcome.probabilities]
    with_prior: Logits = ()
    if isinstance(algorithm, FPL):
        with_prior = _add_prior(logits, clients)
    elif isinstance(algorithm, Hierarchical | FedPCL) and prior:
        again = run_rounds(structs.replace(algorithm, prior=True), clients, classes=classes, seed=SEED)
        with_prior = again.probabilities
    return Trained(
        logits=logits,
        with_prior=with_prior,
        uploads=algorithm.rounds,
        up_bytes=float(outcome.up_bytes.sum()),
        down_bytes=float(outcome.down_bytes.sum()) + outcome.once_bytes,
        seconds=outcome.seconds,
    )


def _alone(clients: Sequence[Client], *, classes: int) -> Trained:
    started_s = time.process_time()
    logits = baseline_logits("Solo", clients, fedpcl.RECIPES["Solo"], classes=classes, seed=SEED)
    return Trained(logits=logits, seconds=time.process_time() - started_s)


def _in_one_place(clients: Sequence[Client], features: Features) -> Trained:
    started_s = time.process_time()
    _, head = fedtc_fleet.train_ceiling(features, _settings(clients), seed=SEED)
    return _one_head(logits_of(head, features.test), clients, seconds=time.process_time() - started_s)


def _one_head(
    logits: NDArray[np.float32],
    clients: Sequence[Client],
    *,
    uploads: int = 0,
    up_bytes: float = 0.0,
    down_bytes: float = 0.0,
    seconds: float,
) -> Trained:
    """Return what a head that all clients have makes of the test images."""
    same = [logits] * len(clients)
    return Trained(
        logits=same,
        with_prior=_add_prior(same, clients),
        uploads=uploads,
        up_bytes=up_bytes,
        down_bytes=down_bytes,
        seconds=seconds,
    )


def _add_prior(logits: Logits, clients: Sequence[Client]) -> Logits:
    """Add the logarithm of each class's share of a client's images to the client's logits."""
    classes = logits[0].shape[1]
    counts = [np.bincount(client.train_labels, minlength=classes) for client in clients]
    priors = [log_prior(torch.from_numpy(count).float()).numpy() for count in counts]
    return [mine + prior for mine, prior in zip(logits, priors, strict=True)]
