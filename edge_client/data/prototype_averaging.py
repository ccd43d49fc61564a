"""Prototypes of features: FedTC's batch averages without outliers, and class means."""

import numpy as np
from numpy.typing import NDArray

from edge_client.data.outlier_filter import Chunks, blocks, closest_features
from protocol.errors import ConfigError

OMITTED = -1


def batch_prototypes(
    chunks: Chunks, *, alpha: float, batch_size: int, min_images: int, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Average the features of one class on one device into batch-level prototypes (FedTC eq. 1-4).

    Laws: the counts add up to the images kept; the count-weighted mean of the prototypes is the mean of the
    kept features; the result does not depend on how the features are cut into chunks.

    Args:
        chunks: called three times, returns the class's features, float32 (any, L) each, in the same order. Memory
            grows with the prototypes, not with the features.
        alpha: share of the features to keep, in (0, 1], rounded up: those whose cosine to the class mean is highest.
        batch_size: features in a prototype, B. The remainder joins the last one.
        min_images: fewer kept features give no prototype; at most `batch_size`.
        rng: assigns the kept features to prototypes.

    Returns:
        Prototypes float32 (m, L) and the number of images in each, uint32 (m,): one prototype from fewer than B
        kept features, none from fewer than `min_images`.

    Raises:
        ConfigError: a setting is out of range.
        ProtofleetError: a feature is not finite.
    """
    if not 0 < alpha <= 1:
        raise ConfigError(f"alpha is the share of images to keep, above 0 and at most 1, not {alpha}")
    if not 1 <= min_images <= batch_size:
        raise ConfigError(
            f"min_images must lie between 1 and the batch size {batch_size}, not at {min_images}: "
            "no prototype averages fewer images than that"
        )
    kept = closest_features(chunks, alpha=alpha)
    return average(chunks, _deal(kept, batch_size=batch_size, min_images=min_images, rng=rng))


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


def _deal(
    kept: NDArray[np.bool_], *, batch_size: int, min_images: int, rng: np.random.Generator
) -> NDArray[np.intp]:
    """Return the number of each feature's prototype, (n,), or OMITTED."""
    images = int(kept.sum())
    prototypes = max(images // batch_size, int(images >= min_images))
    dealt = np.full(len(kept), OMITTED, dtype=np.intp)
    if prototypes:
        shuffled = rng.permutation(np.flatnonzero(kept))
        dealt[shuffled] = np.minimum(np.arange(images) // batch_size, prototypes - 1)
    return dealt


def average(chunks: Chunks, dealt: NDArray[np.intp]) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Return the average of each prototype's features (eq. 4) as `batch_prototypes` does.

    `dealt` is the number of each feature's prototype, (n,), or OMITTED.
    """
    counts = np.bincount(dealt[dealt != OMITTED])
    sums = np.zeros((len(counts), 0))
    start = 0
    for block in blocks(chunks):
        if not start:
            sums = np.zeros((len(counts), block.shape[1]))
        into = dealt[start : start + len(block)]
        np.add.at(sums, into[into != OMITTED], block[into != OMITTED])
        start += len(block)
    return (sums / counts[:, None]).astype(np.float32), counts.astype(np.uint32)
