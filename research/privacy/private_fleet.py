"""Accuracy of heads trained on perturbed or differentially private prototypes."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.recipe import Recipe
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.training_set import pool
from benchmarks.fleets import accuracy_of, training_set
from edge_client.privacy.perturbation import perturb_prototypes
from protocol.wire.codec import digest_of
from protocol.wire.messages import Perturbation
from protofleet.prototypes import average_class
from protofleet.simulation.fleet import Features
from research.privacy.noisy_prototypes import Mechanism, private_prototypes

DELTA = 1e-5
PAPER = Perturbation(on="prototypes", noise="gaussian", scale=0.05, shrink=0.1)
"""The noise of FedTC's table in appendix C.2."""

Protection: TypeAlias = Mechanism | Perturbation | None


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Size of a fleet."""

    devices: int
    images: int
    """Images of each class on each device."""
    batch: int


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Accuracy of a fleet's head."""

    protection: str
    """`none`, `perturbed` or `differential privacy`."""
    epsilon: float | None
    """The epsilon of a submission, at DELTA; None without differential privacy."""
    batch: int
    images: int
    """Images of each class on each device."""
    accuracy: float


def noise_multiplier(epsilon: float, *, delta: float = DELTA) -> float:
    """Return the z with which one submission costs epsilon (Balle and Wang 2018, theorem 8)."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    def excess(z: float) -> float:
        near, far = norm.cdf(0.5 / z - epsilon * z), norm.logcdf(-0.5 / z - epsilon * z)
        return float(near - np.exp(epsilon + far)) - delta

    return float(brentq(excess, 0.001, 1000.0))


def run_private(
    features: Features,
    fleet: Fleet,
    *,
    how: Protection,
    recipe: Recipe,
    seed: int,
    device: str,
) -> float:
    """Return the accuracy of a fleet's head on the test images; 0 if no device uploads anything."""
    rng = np.random.default_rng(seed)
    parts = []
    for label in range(features.classes):
        rows = rng.permutation(np.flatnonzero(features.train_labels == label))
        shares = np.array_split(rows[: fleet.devices * fleet.images], fleet.devices)
        parts += [
            _release(features.train[share], label, number, fleet, how=how, seed=seed)
            for number, share in enumerate(shares)
        ]
    data = pool(parts)
    if not len(data.labels):
        return 0.0
    trained = train_head(training_set(data, features), recipe, seed=seed, device=device)
    return accuracy_of(trained.layers, features)


def _release(
    features: NDArray[np.float32],
    label: int,
    number: int,
    fleet: Fleet,
    *,
    how: Protection,
    seed: int,
) -> Prototypes:
    """Return a device's upload of one class."""
    key = digest_of(f"{seed}/{number}/{label}".encode())
    if isinstance(how, Mechanism):
        identities = [str(each) for each in range(len(features))]
        values, counts = private_prototypes(features, identities, how, secret=key, key=key)
    else:
        rng = np.random.default_rng(list(key))
        values, counts = average_class(features, batch=fleet.batch, rng=rng, alpha=0.99)
    labels = np.full(len(counts), label)
    if isinstance(how, Perturbation):
        values = perturb_prototypes(values, labels.astype(np.uint32), how, secret=key).astype(np.float32)
    return Prototypes(
        values.astype(np.float16).astype(np.float32), labels.astype(np.int64), counts.astype(np.int64)
    )
