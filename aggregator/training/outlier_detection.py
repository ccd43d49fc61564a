"""Which devices' prototypes are not like the others', pure: by robust statistics, class by class.

What is compared is a device's mean of a class. It scatters about the mean of all the less, the more images it is of,
and about that of its own place besides: a device that is honest, but elsewhere, is no outlier among others that are
elsewhere too. Medians take the place of means, so that less than half of the devices cannot move what is judged by.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import median_abs_deviation

from aggregator.ingest.validation import Prototypes

MIN_DEVICES = 5
"""Devices that a class must have before it says anything of one of them."""

LEAST_DEVIATION = 0.1
"""Of distances that are nearly equal, as they are in many dimensions, a deviation this large is nothing yet."""

PRECISION = 1e-3
"""Relative to the values: nearer than this, float16 and images drawn anew make the difference."""

MOST_TOLD = 10_000
"""Robust standard deviations beyond which one need not know how many."""

MAX_SHARE = 0.5
"""Of the devices: where more of them would be quarantined than this, it is not known who the others are."""


@dataclass(frozen=True)
class Finding:
    """What is odd about a device, in words, and by how many robust standard deviations."""

    deviations: float
    why: str


@dataclass(frozen=True)
class _Class:
    """One class on the K devices that have it.

    Args:
        devices: their names.
        means: float64 (K, L), count-weighted.
        images: float64 (K,).
        variances: float64 (K,), of an image about its device's mean, summed over dimensions; NaN where a single
            prototype does not tell.
    """

    devices: tuple[str, ...]
    means: NDArray[np.float64]
    images: NDArray[np.float64]
    variances: NDArray[np.float64]


@dataclass(frozen=True)
class Judgment:
    """Who is quarantined and why, in words; and if nobody is although somebody is far off, why that is."""

    aside: Mapping[str, str]
    doubt: str = ""


def judge(
    parts: Mapping[str, Prototypes],
    *,
    classes: Sequence[str],
    threshold: float,
    readmitted: Collection[str] = (),
) -> Judgment:
    """Return the devices to quarantine, with reasons; none where that would be most of them."""
    found = far_off(parts, classes=classes, threshold=threshold)
    if len(found) > MAX_SHARE * len(parts):
        worst = next(iter(found.items()))
        return Judgment(
            {},
            f"{len(found)} of {len(parts)} devices are far from each other, so nobody is quarantined; "
            f"{worst[0]}: {worst[1].why}",
        )
    return Judgment({device: one.why for device, one in found.items() if device not in readmitted})


def far_off(
    parts: Mapping[str, Prototypes], *, classes: Sequence[str], threshold: float
) -> dict[str, Finding]:
    """The devices that are farther from the others than a threshold, each with the worst that was found.

    Args:
        parts: what each device has uploaded.
        classes: their names, by label.
        threshold: robust standard deviations: median absolute deviations, times 1.4826.
    """
    found: dict[str, Finding] = {}

    def take(devices: Sequence[str], deviations: NDArray[np.float64], *, what: str, how: str) -> None:
        for device, value in zip(devices, deviations, strict=True):
            if value > max(threshold, found[device].deviations if device in found else 0.0):
                far = f"{value:.1f}" if value < MOST_TOLD else f"over {MOST_TOLD}"
                why = f"{what}: {far} robust standard deviations {how} the median of {len(devices)} devices"
                found[device] = Finding(float(value), why)

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
        values, counts = (
            part.values[mine].astype(np.float64),
            np.maximum(part.counts[mine], 1).astype(np.float64),
        )
        mean = np.average(values, axis=0, weights=counts)
        squares = ((values - mean) ** 2).sum(axis=1)
        devices.append(device)
        means.append(mean)
        images.append(counts.sum())
        # A prototype of n images scatters by the variance of one over n.
        variances.append((counts * squares).sum() / (len(counts) - 1) if len(counts) > 1 else np.nan)
    return _Class(tuple(devices), np.array(means), np.array(images), np.array(variances))


def _distances(one: _Class) -> NDArray[np.float64]:
    """How far each mean (K,) is from the coordinate-wise median, in robust standard deviations.

    The squared distance of an honest device is expected to be v = t + s / n, with s an image's variance, n its
    images, and t what places differ by; and the median's own error beside it, pi / 2 of the usual v over K. A
    distance over the root of that is near one.
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
    """How much wider each device's prototypes (K,) scatter than usual, in robust standard deviations; 0 if unknown."""
    wider = np.zeros(len(one.devices))
    known = np.isfinite(one.variances)
    if known.sum() >= MIN_DEVICES:
        length = float(np.linalg.norm(np.median(one.means, axis=0)))
        wider[known] = _standardized(np.sqrt(one.variances[known]), unit=PRECISION * length)
    return wider


def _lengths(parts: Sequence[Prototypes]) -> NDArray[np.float64]:
    """How much longer each device's prototypes are than usual, (K,), whatever their classes, in robust deviations."""
    squares = [float((part.values.astype(np.float64) ** 2).sum(axis=1).mean()) for part in parts]
    return _standardized(np.sqrt(squares))


def _standardized(values: NDArray[np.float64], *, unit: float = 0.0) -> NDArray[np.float64]:
    """Values (K,), none of them negative, from their median in robust standard deviations.

    Args:
        values: if they and the unit are c times as large, the figures are the same.
        unit: what is small against this is nothing.
    """
    median = float(np.median(values))
    deviation = float(median_abs_deviation(values, scale="normal"))
    deviation = max(deviation, LEAST_DEVIATION * max(median, unit))
    excess = values - median
    return (
        np.where(excess == 0, 0.0, excess / deviation) if deviation > 0 else np.where(excess > 0, np.inf, 0.0)
    )
