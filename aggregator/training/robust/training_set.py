"""The training set of a head, pure: the prototypes of several submissions as one labeled data set."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.arrays import Arrays
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.config.schema import MAX_MULTIPLE, Robust
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.limited_means import limited_means
from aggregator.training.robust.outlier_detection import MIN_DEVICES as COMMON_DEVICES
from aggregator.training.robust.outlier_detection import Judgment, judge
from aggregator.training.robust.outlier_statistics import summaries
from aggregator.training.robust.weights import (
    Counting,
    counting,
    limited,
    prototype_weights,
    stated_images,
)

MIN_COMMON_SHARE = 1 / 3
"""Share of the prototypes, by weight, that classes on COMMON_DEVICES devices need for the others to be limited."""


def judged_set(
    parts: Mapping[str, Prototypes],
    *,
    classes: Sequence[str],
    widths: Sequence[int] = (),
    robust: Robust,
    released: Collection[str] = (),
    arrays: Arrays | None = None,
) -> tuple[TrainingSet, Judgment, Counting]:
    """Return the prototypes that a head of these devices is made of, the outliers among them, and what counts.

    `widths` are those of `TrainingSet`. Devices in `released` are not quarantined. Arrays of all prototypes are made by
    `arrays`, in memory if it is None.

    Raises:
        ProtofleetError: the data cannot be trained on.
    """
    judgment = Judgment({})
    if robust.detect_outliers:
        judgment = judge(
            summaries(parts),
            classes=classes,
            false_alarm_rate=robust.false_alarm_rate,
            released=released,
        )
    used = {name: part for name, part in parts.items() if name not in judgment.quarantined}
    data = combine(
        list(used.values()),
        num_classes=len(classes),
        max_multiple=robust.max_multiple,
        disputed=judgment.disputed,
        arrays=arrays,
    )
    images = dict(zip(used, stated_images(list(used.values()), len(classes)), strict=True))
    return (
        replace(data, widths=widths),
        judgment,
        counting(images, classes, multiple=robust.max_multiple),
    )


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
    num_classes: int,
    max_multiple: float = MAX_MULTIPLE,
    disputed: Collection[int] = (),
    arrays: Arrays | None = None,
) -> TrainingSet:
    """Return the training set of one part per device, with little influence of devices that differ from the others.

    No device weighs more than `max_multiple` times the median device, and no mean of a class is farther from the
    others' than is expected (`limited_means`); with 0, neither is limited.

    The prototypes are in an array of `arrays`; in memory if it is None.
    """
    weights = np.concatenate(prototype_weights(parts, multiple=max_multiple))
    parts = limited(parts, multiple=max_multiple)
    arrays = arrays or Arrays()
    data = pool(limited_means(parts) if max_multiple else parts, arrays)
    return TrainingSet(
        *(data.values, data.labels, data.counts, num_classes),
        weights=weights,
        common=_common(parts, weights, disputed),
        devices=np.repeat(np.arange(len(parts)), [len(part.labels) for part in parts]),
        arrays=arrays,
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
