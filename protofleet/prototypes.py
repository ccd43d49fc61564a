"""Prototypes of features, as a device makes them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.intake.validation import Prototypes
from aggregator.training.robust.training_set import pool
from edge_client.prototypes.outlier_filter import closest_features
from edge_client.prototypes.principal_prototypes import coefficients, principal_prototypes
from edge_client.prototypes.prototype_averaging import average
from protocol.errors import ConfigError
from protocol.wire.principal_prototypes import (
    MAX_VALUES,
    MIN_BLOCK_IMAGES,
    MIN_GROUP_IMAGES,
    PrincipalPrototypes,
)

__all__ = [
    "Prototypes",
    "average_class",
    "batch_prototypes",
    "check_prototypes",
    "check_rows",
    "device_prototypes",
]


def batch_prototypes(
    features: NDArray[np.float32],
    labels: NDArray[np.integer],
    *,
    batch_size: int = 5,
    alpha: float = 0.99,
    min_images: int = 2,
    seed: int | Sequence[int] = 0,
) -> Prototypes:
    """Return the prototypes of one device's images: averages of batches of each class (FedTC eq. 1-4).

    Args:
        features: float32 (n, L), of `extract_features`.
        labels: integers (n,), the class of each.
        batch_size: images in a prototype, B; the remainder of a class joins its last one.
        alpha: share of each class that outlier filtering keeps, those closest to the class mean by cosine.
        min_images: images that a class with less than a batch needs for a prototype.
        seed: of the batches.

    Returns:
        `values` float32 (m, L), `labels` int64 (m,), and `counts` int64 (m,), the images averaged in each.

    Raises:
        ConfigError: features and labels do not fit each other, a feature is not finite, a label is no integer from 0,
            or `batch_size` or `alpha` is out of range.
    """
    features, labels = _checked(features, labels, batch_size=batch_size, alpha=alpha)
    rng = np.random.default_rng(seed)
    nothing = np.zeros(0, np.int64)
    made = [Prototypes(np.zeros((0, features.shape[1]), np.float32), nothing, nothing)]
    for label in np.unique(labels):
        values, counts = average_class(
            features[labels == label], batch=batch_size, rng=rng, alpha=alpha, min_images=min_images
        )
        made.append(Prototypes(values, np.full(len(counts), label, np.int64), counts.astype(np.int64)))
    return pool(made)


def device_prototypes(
    features: NDArray[np.float32],
    labels: NDArray[np.integer],
    *,
    batch_size: int = 5,
    alpha: float = 0.99,
    min_images: int = 2,
    widths: Sequence[int] = (),
    seed: int | Sequence[int] = 0,
) -> Prototypes:
    """Return what a device uploads of its images by default: principal prototypes, where there are enough images.

    Classes with a group of at least 5, `batch_size` and `min_images` images are in a block if that has at least 50
    images. The others are in batches, as `batch_prototypes` makes them.

    Args:
        features: float32 (n, L), of `extract_features`.
        labels: integers (n,), the class of each.
        batch_size: images in a prototype, B; no image has more than a B-th of what is uploaded.
        alpha: as for `batch_prototypes`.
        min_images: as for `batch_prototypes`.
        widths: the number of values of each layer; empty for one.
        seed: of the batches.

    Returns:
        As `batch_prototypes`, and `block`: the principal prototypes.

    Raises:
        ConfigError: as `batch_prototypes`, or `widths` do not add up to L.
    """
    features, labels = _checked(features, labels, batch_size=batch_size, alpha=alpha)
    if widths and sum(widths) != features.shape[1]:
        raise ConfigError(f"expected widths that add up to {features.shape[1]}, got {sum(widths)}")
    options: dict[str, Any] = {"alpha": alpha, "min_images": min_images, "seed": seed}
    size = max(MIN_GROUP_IMAGES, batch_size, min_images)
    rng = np.random.default_rng(seed)
    rows, groups, first = [np.zeros(0, np.intp)], [np.zeros(0, np.intp)], 0
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        kept, numbers = _dealt(features[members], batch=size, rng=rng, alpha=alpha, min_images=size)
        rows.append(members[kept])
        groups.append(numbers + first)
        first += int(numbers.max(initial=-1)) + 1
    mine, group = np.concatenate(rows), np.concatenate(groups)
    if len(mine) < MIN_BLOCK_IMAGES or features.shape[1] > MAX_VALUES:
        return batch_prototypes(features, labels, batch_size=batch_size, **options)
    found = coefficients(
        features[mine].astype(np.float32), labels[mine], group, batch_size=size, widths=widths
    )
    if found is None:
        return batch_prototypes(features, labels, batch_size=batch_size, **options)
    rest = ~np.isin(labels, labels[mine])
    others = batch_prototypes(features[rest], labels[rest], batch_size=batch_size, **options)
    return replace(others, block=principal_prototypes(features[mine], labels[mine], found))


def _checked(
    features: NDArray[np.float32], labels: NDArray[np.integer], *, batch_size: int, alpha: float
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return features and labels as arrays; raises ConfigError if prototypes cannot be made of them."""
    features, labels = np.asarray(features), np.asarray(labels)
    check_rows(features, labels)
    if batch_size < 1:
        raise ConfigError(f"expected a batch_size from 1, got {batch_size}")
    if not 0 < alpha <= 1:
        raise ConfigError(f"expected an alpha above 0 and up to 1, got {alpha}")
    return features, labels


def check_rows(rows: NDArray[Any], numbers: NDArray[Any], *, name: str = "label", least: int = 0) -> None:
    """Raise ConfigError unless rows (n, L) are finite, and have one integer each, (n,), from `least`."""
    is_integer = not numbers.size or numbers.dtype.kind in "iu"
    if rows.ndim != 2 or rows.dtype.kind not in "fiu" or numbers.shape != rows.shape[:1] or not is_integer:
        raise ConfigError(
            f"expected features (n, L) and one integer {name} per feature row, got features {rows.dtype} {rows.shape} "
            f"and {name}s {numbers.dtype} {numbers.shape}"
        )
    if numbers.min(initial=least) < least:
        raise ConfigError(f"expected {name}s from {least}, got {numbers.min()}")
    for extreme in (rows.min(initial=0), rows.max(initial=0)):
        if not np.isfinite(extreme):
            raise ConfigError(f"expected finite features, got {extreme}: omit these images")


def check_prototypes(part: Prototypes) -> None:
    """Raise ConfigError unless the arrays of a device's prototypes fit each other, and are finite."""
    check_rows(part.values, part.labels)
    check_rows(part.values, part.counts, name="count", least=1)
    if part.block is not None:
        _check_block(part.block, part.values.shape[1])


def average_class(
    features: NDArray[np.float32],
    *,
    batch: int,
    rng: np.random.Generator,
    alpha: float = 1.0,
    min_images: int = 2,
) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Return prototypes (m, L) of one class's features (n, L), and the number of images in each, (m,).

    Laws: the counts add up to the images kept, and the count-weighted mean of the prototypes is the mean of the kept
    features. The remainder of the batches joins the last one; fewer than `min_images` give no prototype.
    """
    kept, numbers = _dealt(features, batch=batch, rng=rng, alpha=alpha, min_images=min_images)
    return average(lambda: [features[kept]], numbers)


def _dealt(
    features: NDArray[np.float32], *, batch: int, rng: np.random.Generator, alpha: float, min_images: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the features (n, L) that are kept, by their numbers, and the batch of each."""
    kept = np.flatnonzero(closest_features(lambda: [features], alpha=alpha))
    batches = max(len(kept) // batch, int(len(kept) >= min(min_images, batch)))
    kept = kept if batches else kept[:0]
    numbers = np.minimum(np.arange(len(kept)) // batch, batches - 1)
    return kept, numbers[np.argsort(rng.permutation(len(kept)))]


def _check_block(block: PrincipalPrototypes, size: int) -> None:
    """Raise ConfigError unless the arrays of a block of `size` values fit each other, and are finite."""
    check_rows(block.means, block.labels)
    check_rows(block.means, block.counts, name="count", least=1)
    if not block.means.shape[1:] == block.rows.shape[1:] == block.diagonal.shape == (size,):
        raise ConfigError(
            f"expected a block of {size} values, got means {block.means.shape}, rows {block.rows.shape} and a "
            f"diagonal {block.diagonal.shape}"
        )
    if not (
        np.isfinite(block.rows).all() and (block.diagonal >= 0).all() and np.isfinite(block.diagonal).all()
    ):
        raise ConfigError("expected finite rows in a block, and a finite diagonal that is not negative")
