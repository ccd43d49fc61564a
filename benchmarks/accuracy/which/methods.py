"""Every algorithm with its default settings on one fleet, by the functions of the simulation."""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import structs

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fedtc.train_head import FedTC
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.algorithms.layers import log_prior
from aggregator.config.schema import Client as ClientSettings
from benchmarks.accuracy import baselines
from protofleet.simulation import algorithms
from protofleet.simulation.algorithms import SEED, Logits
from protofleet.simulation.fleet import Client

FEDTC = "fedtc"
STATISTICS = "statistics"
SINGLE_IMAGES = "statistics, `batch_size = 1`"
ALONE = "each device alone"
ALL_FEATURES = "all features in one place"

IN_ROUNDS: tuple[RoundAlgorithm, ...] = (Hierarchical(), FedPCL(), FPL(), FedProto())

NAMES = (
    *(FEDTC, STATISTICS, SINGLE_IMAGES),
    *(algorithm.name for algorithm in IN_ROUNDS),
    *(ALONE, ALL_FEATURES),
)
"""Rows of the tables, in their order; before a comma, the algorithm's name."""


@dataclass(frozen=True, kw_only=True)
class Trained(algorithms.Trained):
    """The heads that an algorithm makes for a fleet, and their cost."""

    with_prior: Logits = ()
    """As `logits`, with the class prior of the client's own images; empty if the client's training has it anyway."""


def train_all(
    clients: Sequence[Client], *, classes: int, prior: bool, names: Collection[str] = NAMES
) -> Iterator[tuple[str, Trained]]:
    """Yield what each algorithm makes of a fleet, by its name in tables; all clients have the same test images.

    Without `prior` there is no `with_prior` of an algorithm that would have to train again for it.
    """
    if FEDTC in names:
        yield FEDTC, _one_head(algorithms.train_prototypes(FedTC(), clients), clients)
    for name, batch_size in ((STATISTICS, ClientSettings().batch_size), (SINGLE_IMAGES, 1)):
        if name in names:
            yield name, _one_head(algorithms.train_statistics(clients, batch_size=batch_size), clients)
    for algorithm in IN_ROUNDS:
        if algorithm.name in names:
            yield algorithm.name, _rounds(algorithm, clients, classes=classes, prior=prior)
    if ALONE in names:
        yield ALONE, _alone(clients, classes=classes)
    if ALL_FEATURES in names:
        yield ALL_FEATURES, _one_head(algorithms.train_in_one_place(clients), clients)


def _rounds(algorithm: RoundAlgorithm, clients: Sequence[Client], *, classes: int, prior: bool) -> Trained:
    trained = algorithms.train_rounds(algorithm, clients, classes=classes)
    with_prior: Logits = ()
    if isinstance(algorithm, FPL):
        with_prior = _add_prior(trained.logits, clients)
    elif isinstance(algorithm, Hierarchical | FedPCL) and prior:
        with_prior = algorithms.train_rounds(
            structs.replace(algorithm, prior=True), clients, classes=classes
        ).logits
    return Trained(**vars(trained), with_prior=with_prior)


def _alone(clients: Sequence[Client], *, classes: int) -> Trained:
    started_s = time.process_time()
    recipe = baselines.ALONE_DEEPER if clients[0].normalized else baselines.ALONE
    logits = baselines.alone_logits(clients, recipe, classes=classes, seed=SEED)
    return Trained(logits=logits, seconds=time.process_time() - started_s)


def _one_head(trained: algorithms.Trained, clients: Sequence[Client]) -> Trained:
    """Return the result of an algorithm that makes one head for all clients."""
    return Trained(**vars(trained), with_prior=_add_prior(trained.logits, clients))


def _add_prior(logits: Logits, clients: Sequence[Client]) -> Logits:
    """Add the logarithm of each class's share of a client's images to the client's logits."""
    classes = logits[0].shape[1]
    counts = [np.bincount(client.train_labels, minlength=classes) for client in clients]
    priors = [log_prior(torch.from_numpy(count).float()).numpy() for count in counts]
    return [mine + prior for mine, prior in zip(logits, priors, strict=True)]
