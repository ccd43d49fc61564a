"""The class prior of a place: how often each class occurs there, and probabilities that take it into account.

A head expects all classes alike. Sources: Saerens, Latinne and Decaestecker, "Adjusting the outputs of a classifier to
new a priori probabilities", Neural Computation 14 (2002), for the estimate and its test; Wilson and Hilferty (1931) for
the quantile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Source = Literal["none", "images", "labels"]
"""The origin of a prior: none, probabilities of unlabeled images, or labeled images."""

WINDOW = 100
"""The newest images, from which a program that predicts for long estimates the prior."""

MAX_VALUES = 2**20
"""Probabilities from which a prior is estimated at most: 8 MB."""

_STEPS = 50
_Z = 3.090232306167813
"""The standard normal distribution's quantile at 0.999."""


@dataclass(frozen=True)
class Prior:
    """The prior that a prediction was made with."""

    source: Source = "none"
    shares: Mapping[str, float] = field(default_factory=dict)
    """The share of each class, by which its probability was multiplied; empty without a prior."""

    def fields(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return what an answer with these classes states of it: `prior`, and `prior_shares` unless it is none."""
        shares = {"prior_shares": {name: self.shares[name] for name in classes}} if self.shares else {}
        return {"prior": self.source, **shares}


NO_PRIOR = Prior()


class Adjuster:
    """Adjusts probabilities to the prior of a place, which it estimates from the last WINDOW images.

    Args:
        classes: the C names of the classes.
        source: where the prior comes from.
        labels: labeled images of each class, for `labels`.
    """

    def __init__(self, classes: Sequence[str], source: Source, *, labels: Mapping[str, int]) -> None:
        self.source: Source = source
        self._classes = classes
        self._labels = smoothed(np.array([labels.get(name, 0) for name in classes], float))
        self._newest = np.empty((0, len(classes)), np.float32)

    def adjust(self, probabilities: NDArray[np.float32]) -> tuple[NDArray[np.float32], Prior]:
        """Return adjusted probabilities, float32 (n, C), of further images, and their prior.

        Images that are given together are all in the sample.
        """
        shares = self._labels if self.source == "labels" else None
        if self.source == "images" and len(probabilities):
            sample = max(WINDOW, len(probabilities))
            self._newest = np.concatenate([self._newest, probabilities])[-sample:]
            shares = estimate(self._newest)
        if shares is None:
            return probabilities, NO_PRIOR
        by_name = dict(zip(self._classes, map(float, shares), strict=True))
        return adjusted(probabilities, shares), Prior(self.source, by_name)


def estimate(probabilities: NDArray[np.float32]) -> NDArray[np.float64] | None:
    """Return the share of each class, (C,), in images with these probabilities, (n, C), of a head without a prior.

    EM for the most likely shares, each class counted once more than it was found. None if the images do not show with
    99.9 % confidence that the shares differ (likelihood ratio). Classes of which no image has any probability, such as
    those that the head does not know, have no share.
    """
    rows = _normalized(probabilities)
    possible = np.logical_or.reduce(rows > 0, axis=0)
    rows = rows[:, possible]
    classes = rows.shape[1]
    if classes < 2:
        return None
    found = np.full(classes, 1 / classes)
    for _ in range(_STEPS):
        weighted = rows * found
        found = smoothed((weighted / weighted.sum(axis=1, keepdims=True)).sum(axis=0))
    if 2 * np.log(rows @ found * classes).sum() <= chi_squared_limit(classes - 1):
        return None
    shares = np.zeros(len(possible))
    shares[possible] = found
    return shares


def adjusted(probabilities: NDArray[np.float32], shares: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return probabilities (n, C) multiplied by the classes' shares (C,), each row scaled to a sum of 1."""
    return _normalized(_normalized(probabilities) * shares).astype(np.float32)


def smoothed(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the shares of classes in counts (C,), each class counted once more."""
    shares: NDArray[np.float64] = (counts + 1) / (counts.sum() + len(counts))
    return shares


def chi_squared_limit(freedom: int) -> float:
    """Return the quantile at 0.999 of the chi-squared distribution, to 3 %."""
    spread = 2 / (9 * freedom)
    return freedom * float(1 - spread + _Z * np.sqrt(spread)) ** 3


def _normalized(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return rows that are not negative and add up to 1; rows without a positive number give all classes alike."""
    values = np.clip(rows.astype(np.float64), 0, None)
    values[values.sum(axis=1) == 0] = 1
    values /= values.sum(axis=1, keepdims=True)
    return values
