"""Limit of how far a device's means of a class are from the other devices', pure.

Outlier detection finds few wrong devices among few: its limits are those that an honest device hardly ever exceeds.
Here a device stays in use, and its mean is moved to the distance that is expected of an honest device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aggregator.intake.validation import Prototypes
from aggregator.training.robust.outlier_detection import MAX_MALICIOUS, SIMILAR, is_mislabeled
from aggregator.training.robust.outlier_statistics import (
    TINY,
    ClassMeans,
    DeviceSummary,
    class_means,
    distances,
    summaries,
)
from aggregator.training.robust.weights import MIN_DEVICES

ROWS = 256
"""Devices that are compared with all at once."""

SUMS_DISTANCE = 1.5
"""Times the expected distance from which on class sums count in part. Of honest devices in like places none is there:
their head does not depend on which of them has an image."""


def limited_means(parts: Sequence[Prototypes]) -> list[Prototypes]:
    """Return one part per device, in which no mean of a class is farther from the median than expected.

    All prototypes that a device has of a class move together, straight towards the coordinate-wise median of the
    devices' means. Devices that resemble another one stay, as in another place (`explained`), and so do classes of
    fewer than MIN_DEVICES devices.
    """
    named = {f"{number:06}": part for number, part in enumerate(parts)}
    summarized = summaries(named)
    classes = {
        label: one
        for label in np.unique(np.concatenate([part.labels for part in parts])).tolist()
        if len((one := class_means(summarized, label)).devices) >= MIN_DEVICES
    }
    medians = {label: one.median for label, one in classes.items()}
    changed: dict[str, NDArray[np.float32]] = {}
    for label, one in classes.items():
        factors = 1 / np.sqrt(np.maximum(distances(one).ratios, TINY))
        far = np.flatnonzero(factors < 1)
        for at in far[~explained(one, far, label, medians)].tolist():
            device = one.devices[at]
            if device not in changed:
                changed[device] = named[device].values.copy()
            move = (factors[at] - 1) * one.deviations[at]
            changed[device][named[device].labels == label] += move.astype(np.float32)
    return [replace(part, values=changed.get(device, part.values)) for device, part in named.items()]


def distance_factors(parts: Mapping[str, DeviceSummary], *, classes: int) -> dict[str, NDArray[np.float64]]:
    """Return how much each device's sum of each class counts (C,), for devices that do not count fully.

    Sums are integers and cannot be moved. A device whose mean is SUMS_DISTANCE times as far from the median as expected
    or farther has the effect on the class of one at that distance, whether or not other devices resemble it.
    """
    found: dict[str, NDArray[np.float64]] = {}
    for label in range(classes):
        one = class_means(parts, label)
        if len(one.devices) < MIN_DEVICES:
            continue
        factors = SUMS_DISTANCE / np.sqrt(np.maximum(distances(one).ratios, TINY))
        for at in np.flatnonzero(factors < 1).tolist():
            found.setdefault(one.devices[at], np.ones(classes))[label] = factors[at]
    return found


def explained(
    one: ClassMeans, devices: NDArray[np.intp], label: int, medians: dict[int, NDArray[np.float64]]
) -> NDArray[np.bool_]:
    """Return for some devices (k,) of a class whether their distance from the median may be that of another place.

    Such a device is much nearer to another device than both are to the median. Where those that it resembles are fewer
    than a third of the devices, they may all be malicious: then its mean must not be much nearer to another class.
    """
    deviations = one.deviations
    squares = (deviations**2).sum(axis=1)
    alike = np.zeros(len(devices), dtype=np.int64)
    for start in range(0, len(devices), ROWS):  # all pairs at once would take much memory in a large fleet
        rows = devices[start : start + ROWS]
        sums = squares[rows, None] + squares
        near = sums - 2 * deviations[rows] @ deviations.T < SIMILAR * sums / 2
        alike[start : start + ROWS] = near.sum(axis=1)
    return np.array(
        [
            number > 1 and (number >= MAX_MALICIOUS * len(squares) or not is_mislabeled(mean, label, medians))
            for number, mean in zip(alike, one.means[devices], strict=True)
        ],
        dtype=np.bool_,
    )
