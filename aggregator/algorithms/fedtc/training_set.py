"""The prototypes of all devices, and the features that they stand for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.arrays import Arrays, blocks
from aggregator.algorithms.fedtc.scatter import Scatter
from protocol.errors import ProtofleetError

TINY = 1e-30
"""Keeps a divisor above zero."""

SAMPLE = 4096
"""Prototypes that the scales of backbones are measured on."""

MIN_FACTOR = 1e-4
"""Least factor of a backbone's values: weights that are multiplied by it stay within float16."""


@dataclass(frozen=True)
class TrainingSet:
    """Prototypes of all devices, to make a head from.

    The mean of n features has an n-th of their variance, so the features on a device are spread sqrt(n) times as
    widely around their mean m as the prototypes: P_j -> m + sqrt(n_j) (P_j - m) restores that (not in the paper). Where
    devices are in different places, m is the device's mean of the class; where they are alike, the class center.

    Attributes:
        values: (m, L) float32.
        labels: (m,), in 0 to C - 1.
        counts: (m,), the images in each prototype.
        num_classes: C, the classes of the task.
        restore: restore the variance that averaging removed; `train_head` does as its recipe says.
        weights: (m,), how much each prototype counts, 1 on average; None if all count alike.
        common: (m,), False in a class on so few devices that one could decide about others: these prototypes do not
            count in cross-validation, nor more than others in the covariance; None if none is.
        devices: (m,), the number of each prototype's device; None if devices are alike.
        widths: the number of values of each backbone, in their order; empty for one backbone.
        scatter: if a device has principal prototypes. Each prototype is then the mean of a class on a device, in a
            block or in batches, and this is what is known of these images beside it.
        arrays: makes the arrays of m rows.
    """

    values: NDArray[np.float32]
    labels: NDArray[np.integer]
    counts: NDArray[np.integer]
    num_classes: int
    restore: bool = False
    weights: NDArray[np.float64] | None = None
    common: NDArray[np.bool_] | None = None
    devices: NDArray[np.integer] | None = None
    widths: Sequence[int] = ()
    scatter: Scatter | None = None
    arrays: Arrays = field(default_factory=Arrays, compare=False)

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
        if not all(np.isfinite(values[block]).all() for block in blocks(len(values))):
            raise ProtofleetError("prototypes must be finite; refuse their submission")

    def factors(self) -> NDArray[np.float32]:
        """Return what brings the values of several backbones to one scale, (L,), from MIN_FACTOR to 1.

        The scale of a backbone's values is the median over prototypes, at most SAMPLE of them, of the root mean square
        of a prototype's distance from the median prototype: few extreme prototypes change nothing. With a scatter, it
        is the median over devices of the root mean square of an image's distance from the mean of its class.
        """
        ends = np.cumsum(self.widths)[:-1]
        if self.scatter is not None and (squares := self.scatter.squares()).any():
            images = np.bincount(self.device_numbers, self.counts, minlength=len(squares))
            known = squares.any(axis=1)
            return self._factors(np.split(squares[known] / images[known, None], ends, axis=1))
        rows = np.linspace(0, len(self.values) - 1, min(len(self.values), SAMPLE)).astype(np.intp)
        values = self.values[rows].astype(np.float64)
        squares = (values - np.median(values, axis=0)) ** 2
        return self._factors(np.split(squares, ends, axis=1))

    def _factors(self, parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float32]:
        """Return the factors (L,) for the squares of each backbone's values, (n, width)."""
        scales = np.array([np.median(np.sqrt(part.mean(axis=1))) for part in parts])
        least = scales[scales > 0].min(initial=np.inf)
        factors = np.divide(least, scales, out=np.ones(len(scales)), where=scales > 0)
        return np.repeat(np.maximum(factors, MIN_FACTOR), self.widths).astype(np.float32)

    def times(self, factors: NDArray[np.float32]) -> "TrainingSet":
        """Return the prototypes with their values (m, L) multiplied by factors (L,)."""
        values = self.arrays.empty(self.values.shape)
        for block in blocks(len(values)):
            values[block] = self.values[block] * factors
        if self.scatter is None:
            return replace(self, values=values)
        rows = self.arrays.empty(self.scatter.rows.shape)
        for block in blocks(len(rows)):
            rows[block] = self.scatter.rows[block] * factors
        scatter = replace(self.scatter, rows=rows, diagonals=self.scatter.diagonals * factors**2)
        return replace(self, values=values, scatter=scatter)

    def part(self, rows: NDArray[np.bool_]) -> "TrainingSet":
        """Return the prototypes of some rows (m,)."""
        weights = None if self.weights is None else self.weights[rows]
        return self._of(rows, weights)

    def evenly_weighted(self) -> "TrainingSet":
        """Return the prototypes of `even_rows`, which all count alike."""
        rows = even_rows(self.labels, self.weights)
        return self if np.array_equal(rows, np.arange(len(self.labels))) else self._of(rows, None)

    def _of(self, rows: NDArray[Any], weights: NDArray[np.float64] | None) -> "TrainingSet":
        return replace(
            self,
            values=self.arrays.rows(self.values, rows),
            labels=self.labels[rows],
            counts=self.counts[rows],
            weights=weights,
            common=None if self.common is None else self.common[rows],
            devices=None if self.devices is None else self.devices[rows],
        )

    @property
    def common_rows(self) -> NDArray[np.bool_]:
        """The prototypes (m,) of common classes."""
        return np.ones(len(self.labels), dtype=np.bool_) if self.common is None else self.common

    @property
    def common_classes(self) -> NDArray[np.bool_]:
        """The common classes (C,)."""
        return np.bincount(self.labels[self.common_rows], minlength=self.num_classes) > 0

    @property
    def counted_images(self) -> NDArray[np.float64]:
        """The images that count in each prototype (m,): its own, times its weight."""
        return self.counts * (np.ones(len(self.counts)) if self.weights is None else self.weights)

    @cached_property
    def centers(self) -> NDArray[np.float32]:
        """The mean of each class (C, L), weighted by counts; zeros for a class without prototypes."""
        return self.means(self.counts)

    def means(self, amounts: NDArray[np.integer] | NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the mean of each class (C, L), weighted by amounts (m,); zeros for a class without prototypes."""
        means = np.zeros((self.num_classes, self.values.shape[1]), dtype=np.float32)
        for label in np.unique(self.labels):
            members = np.flatnonzero(self.labels == label)
            each = amounts[members].astype(np.float64)
            sums = np.zeros(self.values.shape[1])
            for block in blocks(len(members)):
                sums += each[block] @ self.values[members[block]].astype(np.float64)
            means[label] = sums / each.sum()
        return means

    @cached_property
    def deviations(self) -> NDArray[np.float32]:
        """The deviations (m, L) of the features from their class centers.

        Those of a class that is not common are no longer than those of the common ones, by the mean of their squares.
        """
        deviations = self.arrays.empty(self.values.shape)
        for block in blocks(len(deviations)):
            deviations[block] = self.values[block] - self.centers[self.labels[block]]
        if self.restore:
            for members, places in self._places(deviations):
                spread = np.sqrt(self.counts[members]).astype(np.float32)[:, None]
                deviations[members] = places + spread * (deviations[members] - places)
        rare = ~self.common_rows
        if rare.any():
            squares = np.empty(len(deviations))
            for block in blocks(len(deviations)):
                squares[block] = (deviations[block].astype(np.float64) ** 2).sum(axis=1)
            of_class = np.bincount(self.labels, squares) / np.maximum(np.bincount(self.labels), 1)
            limit = np.sqrt(np.minimum(squares[~rare].mean() / np.maximum(of_class, TINY), 1))
            factors = np.where(rare, limit[self.labels], 1).astype(np.float32)
            for block in blocks(len(deviations)):
                deviations[block] *= factors[block, None]
        return deviations

    def _places(
        self, deviations: NDArray[np.float32]
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.float32]]]:
        """Yield rows (b,) of each class, and the deviation (b, L) of each one's place from the class center.

        The place is the best linear estimate from the mean o_k of the device's N_k images, o_k t / (t + s / N_k): s is
        the variance of an image about its device's mean and t that between places, from the sums of squares within and
        between devices (DerSimonian and Laird, "Meta-analysis in clinical trials", 1986). Alike devices have t near 0.
        """
        for label in np.unique(self.labels):
            of_class = np.flatnonzero(self.labels == label)
            counts = self.counts[of_class].astype(np.float64)
            _, device = np.unique(self.device_numbers[of_class], return_inverse=True)
            images = np.bincount(device, counts)
            means = np.zeros((len(images), deviations.shape[1]))
            for block in blocks(len(of_class)):
                np.add.at(means, device[block], counts[block, None] * deviations[of_class[block]])
            means /= images[:, None]
            squares = 0.0
            for block in blocks(len(of_class)):
                away = deviations[of_class[block]] - means[device[block]]
                squares += (away**2).sum(axis=1) @ counts[block]
            between, freedom = images @ (means**2).sum(axis=1), len(images) - 1
            variance = squares / max(len(counts) - len(images), 1)
            unequal = images.sum() - (images**2).sum() / images.sum()
            known = freedom > 0 and squares > 0
            of_places = max(between - freedom * variance, 0) / max(unequal, TINY) if known else 0.0
            means *= (of_places / np.maximum(of_places + variance / images, TINY))[:, None]
            for block in blocks(len(of_class)):
                yield of_class[block], means[device[block]].astype(np.float32)

    @property
    def device_numbers(self) -> NDArray[np.integer]:
        """The number of each prototype's device (m,); zeros if devices are alike."""
        return np.zeros_like(self.labels) if self.devices is None else self.devices

    @property
    def features(self) -> NDArray[np.float32]:
        """The features (m, L) that the prototypes stand for."""
        features = self.arrays.empty(self.values.shape)
        for block in blocks(len(features)):
            features[block] = self.centers[self.labels[block]] + self.deviations[block]
        return features

    @cached_property
    def samples(self) -> NDArray[np.float64]:
        """The number of features in each center (C,): images, or prototypes if they are not restored."""
        weights = self.counts if self.restore else None
        return np.bincount(self.labels, weights, minlength=self.num_classes).astype(np.float64)

    def extrapolated(self) -> NDArray[np.float32]:
        """Return features (m, L) as widely spread as those of single images, to evaluate a head with.

        Unlike `features`, they do not depend on centers, whose error a head made from these centers shares: a
        prototype P_a is extrapolated from another one of its class, P_a + k (P_a - P_b), so far that the variance is
        that of an image, (1 + k)^2 / n_a + k^2 / n_b = 1. The other one is of the same device, if that has several. A
        class of a single prototype is left as it is.
        """
        if not self.restore:
            return self.values
        devices = self.device_numbers.astype(np.int64)
        groups = self.labels + self.num_classes * devices
        _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        # Prototypes that are alone on their device have partners on others.
        keys = np.where(sizes[group] > 1, groups, -1 - self.labels.astype(np.int64))
        order = np.argsort(keys, kind="stable")
        partner = np.empty_like(order)
        for members in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
            partner[members] = np.roll(members, -1)
        mine, other = 1 / self.counts, 1 / self.counts[partner]
        factor = (np.sqrt(mine**2 + (mine + other) * (1 - mine)) - mine) / (mine + other)
        features = self.arrays.empty(self.values.shape)
        for block in blocks(len(features)):
            values = self.values[block]
            away = values - self.values[partner[block]]
            features[block] = values + factor[block, None].astype(np.float32) * away
        return features


def even_rows(labels: NDArray[np.integer], weights: NDArray[np.float64] | None) -> NDArray[np.intp]:
    """Return about as many rows as there are labels (m,), of each class at least one.

    Each row is there as often as its weight (m,), rounded up or down. This is systematic resampling from the middle of
    each step: equal weights give each row once.
    """
    if weights is None:
        return np.arange(len(labels))
    rows = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        ends = np.cumsum(weights[members])
        steps = max(round(ends[-1]), 1)
        rows.append(members[np.searchsorted(ends, (np.arange(steps) + 0.5) * (ends[-1] / steps))])
    return np.sort(np.concatenate(rows))
