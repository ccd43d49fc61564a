"""Uploads of a device in both forms of prototypes, and the images of an attacker."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.features import load_features
from benchmarks.data.images import load_data, sample
from edge_client.prototypes.principal_prototypes import coefficients, principal_prototypes
from protocol.wire.principal_prototypes import MIN_GROUP_IMAGES, PrincipalPrototypes
from protocol.wire.quantization import dequantized_block, principal_fields, range_of
from research.privacy.leakage import Release

BATCH = MIN_GROUP_IMAGES


@dataclass(frozen=True)
class Pool:
    """Images of one kind with their features."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    images: NDArray[np.uint8]
    widths: tuple[int, ...]

    def part(self, rows: NDArray[np.intp]) -> "Pool":
        """Return some of the images."""
        return Pool(self.features[rows], self.labels[rows], self.images[rows], self.widths)


@dataclass(frozen=True)
class Upload:
    """A device's images as a block and as batches of five, as the aggregator receives them.

    Attributes:
        block: the principal prototypes.
        batches: the same groups, each averaged, and the images in each by their places in `rows`.
        rows: the images, (n,), by their places in the pool.
        coefficients: what the aggregator does not receive: those of each row on the images, (k, n).
    """

    block: PrincipalPrototypes
    batches: Release
    rows: NDArray[np.intp]
    coefficients: NDArray[np.float64]


def load_pool(data: str, *, backbone: str, image_size: int, at_most: int) -> Pool:
    """Return training images of a data set, with their features."""
    features = load_features(data, backbone=backbone, image_size=image_size, at_most=at_most)
    images = sample(load_data(data).train, at_most)
    return Pool(features.train, features.train_labels, images.images, features.layers)


def draw_rows(
    pool: Pool, *, images: int, classes: int, rng: np.random.Generator
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return a device's images, equally many of some classes, and the pool's others of these classes."""
    chosen = rng.permutation(int(pool.labels.max()) + 1)[:classes]
    mine, others = [], []
    for label in np.sort(chosen):
        rows = rng.permutation(np.flatnonzero(pool.labels == label))
        mine.append(rows[: images // classes])
        others.append(rows[images // classes :])
    return np.concatenate(mine), np.concatenate(others)


def upload(pool: Pool, rows: NDArray[np.intp], *, rng: np.random.Generator) -> Upload | None:
    """Return what a device with these images uploads, without outlier filtering; None if they cannot form a block."""
    rows = rng.permutation(rows)
    rows = rows[np.argsort(pool.labels[rows], kind="stable")]
    features, labels = pool.features[rows], pool.labels[rows]
    _, numbers, counts = np.unique(labels, return_inverse=True, return_counts=True)
    within = np.concatenate([np.minimum(np.arange(count) // BATCH, count // BATCH - 1) for count in counts])
    groups = np.unique(np.stack([numbers, within]), axis=1, return_inverse=True)[1].reshape(-1)
    found = coefficients(features.copy(), numbers, groups, batch_size=BATCH, widths=pool.widths)
    if found is None:
        return None
    block = _received(principal_prototypes(features, labels, found))
    members = [np.flatnonzero(groups == group) for group in range(groups.max() + 1)]
    values = np.stack([features[each].mean(axis=0) for each in members])
    of_group = np.array([labels[each[0]] for each in members])
    batches = Release.without_noise(values, of_group, members)
    return Upload(block, batches, rows, found.astype(np.float64))


def _received(block: PrincipalPrototypes) -> PrincipalPrototypes:
    """Return a block as the aggregator receives it."""
    fields = principal_fields(np.zeros((0, block.rows.shape[1]), np.float16), block)
    classes = int(block.labels.max()) + 1
    return dequantized_block(fields["block"], range_of(fields["tensors"]), classes=classes, least=1)
