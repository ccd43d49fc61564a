"""The class prior of a place: how often each class occurs there, and probabilities that take it into account.

A head expects all classes alike. Sources: Saerens, Latinne and Decaestecker, "Adjusting the outputs of a classifier to
new a priori probabilities", Neural Computation 14 (2002), for the estimate and its test; Wilson and Hilferty (1931) for
the quantile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError

Setting = Literal["auto", "none", "images", "labels"]
"""The value of `--prior`."""

Source = Literal["none", "images", "labels"]
"""The origin of a prior: none, probabilities of unlabeled images, or labeled images."""

Reason = Literal[
    "as requested",
    "fewer than 20 predictions",
    "likelier than no prior",
    "no likelier than no prior",
    "uneven classes",
    "no evidence of uneven classes",
    "personal head",
    "unrecognized image",
]
"""Why a prediction was made with its prior."""

WINDOW = 100
"""The newest images, by which a program that predicts for long chooses the prior."""

FEWEST = 20
"""The number of images below which the labels' prior is not compared with none."""

MAX_VALUES = 2**20
"""Probabilities by which a prior is chosen at most: 8 MB."""

_STEPS = 50
_Z = 3.090232306167813
"""The standard normal distribution's quantile at 0.999."""


class Choice(NamedTuple):
    """A prior, and why it is used."""

    source: Source
    reason: Reason
    shares: NDArray[np.float64] | None = None
    """The share of each class, (C,); None without a prior."""


@dataclass(frozen=True)
class Prior:
    """The prior that a prediction was made with."""

    source: Source = "none"
    reason: Reason = "as requested"
    shares: Mapping[str, float] = field(default_factory=dict)
    """The share of each class, by which its probability was multiplied; empty without a prior."""

    def fields(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return what an answer with these classes states of it; `prior_shares` only if there is a prior."""
        shares = {"prior_shares": {name: self.shares[name] for name in classes}} if self.shares else {}
        return {"prior": self.source, "prior_reason": self.reason, **shares}


UNRECOGNIZED_IMAGE = Prior(reason="unrecognized image")


class Adjuster:
    """Adjusts probabilities to the prior of a place, which it chooses by the last WINDOW images.

    Args:
        classes: the C names of the classes.
        setting: the prior to use.
        labels: the device's labeled images of each class.
        is_personal: the head may expect the device's classes already.

    Raises:
        ConfigError: there are no labeled images of these classes, for `labels`.
    """

    def __init__(
        self,
        classes: Sequence[str],
        setting: Setting,
        *,
        labels: Mapping[str, int],
        is_personal: bool = False,
    ) -> None:
        self._setting, self._classes, self._is_personal = setting, classes, is_personal
        self._labels = label_shares(classes, labels)
        if setting == "labels" and self._labels is None:
            raise ConfigError("no labeled images of the head's classes in a submission: use another prior")
        self._newest = np.empty((0, len(classes)), np.float32)

    @property
    def needs_images(self) -> bool:
        """True if the prior depends on the images."""
        return self._setting == "images" or (self._setting == "auto" and not self._is_personal)

    def adjust(self, probabilities: NDArray[np.float32]) -> tuple[NDArray[np.float32], Prior]:
        """Return adjusted probabilities, float32 (n, C), of further images, and their prior.

        Images that are given together are all in the sample.
        """
        if self.needs_images:
            sample = max(WINDOW, len(probabilities))
            self._newest = np.concatenate([self._newest, probabilities])[-sample:]
        found = choose(self._setting, self._newest, self._labels, is_personal=self._is_personal)
        if found.shares is None:
            return probabilities, Prior(found.source, found.reason)
        by_name = dict(zip(self._classes, map(float, found.shares), strict=True))
        return adjusted(probabilities, found.shares), Prior(found.source, found.reason, by_name)


def choose(
    setting: Setting,
    probabilities: NDArray[np.float32],
    labels: NDArray[np.float64] | None,
    *,
    is_personal: bool = False,
) -> Choice:
    """Return the prior for images with these probabilities, (n, C), of a head without a prior, in any order.

    `auto` uses `labels`, the shares of the device's labeled images, (C,), unless FEWEST images or more are as likely
    without a prior. Where there are no labels, it estimates the shares. A personal head gets no prior.
    """
    if setting == "none":
        return Choice("none", "as requested")
    if setting == "labels":
        return Choice("labels", "as requested", labels)
    if setting == "auto" and is_personal:
        return Choice("none", "personal head")
    if setting == "auto" and labels is not None:
        return _compared(probabilities, labels)
    shares = estimate(probabilities)
    if shares is None:
        return Choice("none", "no evidence of uneven classes")
    return Choice("images", "uneven classes", shares)


def _compared(probabilities: NDArray[np.float32], labels: NDArray[np.float64]) -> Choice:
    if len(probabilities) < FEWEST:
        return Choice("labels", "fewer than 20 predictions", labels)
    if log_gain(probabilities, labels) > 0:
        return Choice("labels", "likelier than no prior", labels)
    return Choice("none", "no likelier than no prior")


def label_shares(classes: Sequence[str], labels: Mapping[str, int]) -> NDArray[np.float64] | None:
    """Return the share of each class in labeled images, (C,), each class counted once more; None without any."""
    counts = np.array([labels.get(name, 0) for name in classes], float)
    return smoothed(counts) if counts.any() else None


def log_gain(probabilities: NDArray[np.float32], shares: NDArray[np.float64]) -> float:
    """Return the log likelihood of images with these probabilities, (n, C), by shares (C,), less that by equal ones.

    Classes of which no image has any probability do not count.
    """
    rows, possible = _possible(probabilities)
    gains = rows @ (shares[possible] / shares[possible].sum()) * rows.shape[1]
    return float(np.log(gains).sum())


def estimate(probabilities: NDArray[np.float32]) -> NDArray[np.float64] | None:
    """Return the share of each class, (C,), in images with these probabilities, (n, C), of a head without a prior.

    EM for the most likely shares, each class counted once more than it was found. None if the images do not show with
    99.9 % confidence that the shares differ (likelihood ratio). Classes of which no image has any probability, such as
    those that the head does not know, have no share.
    """
    rows, possible = _possible(probabilities)
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


def _possible(probabilities: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return normalized rows of the classes of which an image has any probability, and which of the C those are."""
    rows = _normalized(probabilities)
    possible = np.logical_or.reduce(rows > 0, axis=0)
    return rows[:, possible], possible


def _normalized(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return rows that are not negative and add up to 1; rows without a positive number give all classes alike."""
    values = np.clip(rows.astype(np.float64), 0, None)
    values[values.sum(axis=1) == 0] = 1
    values /= values.sum(axis=1, keepdims=True)
    return values
