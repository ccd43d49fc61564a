"""The rivals' settings: the best of `research tune-wire` on held-out training images, for data sets and layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Momentum:
    """Settings of FedAvg of a linear head with server momentum."""

    learning_rate: float
    epochs: int = 1
    calibrated: bool = False


@dataclass(frozen=True)
class Tuned:
    """Settings of all rivals."""

    momentum: Momentum
    fedcof: tuple[float, float]
    """FedCOF's gamma, of class means and of means of groups."""
    strengths: Mapping[str, float] = field(default_factory=dict)
    """Of the heads of sums, by method; as published without."""


DEFAULT = "c384,c576,c960"
"""The layers of `export-backbone` without `--layers`."""

LIKE = "fashion_mnist"
"""The data set whose settings those have that are not in TUNED."""

TUNED: Mapping[tuple[str, str], Tuned] = MappingProxyType(
    {
        (LIKE, ""): Tuned(Momentum(0.003), (3.0, 0.3)),
        (LIKE, "residual"): Tuned(Momentum(0.01), (1.0, 0.03)),
        (LIKE, "c384,c576"): Tuned(Momentum(0.01), (0.03, 0.1)),
        (LIKE, DEFAULT): Tuned(
            Momentum(0.001, epochs=5), (0.1, 0.01), {"AFL": 0.003, "FedCGS": 0.03, "GH-LDA": 0.003}
        ),
        ("pacs", DEFAULT): Tuned(Momentum(0.01), (3.0, 0.3), {"AFL": 0.1, "FedCGS": 0.3, "GH-LDA": 0.3}),
    }
)


def tuned(data: str, layers: str) -> Tuned:
    """Return the settings for a data set and layers."""
    return TUNED.get((data, layers)) or TUNED[LIKE, layers]
