"""What a head is trained on, pure: the prototypes of several submissions as one labeled data set."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.ingest.validation import Prototypes

MIN_DEVICES = 3
"""Devices that a class must have before its median stands against one of them."""

TRIMMED_SHARE = 0.2
"""Of each class's prototypes, which `trimmed` leaves out."""


def pool(parts: Sequence[Prototypes]) -> Prototypes:
    """The prototypes of several submissions as one labeled data set (FedTC section 3.1, before eq. 5)."""
    return Prototypes(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.counts for part in parts]),
    )


def withstanding(parts: Sequence[Prototypes], *, by: Literal["none", "trimmed", "median"]) -> Prototypes:
    """The training set, made so that a few bad prototypes in it do little.

    Args:
        parts: one a device.
        by: with `trimmed`, the fifth of each class that is farthest from the median of the devices' means is left
            out; with `median`, each device's prototypes of a class are moved together until their mean is there.
            A class of fewer than MIN_DEVICES devices stays as it is.
    """
    if by == "none":
        return pool(parts)
    labels = np.unique(np.concatenate([part.labels for part in parts]))
    medians = {int(label): median for label in labels if (median := _median(parts, label)) is not None}
    if by == "median":
        return pool([_moved(part, medians) for part in parts])
    data = pool(parts)
    kept = np.ones(len(data.labels), dtype=np.bool_)
    for label, median in medians.items():
        members = np.flatnonzero(data.labels == label)
        far = _distances(data.values[members], data.counts[members], median)
        kept[members[np.argsort(far, kind="stable")[len(members) - int(TRIMMED_SHARE * len(members)) :]]] = (
            False
        )
    return Prototypes(data.values[kept], data.labels[kept], data.counts[kept])


def _distances(
    values: NDArray[np.float32], counts: NDArray[np.int64], median: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Squared distances (m,) from a median, times the images: a prototype of n is expected to be n times nearer."""
    distances: NDArray[np.float32] = counts * ((values - median) ** 2).sum(axis=1)
    return distances


def _median(parts: Sequence[Prototypes], label: int) -> NDArray[np.float32] | None:
    """The coordinate-wise median (L,) of the devices' means of a class; None of too few devices."""
    means = [_mean(part, part.labels == label) for part in parts if (part.labels == label).any()]
    return np.median(np.array(means), axis=0).astype(np.float32) if len(means) >= MIN_DEVICES else None


def _mean(part: Prototypes, mine: NDArray[np.bool_]) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.average(part.values[mine], axis=0, weights=part.counts[mine])
    return mean


def _moved(part: Prototypes, medians: dict[int, NDArray[np.float32]]) -> Prototypes:
    values = part.values.copy()
    for label, median in medians.items():
        mine = part.labels == label
        if mine.any():
            values[mine] += median - _mean(part, mine).astype(np.float32)
    return Prototypes(values, part.labels, part.counts)
