"""The training set of a head, pure: the prototypes of several submissions as one labeled data set."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.arrays import Arrays
from aggregator.config.schema import MAX_MULTIPLE
from aggregator.ingest.validation import Prototypes
from aggregator.training.robust.limited_means import limited_means
from aggregator.training.robust.outlier_detection import MIN_DEVICES as COMMON_DEVICES
from aggregator.training.robust.weights import limited, prototype_weights

MIN_COMMON_SHARE = 1 / 3
"""Share of the prototypes, by weight, that classes on COMMON_DEVICES devices need for the others to be limited."""


@dataclass(frozen=True, kw_only=True)
class WeightedPrototypes(Prototypes):
    """Prototypes of several devices."""

    weights: NDArray[np.float64]
    """(m,), how much each counts."""
    common: NDArray[np.bool_]
    """(m,), False if its class is on so few devices that its effect on the others is limited."""
    devices: NDArray[np.int64]
    """(m,), the number of its device among `parts`."""


def pool(parts: Sequence[Prototypes], arrays: Arrays | None = None) -> Prototypes:
    """Concatenate the prototypes of several submissions (FedTC section 3.1, before eq. 5), in an array of `arrays`."""
    shape = (sum(len(part.labels) for part in parts), *parts[0].values.shape[1:])
    return Prototypes(
        np.concatenate([part.values for part in parts], out=(arrays or Arrays()).empty(shape)),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.counts for part in parts]),
    )


def half_of(part: Prototypes) -> Prototypes:
    """Return every second prototype of each class, and the only one of a class; the others can be freed."""
    order = np.argsort(part.labels, kind="stable")
    first = np.searchsorted(part.labels[order], part.labels[order])
    chosen = np.sort(order[(np.arange(len(order)) - first) % 2 == 0])
    return Prototypes(part.values[chosen], part.labels[chosen], part.counts[chosen])


def combine(
    parts: Sequence[Prototypes],
    *,
    max_multiple: float = MAX_MULTIPLE,
    disputed: Collection[int] = (),
    arrays: Arrays | None = None,
) -> WeightedPrototypes:
    """Return the training set of one part per device, with little influence of devices that differ from the others.

    No device weighs more than `max_multiple` times the median device, and no mean of a class is farther from the
    others' than is expected (`limited_means`); with 0, neither is limited.

    The prototypes are in an array of `arrays`; in memory if it is None.
    """
    weights = np.concatenate(prototype_weights(parts, multiple=max_multiple))
    parts = limited(parts, multiple=max_multiple)
    data = pool(limited_means(parts) if max_multiple else parts, arrays)
    return WeightedPrototypes(
        *(data.values, data.labels, data.counts),
        weights=weights,
        common=_common(parts, weights, disputed),
        devices=np.repeat(np.arange(len(parts)), [len(part.labels) for part in parts]),
    )


def _common(
    parts: Sequence[Prototypes], weights: NDArray[np.float64], disputed: Collection[int]
) -> NDArray[np.bool_]:
    """Return the prototypes (m,) of undisputed classes on COMMON_DEVICES devices; all, if these are too few.

    Outlier detection checks these classes. Of others, a single device could decide what all classes share.
    """
    labels = np.concatenate([part.labels for part in parts])
    devices = np.bincount(np.concatenate([np.unique(part.labels) for part in parts]))
    common = (devices[labels] >= COMMON_DEVICES) & ~np.isin(labels, list(disputed))
    enough = weights[common].sum() >= MIN_COMMON_SHARE * weights.sum() and len(np.unique(labels[common])) > 1
    return common if enough else np.ones_like(common)
