"""The prototypes of all devices, and the features that they stand for."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ProtofleetError


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
    """

    values: NDArray[np.float32]
    labels: NDArray[np.integer]
    counts: NDArray[np.integer]
    num_classes: int
    restore: bool

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
        return replace(self, values=self.values[rows], labels=self.labels[rows], counts=self.counts[rows])

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
        """The deviations (m, L) of the features from their class centers."""
        return self._deviations_from(self.centers)

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """The features (m, L) that the prototypes stand for."""
        return np.asarray(self.centers[self.labels] + self.deviations)

    @cached_property
    def samples(self) -> NDArray[np.float64]:
        """The number of features in each center (C,): images, or prototypes if they are not restored."""
        weights = self.counts if self.restore else None
        return np.bincount(self.labels, weights, minlength=self.num_classes).astype(np.float64)

    def unseen_by(self, training: "TrainingSet") -> NDArray[np.float32]:
        """Return the features (m, L) that held-out prototypes stand for, around the centers of others.

        Their deviations contain the error of these centers, and are shrunk to the spread of features.
        """
        others = np.maximum(training.samples, 1)[self.labels]
        error = 1 + (self.counts if self.restore else 1) / others
        deviations = self._deviations_from(training.centers) / np.sqrt(error)[:, None]
        return np.asarray(training.centers[self.labels] + deviations, dtype=np.float32)

    def _deviations_from(self, centers: NDArray[np.float32]) -> NDArray[np.float32]:
        spread = np.sqrt(self.counts).astype(np.float32)[:, None] if self.restore else np.float32(1)
        return np.asarray(spread * (self.values - centers[self.labels]))
