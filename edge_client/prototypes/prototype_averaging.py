"""Prototypes of features: averages of batches, and class means."""

import numpy as np
from numpy.typing import NDArray

from edge_client.prototypes.outlier_filter import Chunks, blocks


def average(chunks: Chunks, numbers: NDArray[np.intp]) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Return the average of each prototype's features (FedTC eq. 4), float32 (m, L), and their number, uint32 (m,).

    Law: the count-weighted mean of the prototypes is the mean of the features, however they are cut into chunks.

    Args:
        chunks: returns the features of one class's images, float32 (any, L) each. Memory grows with the prototypes, not
            with the features.
        numbers: the number of each feature's prototype, (n,); every number from 0 to m - 1 is there.
    """
    counts = np.bincount(numbers)
    sums = np.zeros((len(counts), 0))
    start = 0
    for block in blocks(chunks):
        if not start:
            sums = np.zeros((len(counts), block.shape[1]))
        np.add.at(sums, numbers[start : start + len(block)], block)
        start += len(block)
    return (sums / counts[:, None]).astype(np.float32), counts.astype(np.uint32)


def class_means(
    projection: NDArray[np.float32], labels: NDArray[np.int64], *, num_classes: int, min_images: int
) -> tuple[NDArray[np.float32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the mean of each class with at least `min_images` images (FedPCL eq. 5, FPL eq. 2).

    Of projections float32 (n, D) and labels int64 (n,) below C, returns means float32 (p, D), their classes
    uint32 (p,) in ascending order, and the images in each uint32 (p,).
    """
    counts = np.bincount(labels, minlength=num_classes)
    classes = np.flatnonzero(counts >= max(min_images, 1))
    means = np.empty((len(classes), projection.shape[1]), np.float32)
    for row, label in enumerate(classes):
        means[row] = projection[labels == label].mean(axis=0, dtype=np.float64)
    return means, classes.astype(np.uint32), counts[classes].astype(np.uint32)
