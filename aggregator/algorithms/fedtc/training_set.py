"""The prototypes of all devices, and the features that they stand for."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ProtofleetError

TINY = 1e-30
"""Keeps a divisor above zero."""


@dataclass(frozen=True)
class TrainingSet:
    """Prototypes of all devices, to make a head from.

    The mean of n features has an n-th of their variance, so the features on a device are spread sqrt(n) times as
    widely around their class center as the prototypes: P_j -> mu_v + sqrt(n_j) (P_j - mu_v) restores that (not in the
    paper).

    Attributes:
        values: (m, L) float32.
        labels: (m,), in 0 to C - 1.
        counts: (m,), the images in each prototype.
        num_classes: C, the classes of the task.
        restore: restore the variance that averaging removed.
        weights: (m,), how much each prototype counts, 1 on average; None if all count alike.
        common: (m,), False in a class on so few devices that one could decide about others; None if none is.
    """

    values: NDArray[np.float32]
    labels: NDArray[np.integer]
    counts: NDArray[np.integer]
    num_classes: int
    restore: bool
    weights: NDArray[np.float64] | None = None
    common: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        """Check the arrays.

        Raises:
            ProtofleetError: there are no prototypes, or invalid ones.
        """
        values, labels, counts = self.values, self.labels, self.counts
        if values.ndim != 2 or not len(values) == len(labels) == len(counts) > 0:
            raise ProtofleetError(
                "training takes at least one prototype, each with a label and a count, not arrays of "
                f"{values.shape}, {labels.shape} and {counts.shape}"
            )
        if labels.min() < 0 or labels.max() >= self.num_classes:
            raise ProtofleetError(
                f"labels must lie in 0 to {self.num_classes - 1}, not in {labels.min()} to {labels.max()}"
            )
        if counts.min() < 1:
            raise ProtofleetError("every prototype must average at least one image")
        if not np.isfinite(values).all():
            raise ProtofleetError("prototypes must be finite; refuse their submission")

    def part(self, rows: NDArray[np.bool_]) -> "TrainingSet":
        """Return the prototypes of some rows (m,)."""
        weights = None if self.weights is None else self.weights[rows]
        return self._of(rows, weights)

    @cached_property
    def even_rows(self) -> NDArray[np.intp]:
        """About as many rows as there are, of each class at least one: each as often as its weight, rounded up or down.

        This is systematic resampling from the middle of each step: equal weights give each row once.
        """
        if self.weights is None:
            return np.arange(len(self.labels))
        rows = []
        for label in np.unique(self.labels):
            members = np.flatnonzero(self.labels == label)
            ends = np.cumsum(self.weights[members])
            steps = max(round(ends[-1]), 1)
            rows.append(members[np.searchsorted(ends, (np.arange(steps) + 0.5) * (ends[-1] / steps))])
        return np.sort(np.concatenate(rows))

    def evenly_weighted(self) -> "TrainingSet":
        """Return the prototypes of `even_rows`, which all count alike."""
        rows = self.even_rows
        return self if np.array_equal(rows, np.arange(len(self.labels))) else self._of(rows, None)

    def _of(self, rows: NDArray[Any], weights: NDArray[np.float64] | None) -> "TrainingSet":
        return replace(
            self,
            values=self.values[rows],
            labels=self.labels[rows],
            counts=self.counts[rows],
            weights=weights,
            common=None if self.common is None else self.common[rows],
        )

    @property
    def common_rows(self) -> NDArray[np.bool_]:
        """The prototypes (m,) of common classes."""
        return np.ones(len(self.labels), dtype=np.bool_) if self.common is None else self.common

    @property
    def common_classes(self) -> NDArray[np.bool_]:
        """The common classes (C,)."""
        return np.bincount(self.labels[self.common_rows], minlength=self.num_classes) > 0

    @cached_property
    def centers(self) -> NDArray[np.float32]:
        """The mean of each class (C, L), weighted by counts; zeros for a class without prototypes."""
        centers = np.zeros((self.num_classes, self.values.shape[1]), dtype=np.float32)
        for label in np.unique(self.labels):
            members = self.labels == label
            centers[label] = np.average(self.values[members], axis=0, weights=self.counts[members])
        return centers

    @cached_property
    def deviations(self) -> NDArray[np.float32]:
        """The deviations (m, L) of the features from their class centers.

        Those of a class that is not common are no longer than those of the common ones, by the mean of their squares.
        """
        spread = np.sqrt(self.counts).astype(np.float32)[:, None] if self.restore else np.float32(1)
        deviations = np.asarray(spread * (self.values - self.centers[self.labels]))
        rare = ~self.common_rows
        if rare.any():
            squares = (deviations.astype(np.float64) ** 2).sum(axis=1)
            of_class = np.bincount(self.labels, squares) / np.maximum(np.bincount(self.labels), 1)
            limit = np.sqrt(np.minimum(squares[~rare].mean() / np.maximum(of_class, TINY), 1))
            deviations[rare] *= limit[self.labels[rare], None].astype(np.float32)
        return deviations

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """The features (m, L) that the prototypes stand for."""
        return np.asarray(self.centers[self.labels] + self.deviations)

    @cached_property
    def samples(self) -> NDArray[np.float64]:
        """The number of features in each center (C,): images, or prototypes if they are not restored."""
        weights = self.counts if self.restore else None
        return np.bincount(self.labels, weights, minlength=self.num_classes).astype(np.float64)

    def extrapolated(self) -> NDArray[np.float32]:
        """Return features (m, L) as widely spread as those of single images, to evaluate a head with.

        Unlike `features`, they do not depend on centers, whose error a head made from these centers shares: a
        prototype P_a is extrapolated from another one of its class, P_a + k (P_a - P_b), so far that the variance is
        that of an image, (1 + k)^2 / n_a + k^2 / n_b = 1. A class of a single prototype is left as it is.
        """
        if not self.restore:
            return self.values
        order = np.argsort(self.labels, kind="stable")
        partner = np.empty_like(order)
        for members in np.split(order, np.cumsum(np.bincount(self.labels))[:-1]):
            partner[members] = np.roll(members, -1)
        mine, other = 1 / self.counts, 1 / self.counts[partner]
        factor = (np.sqrt(mine**2 + (mine + other) * (1 - mine)) - mine) / (mine + other)
        away = self.values - self.values[partner]
        return np.asarray(self.values + factor.astype(np.float32)[:, None] * away)
