"""What the algorithms compute alike on devices, in torch operations that ONNX has as well."""

import torch
from torch import Tensor

NEVER = -1e9
"""In place of a logit that does not count: its exponential is 0, and what is multiplied with 0 later is finite."""


TILE_ELEMENTS = 2**16
"""In one tile, at most: some of them, of 256 kB each, fit into the cache of a core."""


def tile_rows(rows: int, columns: int) -> int:
    """Return the rows of a tile: a divisor of `rows`, at least 1, and as great as `TILE_ELEMENTS` allows."""
    return max(
        size
        for size in range(1, rows + 1)
        if rows % size == 0 and size * columns <= max(TILE_ELEMENTS, columns)
    )


def statistics(feature: Tensor, *, standardize: bool) -> tuple[Tensor, Tensor]:
    """Return what to take off each feature and what to divide it by, (L,) each; 0 and 1 leave it as it is.

    All features are divided by the same number, the root mean square of their deviations: one that hardly moves
    among few images must not be blown up elsewhere. Of no rows, the mean is 0 and the deviation 1.

    Args:
        feature: (n, L), n >= 0.
        standardize: whether to look at the features at all.
    """
    if not standardize:
        return feature.new_zeros(feature.shape[1]), feature.new_ones(feature.shape[1])
    rows = torch.ones_like(feature[:, :1]).sum().clamp_min(1)
    mean = feature.sum(dim=0) / rows
    away = feature - mean
    deviation = ((away * away).sum() / (rows * feature.shape[1])).sqrt()
    return mean, torch.where(deviation > 0, deviation, 1.0).expand(feature.shape[1])


def unit(rows: Tensor) -> Tensor:
    """Divide rows by their Euclidean length; what has none stays zero."""
    # Not square(): its derivative becomes a power in ONNX, which is slow.
    return rows / (rows * rows).sum(dim=1, keepdim=True).clamp_min(1e-12).sqrt()


def log_sum_exp(logits: Tensor, counts: Tensor) -> Tensor:
    """Return log sum exp over the last axis where `counts`, which broadcasts; finite even where nothing counts."""
    masked = torch.where(counts, logits, NEVER)
    top = masked.amax(dim=-1, keepdim=True).detach()
    return (masked - top).exp().sum(dim=-1).log() + top.squeeze(-1)


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Return bool (n, C), true at each row's label."""
    return labels[:, None] == torch.arange(num_classes)
