"""A head in closed form of principal prototypes and of batches: class means, and one scatter of all devices. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.arrays import blocks
from aggregator.algorithms.fedtc.discriminant import TINY, head_of_present
from aggregator.algorithms.fedtc.head import TEMPERATURES, Dense
from aggregator.algorithms.fedtc.scatter import Scatter
from aggregator.algorithms.fedtc.training_set import TrainingSet

STRENGTHS = 1.0, 3.0
"""Least and greatest ridge, relative to the mean squared distance of an image from the mean of its class."""

CLEAR_DISTANCE = 40.0
"""Over the mean squared distance of a class mean from their middle, in deviations of an image, it is the strength: the
nearer the classes, the less is a direction trusted in which images hardly differ."""

TEMPERATURE = 0.6
"""Temperature over the root of the mean log-odds of class means, by images that no device had."""


@dataclass(frozen=True)
class Sums:
    """The sums of N images that a head is computed from.

    Attributes:
        images: (C,), that count in each class.
        means: (C, L), of each class; zeros for a class without images.
        scatter: (L, L), of the images within classes.
    """

    images: NDArray[np.float64]
    means: NDArray[np.float64]
    scatter: NDArray[np.float64]


def sums_of(data: TrainingSet, scatter: Scatter) -> Sums:
    """Return the sums over all devices. The scatter is that within devices, and of their means about class means."""
    images, size = data.counted_images, data.values.shape[1]
    of_class = np.bincount(data.labels, images, minlength=data.num_classes).astype(np.float64)
    means, products = data.means(scatter.in_means).astype(np.float64), np.zeros((size, size))
    for block in blocks(len(images)):
        away = data.values[block] - means[data.labels[block]]
        products += (away * images[block, None]).T @ away
    of_device = np.ones(len(scatter.diagonals))
    of_device[data.device_numbers] = images / data.counts
    for block in blocks(len(scatter.rows)):
        rows = scatter.rows[block].astype(np.float64)
        products += (rows * of_device[scatter.devices[block], None]).T @ rows
    products[np.diag_indices(size)] += of_device @ scatter.diagonals
    return Sums(of_class, means, products)


def block_head(sums: Sums, common: NDArray[np.bool_]) -> tuple[Dense, float]:
    """Return the linear discriminant of classes that are equally likely, and the temperature of its logits.

    With the scatter S within classes, A = S + lambda I and the class means M about their middle, the directions are N
    A^-1 M', with lambda = strength tr(S) / N. As in `discriminants`, the mean of few images is corrected by tr(A^-1 S)
    / images, and that of a class that is not `common` (C,) is drawn to the middle of the common ones.

    The distance of the classes with the least of STRENGTHS chooses the strength. Leaving devices out chooses neither
    threshold nor temperature well where classes are uneven: the device that is left out has most images of some class.
    """
    head = _discriminant(sums, common, STRENGTHS[0])
    strength = float(np.clip(CLEAR_DISTANCE / max(head.distance, TINY), *STRENGTHS))
    if strength > STRENGTHS[0]:
        head = _discriminant(sums, common, strength)
    return head.layer, head.temperature


@dataclass(frozen=True)
class _Discriminant:
    layer: Dense
    temperature: float
    distance: float
    """Mean squared distance of a common class mean from their middle, without what few images add to it."""


def _discriminant(sums: Sums, common: NDArray[np.bool_], strength: float) -> _Discriminant:
    """Return the discriminant of `block_head` with a given strength."""
    from scipy.linalg import cho_factor, cho_solve
    from scipy.linalg.lapack import dtrtri

    present, number = sums.images > 0, sums.images.sum()
    is_common = common[present]
    middle = sums.means[present][is_common].mean(axis=0)
    means, size = sums.means[present] - middle, len(middle)
    # Without any scatter, one as large as that between the means.
    squares = float(np.trace(sums.scatter)) or float((means**2).sum()) or 1.0
    ridge = strength * squares / number
    factor, _ = cho_factor(
        sums.scatter + ridge * np.eye(size), lower=True, overwrite_a=True, check_finite=False
    )
    directions = number * cho_solve((factor, True), means.T, check_finite=False).T
    trace = size - ridge * float((np.tril(dtrtri(factor, lower=1)[0]) ** 2).sum())  # of A^-1 S
    lengths = (directions * means).sum(axis=1)
    true_lengths = np.maximum(lengths - trace / sums.images[present], 0)
    shrinkage = np.where(is_common, 1.0, true_lengths / np.maximum(lengths, TINY))
    directions *= shrinkage[:, None]
    constants = -shrinkage * true_lengths / 2
    return _Discriminant(
        head_of_present(directions, constants, middle, present),
        temperature_of(means @ directions.T + constants),
        float(true_lengths[is_common].mean()),
    )


def temperature_of(logits: NDArray[np.float64]) -> float:
    """Return the temperature of a discriminant, from the logits (K, K) that it gives the means of its K classes."""
    odds = float((np.diag(logits)[:, None] - logits).sum()) / max(len(logits) * (len(logits) - 1), 1)
    return float(np.clip(TEMPERATURE * np.sqrt(odds), *TEMPERATURES)) if odds > 0 else 1.0


def temperature_of_means(data: TrainingSet, scatter: Scatter) -> float:
    """Return the temperature of the logits of the nearest class mean.

    It makes the log-odds of two classes what they are for normal images, in the median of all pairs of classes. Two
    logits whose means are a distance d apart differ by d^2 / 2 on average, with a variance v: the log-odds are the
    difference times d^2 / v.
    """
    sums = sums_of(data, scatter)
    means = sums.means[sums.images > 0]
    first, second = np.triu_indices(len(means), k=1)
    squares, variances = (
        np.diag(products)[first] + np.diag(products)[second] - 2 * products[first, second]
        for products in (means @ means.T, means @ sums.scatter @ means.T / sums.images.sum())
    )
    temperature = float(np.median(variances / np.maximum(squares, TINY))) if len(first) else 1.0
    return float(np.clip(temperature, *TEMPERATURES))
