"""The training set of a head, pure: the prototypes of several submissions as one labeled data set."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.ingest.validation import Prototypes

MIN_DEVICES = 3
"""Devices that a class needs for its median to outweigh one of them."""

TRIMMED_SHARE = 0.2
"""Share of each class's prototypes that `trimmed` omits."""


def pool(parts: Sequence[Prototypes]) -> Prototypes:
    """Concatenate the prototypes of several submissions (FedTC section 3.1, before eq. 5)."""
    return Prototypes(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.counts for part in parts]),
    )


def half_of(part: Prototypes) -> Prototypes:
    """Return every second prototype of each class, and the only one of a class; the others can be freed."""
    order = np.argsort(part.labels, kind="stable")
    first = np.searchsorted(part.labels[order], part.labels[order])
    chosen = np.sort(order[(np.arange(len(order)) - first) % 2 == 0])
    return Prototypes(part.values[chosen], part.labels[chosen], part.counts[chosen])


def combine(parts: Sequence[Prototypes], *, by: Literal["none", "trimmed", "median"]) -> Prototypes:
    """Return the training set of one part per device, optionally with little influence of a few bad prototypes.

    `trimmed` omits the fifth of each class that is farthest from the median of the devices' means; `median` shifts each
    device's prototypes of a class so that their mean is that median. A class of fewer than MIN_DEVICES devices stays
    unchanged.
    """
    if by == "none":
        return pool(parts)
    labels = np.unique(np.concatenate([part.labels for part in parts]))
    medians = {int(label): median for label in labels if (median := _median(parts, label)) is not None}
    if by == "median":
        return pool([_shifted(part, medians) for part in parts])
    data = pool(parts)
    included = np.ones(len(data.labels), dtype=np.bool_)
    for label, median in medians.items():
        members = np.flatnonzero(data.labels == label)
        # A prototype of n images is expected to be n times nearer.
        distances = data.counts[members] * ((data.values[members] - median) ** 2).sum(axis=1)
        order = np.argsort(distances, kind="stable")
        included[members[order[len(members) - int(TRIMMED_SHARE * len(members)) :]]] = False
    return Prototypes(data.values[included], data.labels[included], data.counts[included])


def _median(parts: Sequence[Prototypes], label: int) -> NDArray[np.float32] | None:
    """Return the coordinate-wise median (L,) of the devices' means of a class; None for too few devices."""
    means = [_mean(part, part.labels == label) for part in parts if (part.labels == label).any()]
    return np.median(np.array(means), axis=0).astype(np.float32) if len(means) >= MIN_DEVICES else None


def _mean(part: Prototypes, members: NDArray[np.bool_]) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.average(part.values[members], axis=0, weights=part.counts[members])
    return mean


def _shifted(part: Prototypes, medians: dict[int, NDArray[np.float32]]) -> Prototypes:
    values = part.values.copy()
    for label, median in medians.items():
        members = part.labels == label
        if members.any():
            values[members] += median - _mean(part, members).astype(np.float32)
    return Prototypes(values, part.labels, part.counts)
