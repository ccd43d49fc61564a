"""Fleets whose devices differ: in their domain, in their mixture of classes, or in both."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.features import load_features
from benchmarks.data.images import DIGITS, PACS
from protocol.errors import ConfigError
from protofleet.simulation.fleet import Client, Features
from protofleet.simulation.partitions import Partition, share_out

VALIDATION = 400
"""Greatest number of images of a domain to choose settings by."""


def load_domains(
    names: Sequence[str], backbones: Sequence[str], *, image_size: int, at_most: int | None = None
) -> dict[str, Features]:
    """Return the features of each domain by `load_features`, those of several backbones concatenated."""
    backbone = "+".join(backbones)
    return {
        name: load_features(name, backbone=backbone, image_size=image_size, at_most=at_most) for name in names
    }


def feature_shift(
    domains: Mapping[str, Features], *, per_class: int, rng: np.random.Generator, validation: bool
) -> list[Client]:
    """Give every domain one client, with so many images of each class.

    For the choice of settings, `validation` evaluates on other training images instead of test images.
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
    """Divide images of each class among clients, by shares drawn from a Dirichlet distribution.

    `owners` are the clients' domains. All clients together have `per_class` images of each class per client; a client
    is evaluated on its own mixture of classes.
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
    """Give each domain of the plan a number of clients, and each of them a number of images.

    Raises:
        ConfigError: a domain has too few images.
    """
    clients = []
    for name, (number, images) in plan.items():
        domain = domains[name]
        order = rng.permutation(len(domain.train_labels))
        if number * images > len(order):
            raise ConfigError(f"{name} has {len(order)} images, not {number} times {images}")
        judged_by = order[number * images :] if validation else None
        parts = order[: number * images].reshape(number, images)
        clients += [_client(name, domain, part, judged_by=judged_by) for part in parts]
    return clients


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
    drawn = [_draw(stacks[name], share, name) for name, share in zip(owners, counts, strict=True)]
    clients = []
    for name, part, share in zip(owners, drawn, counts, strict=True):
        rest = np.array([index for stack in stacks[name] for index in stack])
        judged_by = rng.permutation(rest)[:VALIDATION] if validation else None
        clients.append(_client(name, domains[name], part, judged_by=judged_by, share=share))
    return clients


def _draw(stacks: Sequence[list[int]], counts: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """Take so many from each class's stack."""
    taken = []
    for label, (stack, count) in enumerate(zip(stacks, counts, strict=True)):
        if count > len(stack):
            raise ConfigError(f"{name} has too few images of class {label}: {count} more were wanted")
        taken += [stack.pop() for _ in range(count)]
    return np.array(taken, dtype=np.int64)


def _client(
    name: str,
    domain: Features,
    part: NDArray[np.int64],
    *,
    judged_by: NDArray[np.int64] | None,
    share: NDArray[np.int64] | None = None,
) -> Client:
    """Return a client with a part of the training images, evaluated on others of them or on the test images.

    Classes count as much as in `share`, (C,), by default as in the images.
    """
    test, labels = domain.test, domain.test_labels
    if judged_by is not None:
        test, labels = domain.train[judged_by], domain.train_labels[judged_by]
    present = np.bincount(labels, minlength=domain.classes)
    weights = ((present if share is None else share) / np.maximum(present, 1))[labels]
    return Client(
        domain=name,
        train=domain.train[part],
        train_labels=domain.train_labels[part],
        test=test,
        test_labels=labels,
        weights=weights / weights.sum(),
        normalized=domain.normalized,
    )


PLANS: Mapping[str, Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        "digits": dict(zip(DIGITS, ((3, 40), (7, 20), (6, 80), (4, 20)), strict=True)),
        "pacs": dict(zip(PACS, ((3, 35), (2, 35), (1, 35), (4, 35)), strict=True)),
    }
)
"""The devices of each domain, and the images of each: 20 devices, as in FPL's paper, and 10."""

VALIDATION_SHARE = 0.6
"""Share of the devices' images of which the rest are for evaluation."""


def planned(name: str, domains: Mapping[str, Features], *, seed: int, validation: bool) -> list[Client]:
    """Return the devices of one of PLANS; a validation on PACS, which is small, gives them fewer images."""
    plan = PLANS[name]
    if name == "pacs" and validation:
        plan = {
            domain: (devices, round(VALIDATION_SHARE * images)) for domain, (devices, images) in plan.items()
        }
    return unequal(domains, plan, rng=np.random.default_rng(seed), validation=validation)


SHIFTS = ("feature", "label", "both")
LABEL_DOMAIN = "mnist_m"


def shifted(
    domains: Mapping[str, Features],
    shift: str,
    *,
    per_class: int,
    clients: int,
    concentration: float,
    seed: int,
    validation: bool = False,
    label_domain: str = LABEL_DOMAIN,
) -> list[Client]:
    """Return the clients of one of the three settings of FedPCL.

    SHIFTS are one client a domain; `clients` on `label_domain` with different mixtures of classes; or one a domain with
    different mixtures.
    """
    rng = np.random.default_rng(seed)
    if shift == "feature":
        return feature_shift(domains, per_class=per_class, rng=rng, validation=validation)
    owners = tuple(domains) if shift == "both" else (label_domain,) * clients
    return label_shift(
        domains, owners, per_class=per_class, concentration=concentration, rng=rng, validation=validation
    )
