"""Partitions of a data set: at random, or one of the two ways in which papers make the data of clients differ."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError


@dataclass(frozen=True)
class Partition:
    """Division of labeled images among clients."""

    kind: Literal["iid", "sharding", "dirichlet"]
    """Equal numbers of random images, equal numbers of classes per client, or shares of each class drawn from a
    symmetric Dirichlet distribution."""
    parameter: float = 0.0
    """Classes per client, delta; or the distribution's concentration, beta."""

    def __str__(self) -> str:
        return self.kind if self.kind == "iid" else f"{self.kind}:{self.parameter:g}"


def parse_partition(text: str) -> Partition:
    """Read `iid`, `sharding:DELTA` or `dirichlet:BETA`.

    Raises:
        ConfigError: it is none of them.
    """
    if text == "iid":
        return Partition("iid")
    kind, _, number = text.partition(":")
    try:
        parameter = float(number)
    except ValueError:
        parameter = 0.0
    if kind == "sharding" and parameter >= 1 and parameter.is_integer():
        return Partition("sharding", parameter)
    if kind == "dirichlet" and 0 < parameter < np.inf:
        return Partition("dirichlet", parameter)
    raise ConfigError(f"expected a partition such as iid, sharding:2 or dirichlet:0.1, got {text!r}")


def share_out(
    labels: NDArray[np.int64], partition: Partition, *, clients: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the client of each image, (n,), in 0 to K - 1, by the images' classes (n,).

    Raises:
        ConfigError: so few clients with so few classes cannot have all the images.
    """
    if partition.kind == "iid":
        return np.asarray(rng.permutation(np.arange(len(labels)) % clients), np.int64)
    classes = np.unique(labels)
    if partition.kind == "sharding":
        shares = _sharding(len(classes), int(partition.parameter), clients=clients, rng=rng)
    else:
        shares = rng.dirichlet(np.full(clients, partition.parameter), size=len(classes))
    owners = np.empty(len(labels), dtype=np.int64)
    for label, share in zip(classes, shares, strict=True):
        members = rng.permutation(np.flatnonzero(labels == label))
        ends = np.round(np.cumsum(share) * len(members)).astype(np.int64)
        owners[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return owners


def _sharding(classes: int, delta: int, *, clients: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return each client's share of each class, (C, K): equal among the clients that have the class."""
    if not classes / clients <= delta <= classes:
        raise ConfigError(
            f"{clients} devices with {delta} classes each cannot share out {classes} classes: "
            f"expected sharding:N with N from {-(-classes // clients)} to {classes}"
        )
    has = np.zeros((classes, clients))
    dealt = rng.permutation(classes)[np.arange(clients * delta) % classes]
    has[dealt, np.repeat(np.arange(clients), delta)] = 1.0
    shares: NDArray[np.float64] = has / has.sum(axis=1, keepdims=True)
    return shares
