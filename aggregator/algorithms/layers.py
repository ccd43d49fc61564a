"""Torch functions shared by the algorithms, of operations that ONNX has as well."""

from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]

NEVER = -1e9
"""Replaces a logit that does not count: its exponential is 0, and its product with 0 is finite."""

TILE_ELEMENTS = 2**16
"""Elements of a tile, at most: several tiles of 256 kB fit into the cache of a core."""


def tile_rows(rows: int, columns: int) -> int:
    """Return the rows of a tile: a divisor of `rows`, at least 1, and as great as `TILE_ELEMENTS` allows."""
    return max(
        size
        for size in range(1, rows + 1)
        if rows % size == 0 and size * columns <= max(TILE_ELEMENTS, columns)
    )


def statistics(feature: Tensor, *, standardize: bool) -> tuple[Tensor, Tensor]:
    """Return the mean to subtract from features (n, L) and the deviation to divide them by, (L,) each.

    All features are divided by the same number, the root mean square of their deviations, so that a feature that
    hardly varies among few images is not amplified on others. Of no rows, and without `standardize`, the mean is 0
    and the deviation 1.
    """
    if not standardize:
        return feature.new_zeros(feature.shape[1]), feature.new_ones(feature.shape[1])
    rows = torch.ones_like(feature[:, :1]).sum().clamp_min(1)
    mean = feature.sum(dim=0) / rows
    away = feature - mean
    deviation = ((away * away).sum() / (rows * feature.shape[1])).sqrt()
    return mean, torch.where(deviation > 0, deviation, 1.0).expand(feature.shape[1])


def standardized(tensors: Tensors) -> Tensor:
    """Return `feature` standardized with `mean` and `std`, (n, L)."""
    return (tensors["feature"] - tensors["mean"]) / tensors["std"]


def unit(rows: Tensor) -> Tensor:
    """Divide rows by their Euclidean length; rows of zeros stay zero."""
    # Not square(): its derivative becomes a power in ONNX, which is slow.
    return rows / (rows * rows).sum(dim=1, keepdim=True).clamp_min(1e-12).sqrt()


def log_sum_exp(logits: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return log sum exp over the last axis of the logits that count, by default all; finite even if none does."""
    masked = logits if counts is None else torch.where(counts, logits, NEVER)
    top = masked.amax(dim=-1, keepdim=True).detach()
    return (masked - top).exp().sum(dim=-1).log() + top.squeeze(-1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of each row of logits (n, C) with its label, (n,)."""
    own = torch.where(one_hot(labels, logits.shape[1]), logits, 0.0).sum(dim=1)
    return log_sum_exp(logits) - own


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Return bool (n, C), true at each row's label."""
    return labels[:, None] == torch.arange(num_classes)


def log_prior(counts: Tensor) -> Tensor:
    """Return the log of how often a device with these counts of images, (C,), expects each class, up to a constant.

    A tenth of the mean count is added to each, so that a class without images is not ruled out. A classifier learns
    this as its bias; similarities to prototypes have none. Not in the paper.
    """
    total = counts.sum()
    return (counts + torch.where(total > 0, total, torch.ones_like(total)) / (10 * counts.shape[0])).log()
