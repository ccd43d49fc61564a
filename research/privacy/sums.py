"""Membership in exact sums of single images, inferred from their second moment."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protofleet.simulation.fleet import Features
from protofleet.simulation.statistics import map_features

SIZES = (200, 377, 1000, 1281, 2000, 5000, 20_000)
"""Images on the device."""
NON_MEMBERS = 2000
RANK_TOLERANCE = 1e-9
"""Relative to the largest eigenvalue: rows are integers, so others are zero but for the arithmetic."""


@dataclass(frozen=True, kw_only=True)
class SumLeak:
    """Disclosure by the sums of one device."""

    images: int
    values: int
    """In a row."""
    rank: int
    """Of the second moment; less than `values` leaves directions in which no image of the device has any part."""
    auc: float
    """Probability that an image of the device scores higher than another one; chance is 0.5."""


def attack_sums(features: Features, *, images: int, seed: int) -> SumLeak:
    """Measure membership in the second moment of so many random training images' rows, without random features."""
    from sklearn.metrics import roc_auc_score

    order = np.random.default_rng(seed).permutation(len(features.train_labels))
    chosen = np.concatenate([order[:images], order[images:][-NON_MEMBERS:]])
    part = replace(features, train=features.train[chosen], train_labels=features.train_labels[chosen])
    rows = map_features(part, random_features=0, seed=seed).rows.astype(np.float64)
    rank, scores = membership(rows[:images].T @ rows[:images], rows)
    auc = float(roc_auc_score(np.arange(len(rows)) < images, scores))
    return SumLeak(images=images, values=rows.shape[1], rank=rank, auc=auc)


def membership(moment: NDArray[np.float64], rows: NDArray[np.float64]) -> tuple[int, NDArray[np.float64]]:
    """Return the rank of a second moment (D, D), and how likely each row (n, D) is in it, (n,).

    A row of the device has no part outside of the moment's row space; where that is everything, its leverage is small.
    """
    values, axes = np.linalg.eigh(moment)
    spanned = values > RANK_TOLERANCE * values.max()
    along = rows @ axes
    if spanned.all():
        return len(values), -(along**2 / values).sum(axis=1)
    outside = np.square(along[:, ~spanned]).sum(axis=1) / np.square(rows).sum(axis=1)
    return int(spanned.sum()), -outside
