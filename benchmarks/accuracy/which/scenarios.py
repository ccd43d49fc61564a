"""Kinds of fleets on which algorithms are compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from benchmarks.data.domains import feature_shift, planned, shifted, unequal
from benchmarks.data.images import DIGITS
from protofleet.simulation.fleet import Client, Features

FASHION = "fashion_mnist"

Domains = Mapping[str, Features]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A kind of fleet."""

    title: str
    text: str
    """The devices and their images."""
    shift: str
    """The difference between devices: "none", "label" or "feature"."""
    domains: tuple[str, ...]
    clients: Callable[[Domains, int], list[Client]]
    """Makes the clients, by the domains' features and the seed."""


def _alike(devices: int, images: int) -> Callable[[Domains, int], list[Client]]:
    plan = {FASHION: (devices, images)}
    return lambda domains, seed: unequal(domains, plan, rng=np.random.default_rng(seed), validation=False)


def _by_label(per_class: int) -> Callable[[Domains, int], list[Client]]:
    return lambda domains, seed: shifted(
        domains, "label", per_class=per_class, clients=10, concentration=0.1, seed=seed, label_domain=FASHION
    )


def _by_domain(per_class: int) -> Callable[[Domains, int], list[Client]]:
    return lambda domains, seed: feature_shift(
        domains, per_class=per_class, rng=np.random.default_rng(seed), validation=False
    )


SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "alike-few": Scenario(
            title="Like devices, few images",
            text="10 devices with 100 random images of Fashion-MNIST each, about 10 of each class.",
            shift="none",
            domains=(FASHION,),
            clients=_alike(10, 100),
        ),
        "alike-many": Scenario(
            title="Like devices, many images",
            text="3 devices with 1,000 random images of Fashion-MNIST each, about 100 of each class.",
            shift="none",
            domains=(FASHION,),
            clients=_alike(3, 1000),
        ),
        "label-few": Scenario(
            title="Different classes, few images",
            text="10 devices share 100 images of each class of Fashion-MNIST in shares drawn from a Dirichlet "
            "distribution (0.1): 12 to 271 images of one to seven classes.",
            shift="label",
            domains=(FASHION,),
            clients=_by_label(10),
        ),
        "label-many": Scenario(
            title="Different classes, many images",
            text="The same with 200 images of each class: up to 199 images of a class on a device.",
            shift="label",
            domains=(FASHION,),
            clients=_by_label(20),
        ),
        "domain-few": Scenario(
            title="A domain for each device, few images",
            text="One device each on MNIST, USPS, MNIST-M and scikit-learn's digits, with 10 images of each class.",
            shift="feature",
            domains=DIGITS,
            clients=_by_domain(10),
        ),
        "domain-many": Scenario(
            title="A domain for each device, many images",
            text="The same with 40 images of each class.",
            shift="feature",
            domains=DIGITS,
            clients=_by_domain(40),
        ),
        "domains": Scenario(
            title="Several devices in each domain",
            text="20 devices on the same four domains, 3 with 40 images, 7 with 20, 6 with 80 and 4 with 20 "
            "(`python -m research fpl --data digits`).",
            shift="feature",
            domains=DIGITS,
            clients=lambda domains, seed: planned("digits", domains, seed=seed, validation=False),
        ),
    }
)
