"""Outlier detection, pure: finds devices whose prototypes differ from the others', by robust statistics per class.

A device's mean of a class is compared with the other devices'. It varies with the number of images, and from place to
place: an honest device in another place is no outlier among devices in different places. Medians replace means, so
that fewer than half of the devices cannot shift the reference.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.ingest.validation import Prototypes

MIN_DEVICES = 5
"""Devices that a class needs for one of them to be an outlier."""

LEAST_DEVIATION = 0.1
"""Smallest deviation, relative to the median: in many dimensions, distances are nearly equal."""

PRECISION = 1e-3
"""Relative difference of values that float16 rounding and a new draw of images explain."""

MAX_REPORTED = 10_000
"""Robust standard deviations beyond which the number is not reported."""

MAX_SHARE = 0.5
"""Share of devices above which none is quarantined: then it is unknown which devices are the outliers."""


@dataclass(frozen=True)
class Finding:
    """A device's distance from the others in robust standard deviations, and a description."""

    deviations: float
    reason: str


@dataclass(frozen=True)
class _Class:
    """One class on the K devices that have it."""

    devices: tuple[str, ...]
    means: NDArray[np.float64]
    """(K, L), weighted by images."""
    images: NDArray[np.float64]
    variances: NDArray[np.float64]
    """Of an image about its device's mean, summed over dimensions, (K,); NaN for a single prototype."""


@dataclass(frozen=True)
class Judgment:
    """The devices to quarantine, with reasons."""

    quarantined: Mapping[str, str]
    warning: str = ""
    """Why no device is quarantined although some are outliers; empty if none is."""


def judge(
    parts: Mapping[str, Prototypes],
    *,
    classes: Sequence[str],
    threshold: float,
    released: Collection[str] = (),
) -> Judgment:
    """Return the devices to quarantine, except released ones; none if that would be most of them."""
    found = outliers(parts, classes=classes, threshold=threshold)
    if len(found) > MAX_SHARE * len(parts):
        worst = next(iter(found.items()))
        return Judgment(
            {},
            f"{len(found)} of {len(parts)} devices are far from each other, so none is quarantined; "
            f"{worst[0]}: {worst[1].reason}",
        )
    return Judgment({device: finding.reason for device, finding in found.items() if device not in released})


def outliers(
    parts: Mapping[str, Prototypes], *, classes: Sequence[str], threshold: float
) -> dict[str, Finding]:
    """Return the devices that are farther from the others than a threshold, each with its greatest distance.

    The threshold is in robust standard deviations: median absolute deviations times 1.4826.
    """
    found: dict[str, Finding] = {}

    def take(devices: Sequence[str], deviations: NDArray[np.float64], *, what: str, how: str) -> None:
        for device, value in zip(devices, deviations, strict=True):
            if value > max(threshold, found[device].deviations if device in found else 0.0):
                far = f"{value:.1f}" if value < MAX_REPORTED else f"over {MAX_REPORTED}"
                reason = (
                    f"{what}: {far} robust standard deviations {how} the median of {len(devices)} devices"
                )
                found[device] = Finding(float(value), reason)

    for label, name in enumerate(classes):
        one = _of_class(parts, label)
        if len(one.devices) >= MIN_DEVICES:
            what = f"class {name!r}"
            take(one.devices, _distances(one), what=what, how="from")
            take(one.devices, _spreads(one), what=what, how="more scattered than")
    devices = sorted(device for device, part in parts.items() if len(part.labels))
    if len(devices) >= MIN_DEVICES:
        take(devices, _lengths([parts[device] for device in devices]), what="all classes", how="longer than")
    return dict(sorted(found.items()))


def _of_class(parts: Mapping[str, Prototypes], label: int) -> _Class:
    devices, means, images, variances = [], [], [], []
    for device, part in sorted(parts.items()):
        mine = part.labels == label
        if not mine.any():
            continue
        values = part.values[mine].astype(np.float64)
        counts = np.maximum(part.counts[mine], 1).astype(np.float64)
        mean = np.average(values, axis=0, weights=counts)
        squares = ((values - mean) ** 2).sum(axis=1)
        devices.append(device)
        means.append(mean)
        images.append(counts.sum())
        # A prototype of n images has an n-th of the variance of one image.
        variances.append((counts * squares).sum() / (len(counts) - 1) if len(counts) > 1 else np.nan)
    return _Class(tuple(devices), np.array(means), np.array(images), np.array(variances))


def _distances(one: _Class) -> NDArray[np.float64]:
    """Return each mean's distance (K,) from the coordinate-wise median, in robust standard deviations.

    The squared distance of an honest device is expected to be v = t + s / n, with s an image's variance, n its
    images, and t the variance between places, plus the median's own error, pi / 2 of the usual v over K. A distance
    over the root of that is near one.
    """
    median = np.median(one.means, axis=0)
    squares = ((one.means - median) ** 2).sum(axis=1)
    known = one.variances[np.isfinite(one.variances)]
    sampling = (np.median(known) if len(known) else 0.0) / one.images
    between = max(float(np.median(squares - sampling)), 0.0)
    of_median = np.pi / 2 * float(np.median(between + sampling)) / len(one.devices)
    expected = between + sampling + of_median + PRECISION**2 * float((median**2).sum())
    return _standardized(np.sqrt(squares / np.where(expected > 0, expected, np.inf)), unit=1.0)


def _spreads(one: _Class) -> NDArray[np.float64]:
    """Return the excess scatter (K,) of each device's prototypes in robust standard deviations; 0 if unknown."""
    wider = np.zeros(len(one.devices))
    known = np.isfinite(one.variances)
    if known.sum() >= MIN_DEVICES:
        length = float(np.linalg.norm(np.median(one.means, axis=0)))
        wider[known] = _standardized(np.sqrt(one.variances[known]), unit=PRECISION * length)
    return wider


def _lengths(parts: Sequence[Prototypes]) -> NDArray[np.float64]:
    """Return the excess length (K,) of each device's prototypes of all classes, in robust standard deviations."""
    squares = [float((part.values.astype(np.float64) ** 2).sum(axis=1).mean()) for part in parts]
    return _standardized(np.sqrt(squares))


def _standardized(values: NDArray[np.float64], *, unit: float = 0.0) -> NDArray[np.float64]:
    """Return the distance of non-negative values (K,) from their median in robust standard deviations.

    Differences below the unit do not count. Law: a common factor of the values and the unit does not matter.
    """
    from scipy.stats import median_abs_deviation

    median = float(np.median(values))
    deviation = float(median_abs_deviation(values, scale="normal"))
    deviation = max(deviation, LEAST_DEVIATION * max(median, unit))
    excess = values - median
    return (
        np.where(excess == 0, 0.0, excess / deviation) if deviation > 0 else np.where(excess > 0, np.inf, 0.0)
    )
