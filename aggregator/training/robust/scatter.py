"""The scatter of all devices, of principal prototypes and of batches. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.arrays import Arrays
from aggregator.algorithms.fedtc.scatter import Scatter
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.coordination.bounds import COMPARED_DEVICES, limiting_factors, median_limits
from aggregator.intake.validation import Prototypes
from protocol.wire.principal_prototypes import PrincipalPrototypes, joined


def principal(part: Prototypes) -> PrincipalPrototypes:
    """Return a device's prototypes as principal prototypes: its batches are a block, of which all rows are known.

    A class's deviations from its mean, each times the root of its images, have the scatter of g - 1 images, of g
    batches: it is multiplied by images / (g - 1). A single batch has none.
    """
    means, labels, counts, rows = [], [], [], []
    for label in np.unique(part.labels):
        mine = part.labels == label
        values, images = part.values[mine].astype(np.float64), part.counts[mine]
        mean = images @ values / images.sum()
        means.append(mean)
        labels.append(label)
        counts.append(images.sum())
        if len(values) > 1:
            lengths = np.sqrt(images * (images.sum() / (len(values) - 1)))
            rows.append((values - mean) * lengths[:, None])
    size = part.values.shape[1]
    batches = PrincipalPrototypes(
        np.array(means, np.float32).reshape(-1, size),
        np.array(labels, np.int64),
        np.array(counts, np.int64),
        np.concatenate([np.zeros((0, size)), *rows]).astype(np.float32),
        np.zeros(size, np.float32),
    )
    return batches if part.block is None else joined([part.block, batches])


def _sizes(part: Prototypes) -> tuple[int, int]:
    """Return how many rows and means `principal` makes of a device's prototypes."""
    batches = np.bincount(part.labels)
    of_block = (0, 0) if part.block is None else (len(part.block.rows), len(part.block.labels))
    return int(batches[batches > 1].sum()) + of_block[0], int(np.count_nonzero(batches)) + of_block[1]


def scatter_set(
    parts: Sequence[Prototypes],
    *,
    num_classes: int,
    factors: NDArray[np.float64],
    max_multiple: float,
    arrays: Arrays,
) -> TrainingSet:
    """Return the training set of devices of which at least one has principal prototypes.

    Args:
        parts: one per device.
        num_classes: C.
        factors: how much each image of each device counts, (K,).
        max_multiple: a device's sum of squares, for each image, counts for at most so many times the median device's.
            In the mean of a class on COMPARED_DEVICES devices, its images count for at most so many times the images of
            the median device with the class. 0: no limit.
        arrays: makes the arrays of all rows.
    """
    size = parts[0].values.shape[1]
    sizes = np.array([_sizes(part) for part in parts])
    starts = np.concatenate([np.zeros((1, 2), np.int64), np.cumsum(sizes, axis=0)])
    rows, values = (arrays.empty((int(number), size)) for number in starts[-1])
    diagonals = arrays.empty((len(parts), size))
    labels, counts = np.zeros((2, len(values)), np.int64)
    for number, part in enumerate(parts):
        block = principal(part)
        its_rows, its_means = (slice(*ends) for ends in starts[number : number + 2].T)
        rows[its_rows], values[its_means], diagonals[number] = block.rows, block.means, block.diagonal
        labels[its_means], counts[its_means] = block.labels, block.counts
    of_rows, devices = (np.repeat(np.arange(len(parts)), each) for each in sizes.T)
    weights = factors[devices]
    weights *= counts.sum() / (counts @ weights)
    scatter = Scatter(rows, of_rows, diagonals, counts * weights)
    if max_multiple:
        # One device would else decide where a class is of which it has most images, in directions in which images
        # hardly differ.
        in_means = median_limits(scatter.in_means, max_multiple, sets=labels, fewest=COMPARED_DEVICES)
        np.minimum(scatter.in_means, in_means, out=scatter.in_means)
        _shorten(scatter, np.bincount(devices, counts, minlength=len(parts)), max_multiple)
    return TrainingSet(
        *(values, labels, counts, num_classes),
        weights=weights,
        devices=devices,
        scatter=scatter,
        arrays=arrays,
    )


def _shorten(scatter: Scatter, images: NDArray[np.integer], max_multiple: float) -> None:
    """Bring the scatter of each device (K,) to at most a multiple of the median device's for as many images."""
    squares = scatter.traces() / images
    factors = limiting_factors(squares, median_limits(squares, max_multiple))
    for number in np.flatnonzero(factors < 1).tolist():
        mine, _ = scatter.of_device(number)
        mine *= np.float32(np.sqrt(factors[number]))
        scatter.diagonals[number] *= np.float32(factors[number])
