"""Fleets whose devices see different things: other domains, other mixtures of classes, or both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.features import Features, load_features
from benchmarks.data.images import DIGITS
from benchmarks.data.partitions import Partition, share_out
from protocol.errors import ConfigError

VALIDATION = 400
"""Images of a domain to choose settings by, at most."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """A device's features, to learn from and to be judged by.

    Attributes:
        domain: where its images are from.
        train: float32 (n, L).
        train_labels: int64 (n,).
        test: float32 (m, L).
        test_labels: int64 (m,).
        weights: float64 (m,), what each test image counts; they add up to 1.
    """

    domain: str
    train: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    weights: NDArray[np.float64]

    def accuracy(self, predicted: NDArray[np.int64]) -> float:
        """Return the share of the test images that is right, each by its weight."""
        return float(self.weights[predicted == self.test_labels].sum())


def load_domains(
    names: Sequence[str], backbones: Sequence[str], *, image_size: int, at_most: int | None = None
) -> dict[str, Features]:
    """Return the features of each domain, those of several backbones one after the other.

    Args:
        names: what `benchmarks.data.images.load_data` knows.
        backbones: of `benchmarks.data.features.BACKBONES`.
        image_size: pixels of the square that every image is resized to.
        at_most: images to take of each part, where all would be too many.

    Raises:
        ConfigError: the data or the weights are not there.
    """
    domains = {}
    for name in names:
        parts = [
            load_features(name, backbone=backbone, image_size=image_size, at_most=at_most)
            for backbone in backbones
        ]
        domains[name] = Features(
            train=np.concatenate([part.train for part in parts], axis=1),
            train_labels=parts[0].train_labels,
            test=np.concatenate([part.test for part in parts], axis=1),
            test_labels=parts[0].test_labels,
        )
    return domains


def feature_shift(
    domains: Mapping[str, Features], *, per_class: int, rng: np.random.Generator, validation: bool
) -> list[Client]:
    """Give every domain one client, with so many images of each class.

    Args:
        domains: where the clients are.
        per_class: images of each class that a client has.
        rng: draws them.
        validation: judge on other training images, to choose settings, and not on test images.
    """
    classes = next(iter(domains.values())).classes
    counts = np.full((len(domains), classes), per_class)
    return _clients(domains, list(domains), counts, rng=rng, validation=validation)


def label_shift(
    domains: Mapping[str, Features],
    owners: Sequence[str],
    *,
    per_class: int,
    concentration: float,
    rng: np.random.Generator,
    validation: bool,
) -> list[Client]:
    """Share images of each class out among clients, by shares drawn from a Dirichlet distribution.

    A client is judged by its own mixture of classes.

    Args:
        domains: where images are from.
        owners: the domain of each client; one for all, or, to shift features as well, different ones.
        per_class: images of each class that all clients together have, per client.
        concentration: of the distribution.
        rng: draws shares and images.
        validation: judge on other training images, to choose settings, and not on test images.
    """
    classes = next(iter(domains.values())).classes
    labels = np.repeat(np.arange(classes), per_class * len(owners))
    owner = share_out(labels, Partition("dirichlet", concentration), clients=len(owners), rng=rng)
    counts = np.zeros((len(owners), classes), dtype=np.int64)
    np.add.at(counts, (owner, labels), 1)
    return _clients(domains, owners, counts, rng=rng, validation=validation)


def unequal(
    domains: Mapping[str, Features],
    plan: Mapping[str, tuple[int, int]],
    *,
    rng: np.random.Generator,
    validation: bool,
) -> list[Client]:
    """Give each domain a number of clients, and each of them a number of images.

    Args:
        domains: where the clients are.
        plan: for each domain, its clients and the images of each.
        rng: draws them.
        validation: judge on other training images, to choose settings, and not on test images.

    Raises:
        ConfigError: a domain has not so many images.
    """
    clients = []
    for name, (number, images) in plan.items():
        domain = domains[name]
        order = rng.permutation(len(domain.train_labels))
        if number * images > len(order):
            raise ConfigError(f"{name} has {len(order)} images, not {number} times {images}")
        test, labels = _judged_by(domain, order[number * images :] if validation else None)
        weights = np.full(len(labels), 1 / len(labels))
        clients += [
            _client(name, domain, mine, test=test, test_labels=labels, weights=weights)
            for mine in order[: number * images].reshape(number, images)
        ]
    return clients


def halved(features: Features, rng: np.random.Generator) -> Features:
    """Deal a small data set anew into halves to learn from and to judge by."""
    everything = np.concatenate([features.train, features.test])
    labels = np.concatenate([features.train_labels, features.test_labels])
    order = rng.permutation(len(labels))
    train, test = order[: len(order) // 2], order[len(order) // 2 :]
    return Features(everything[train], labels[train], everything[test], labels[test])


def _clients(
    domains: Mapping[str, Features],
    owners: Sequence[str],
    counts: NDArray[np.int64],
    *,
    rng: np.random.Generator,
    validation: bool,
) -> list[Client]:
    """Draw the images of clients, (K, C) of each class, no image twice."""
    stacks = {}
    for name in dict.fromkeys(owners):
        labels = domains[name].train_labels
        order = rng.permutation(len(labels))
        stacks[name] = [list(order[labels[order] == label]) for label in range(counts.shape[1])]
    drawn = [_draw(stacks[name], mine, name) for name, mine in zip(owners, counts, strict=True)]
    clients = []
    for name, mine, share in zip(owners, drawn, counts, strict=True):
        rest = np.array([index for stack in stacks[name] for index in stack])
        test, labels = _judged_by(domains[name], rng.permutation(rest)[:VALIDATION] if validation else None)
        weights = _weights(labels, share)
        clients.append(_client(name, domains[name], mine, test=test, test_labels=labels, weights=weights))
    return clients


def _draw(stacks: Sequence[list[int]], counts: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """Take so many from each class's stack."""
    taken = []
    for label, (stack, count) in enumerate(zip(stacks, counts, strict=True)):
        if count > len(stack):
            raise ConfigError(f"{name} has too few images of class {label}: {count} more were wanted")
        taken += [stack.pop() for _ in range(count)]
    return np.array(taken, dtype=np.int64)


def _judged_by(
    domain: Features, chosen: NDArray[np.int64] | None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if chosen is None:
        return domain.test, domain.test_labels
    return domain.train[chosen], domain.train_labels[chosen]


def _weights(labels: NDArray[np.int64], share: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights of test images, such that classes count as much as a client has of them."""
    present = np.bincount(labels, minlength=len(share))
    weights = (share / np.maximum(present, 1))[labels]
    normalized: NDArray[np.float64] = weights / weights.sum()
    return normalized


def _client(
    name: str,
    domain: Features,
    mine: NDArray[np.int64],
    *,
    test: NDArray[np.float32],
    test_labels: NDArray[np.int64],
    weights: NDArray[np.float64],
) -> Client:
    return Client(
        domain=name,
        train=domain.train[mine],
        train_labels=domain.train_labels[mine],
        test=test,
        test_labels=test_labels,
        weights=weights,
    )


SHIFTS = ("feature", "label", "both")


def shifted(
    domains: Mapping[str, Features],
    shift: str,
    *,
    per_class: int,
    clients: int,
    concentration: float,
    seed: int,
    validation: bool = False,
) -> list[Client]:
    """Return the clients of one of the three settings of FedPCL, with ten images a class each or on average.

    Args:
        domains: the digits.
        shift: one of SHIFTS: one client a domain; `clients` on MNIST-M with different mixtures of classes; or
            one a domain with different mixtures.
        per_class: images of each class, per client.
        clients: with label shift alone.
        concentration: of the Dirichlet distribution of the mixtures.
        seed: of all that is drawn.
        validation: judge on other training images, to choose settings, and not on test images.
    """
    rng = np.random.default_rng(seed)
    if shift == "feature":
        return feature_shift(domains, per_class=per_class, rng=rng, validation=validation)
    owners = DIGITS if shift == "both" else ("mnist_m",) * clients
    return label_shift(
        domains, owners, per_class=per_class, concentration=concentration, rng=rng, validation=validation
    )
