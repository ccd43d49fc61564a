"""Test statistics of outlier detection, pure: how far each device's prototypes are from the other devices'.

Every statistic is a sum of squares over what is expected of an honest device, so that its limit follows from the F
distribution. Medians replace means, so that fewer than half of the devices cannot shift the reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aggregator.intake.validation import Prototypes
from protocol.wire.principal_prototypes import PrincipalPrototypes

Floats = NDArray[np.float64]

PRECISION = 1e-3
"""Relative difference of values that rounding and a new draw of images explain."""

TOLERANCE = 1.5**2
"""Ratio of squared lengths, or of variances, that honest devices in different places may have."""

EFFICIENCY = 0.37
"""Degrees of freedom of the reference over those of a mean of all devices: a median is less exact."""

TINY = 1e-30
"""Keeps the divisor above zero where all values are equal."""

LEAST_BETWEEN = 0.25
"""Least variance between places, relative to the median device's error: less cannot be estimated."""

COSINE_MARGIN = 0.5
"""Part of the estimated number of directions that is used."""

STANDARD_ERRORS = 1.0
"""Standard errors by which the variance between places may exceed its estimate."""


@dataclass(frozen=True)
class Test:
    """One F test for each of K devices."""

    devices: Sequence[str]
    ratios: Floats
    """(K,), near one for an honest device."""
    dof: Floats
    """Degrees of freedom of each ratio's numerator, (K,): two over its variance."""
    reference_dof: float
    """Degrees of freedom of the denominator."""

    def limits(self, probability: float) -> Floats:
        """Return the ratio (K,) that an honest device exceeds with this probability, at most.

        A weighted sum of squares of normal variables of mean one and variance 2 / dof has its heaviest tail if one of
        them has all the variance: 1 + (z^2 - 1) / sqrt(dof). The F distribution allows for the estimated mean.
        """
        from scipy.stats import f

        limits: Floats = 1 + (f.isf(probability, 1, self.reference_dof) - 1) / np.sqrt(self.dof)
        return limits


@dataclass(frozen=True)
class ClassMeans:
    """One class on the K devices that have it."""

    devices: Sequence[str]
    means: Floats
    """(K, L), weighted by images."""
    images: Floats
    prototypes: Floats
    variances: Floats
    """The variance of an image about its device's mean, summed over dimensions, (K,); NaN for a single prototype."""
    median: Floats
    """The median of the means, by coordinate, (L,)."""

    @property
    def deviations(self) -> Floats:
        """Return each mean minus the median, (K, L)."""
        return self.means - self.median

    @property
    def variance(self) -> float:
        """Return the median variance; 0 if unknown."""
        known = self.variances[np.isfinite(self.variances)]
        return float(np.median(known)) if len(known) else 0.0


@dataclass(frozen=True, eq=False)
class ClassSummary:
    """A class on one device."""

    mean: Floats
    """The mean weighted by images, (L,)."""
    images: float
    prototypes: float
    variance: float
    """The variance of an image about the mean, summed over dimensions; NaN for a single prototype."""


@dataclass(frozen=True, eq=False)
class DeviceSummary:
    """A device's prototypes as far as the tests need them: its size does not depend on how many there are."""

    classes: Mapping[int, ClassSummary]
    prototypes: float
    length: float
    """The mean squared length of a prototype."""
    length_dof: float
    """Two over the variance of a squared length, relative to its mean; NaN for a single prototype."""


def summarized(part: Prototypes) -> DeviceSummary:
    values = part.values if part.block is None else np.concatenate([part.values, part.block.means])
    squares = (values.astype(np.float64) ** 2).sum(axis=1)
    of_image = _variance_in_block(part.block)
    return DeviceSummary(
        {int(label): _class_summary(part, int(label), of_image) for label in np.unique(part.every[0])},
        float(len(squares)),
        float(squares.mean()) if len(squares) else 0.0,
        float(2 * squares.mean() ** 2 / max(squares.var(ddof=1), TINY)) if len(squares) > 1 else np.nan,
    )


def _variance_in_block(block: PrincipalPrototypes | None) -> float:
    """Return the variance of an image about its class's mean, of all classes of a block; NaN without one."""
    if block is None:
        return np.nan
    squares = float((block.rows.astype(np.float64) ** 2).sum() + block.diagonal.sum(dtype=np.float64))
    return squares / max(block.images - len(block.labels), 1)


def summaries(parts: Mapping[str, Prototypes]) -> dict[str, DeviceSummary]:
    return {device: summarized(part) for device, part in parts.items()}


def _class_summary(part: Prototypes, label: int, in_block: float) -> ClassSummary:
    """Return the summary of a class, in batches and in a block whose images have the variance `in_block`."""
    batches = _batches_summary(part, part.labels == label)
    mine = np.zeros(0, np.bool_) if part.block is None else part.block.labels == label
    if part.block is None or not mine.any():
        return batches
    counts = part.block.counts[mine].astype(np.float64)
    images, freedom = batches.images + counts.sum(), [batches.prototypes - 1, counts.sum() - len(counts)]
    mean = (batches.images * batches.mean + counts @ part.block.means[mine].astype(np.float64)) / images
    known = [variance for variance in (batches.variance, in_block) if np.isfinite(variance)]
    return ClassSummary(mean, images, 1 + max(freedom[0], 0.0) + freedom[1], max(known))


def _batches_summary(part: Prototypes, mine: NDArray[np.bool_]) -> ClassSummary:
    if not mine.any():
        return ClassSummary(np.zeros(part.values.shape[1]), 0.0, 0.0, np.nan)
    values = part.values[mine].astype(np.float64)
    counts = np.maximum(part.counts[mine], 1).astype(np.float64)
    mean = np.average(values, axis=0, weights=counts)
    squares = ((values - mean) ** 2).sum(axis=1)
    # A prototype of n images has an n-th of the variance of one image. FedTC's prototypes count alike, and rows of
    # statistics by their images: neither few heavy ones nor many light ones hide the others.
    of_image = counts * squares
    alike = of_image.sum() / (len(counts) - 1) if len(counts) > 1 else np.nan
    variance = max(alike, np.average(of_image, weights=counts))
    return ClassSummary(mean, float(counts.sum()), float(len(counts)), float(variance))


def class_means(parts: Mapping[str, DeviceSummary], label: int) -> ClassMeans:
    """Return the means and variances of a class on the devices that have it, sorted by device."""
    with_class = {
        device: part.classes[label] for device, part in sorted(parts.items()) if label in part.classes
    }
    means = np.array([one.mean for one in with_class.values()])
    return ClassMeans(
        tuple(with_class),
        means,
        np.array([one.images for one in with_class.values()]),
        np.array([one.prototypes for one in with_class.values()]),
        np.array([one.variance for one in with_class.values()]),
        np.median(means, axis=0) if with_class else means,
    )


def effective_dimensions(deviations: Floats) -> float:
    """Return in how many independent directions the deviations (K, L) vary, at least 1.

    For normal vectors of covariance S it is trace(S)^2 / trace(S^2) (Box 1954), the inverse of the expected squared
    cosine of two of them. That of the median device with all others is used: similar outliers do not count. A part of
    it is returned, less for few devices: unit vectors understate a direction in which few devices vary widely.
    """
    lengths = np.linalg.norm(deviations, axis=1)
    unit = deviations / np.where(lengths > 0, lengths, 1.0)[:, None]
    if len(unit) <= unit.shape[1]:
        sums = ((unit @ unit.T) ** 2).sum(axis=1) - 1
    else:  # the same, u_i' (U' U) u_i, in memory that does not grow with the square of the devices
        sums = ((unit @ (unit.T @ unit)) * unit).sum(axis=1) - 1
    is_zero = lengths == 0
    sums = np.where(is_zero, len(unit) - 1, sums + np.count_nonzero(is_zero))
    usual = float(np.median(sums)) / max(len(unit) - 1, 1)
    return max(1.0, COSINE_MARGIN / (usual + 1 / len(unit) ** 2))


def distances(one: ClassMeans) -> Test:
    """Return each mean's squared distance from the median over that expected of an honest device.

    That is s / n + t plus the median's own variance: s is the variance of an image, n the device's images, and t the
    variance between places, at its upper confidence limit, since few devices do not show it exactly.
    """
    squares = (one.deviations**2).sum(axis=1)
    scatter = np.fmax(one.variance, np.minimum(one.variances, TOLERANCE * one.variance))
    sampling = scatter / one.images
    dimensions = effective_dimensions(one.deviations)
    between = _between(squares - sampling, dimensions=dimensions)
    expected = sampling + max(between, LEAST_BETWEEN * float(np.median(sampling)))
    of_median = np.pi / 2 / len(expected) / np.mean(1 / np.sqrt(np.maximum(expected, TINY))) ** 2
    expected += of_median + PRECISION**2 * float((one.median**2).sum())
    return Test(
        one.devices,
        squares / np.maximum(expected, TINY),
        np.full(len(squares), dimensions),
        EFFICIENCY * len(squares) * dimensions,
    )


def _between(excess: Floats, *, dimensions: float) -> float:
    """Return the upper confidence limit of the variance between places, from what sampling leaves of the squares (K,).

    Only the lower half is used for its error, since outliers are in the upper one.
    """
    from scipy.stats import chi2, norm

    lower, median = np.quantile(excess, (0.25, 0.5))
    # pi / 2: the variance of a median of normal values over that of their mean.
    error = np.sqrt(np.pi / 2 / len(excess)) * (median - lower) / norm.isf(0.25)
    return max(float((median + STANDARD_ERRORS * error) * dimensions / chi2.median(dimensions)), 0.0)


def scatters(one: ClassMeans) -> Test:
    """Return each device's variance of a class over TOLERANCE times the median; of devices with two prototypes.

    In the median, a device with one counts by the square of its distance: that is of its images and its place.
    """
    known = one.prototypes > 1
    of_mean = one.images * (one.deviations**2).sum(axis=1)
    floor = (PRECISION * np.linalg.norm(one.median)) ** 2
    dof = effective_dimensions(one.deviations) * np.maximum(one.prototypes - 1, 1)
    test = _variances(one.devices, np.where(known, one.variances, of_mean), dof, floor=float(floor))
    devices = tuple(device for device, each in zip(one.devices, known, strict=True) if each)
    return replace(test, devices=devices, ratios=test.ratios[known], dof=test.dof[known])


def lengths(parts: Mapping[str, DeviceSummary]) -> Test:
    """Return the mean squared length of each device's prototypes, of all classes, over TOLERANCE times the median."""
    devices = tuple(sorted(device for device, part in parts.items() if part.prototypes))
    present = [parts[device] for device in devices]
    dof = [each.length_dof for each in present if each.prototypes > 1]
    of_prototype = max(float(np.median(dof)), 1.0) if dof else 1.0
    rows = np.array([each.prototypes for each in present])
    return _variances(devices, np.array([each.length for each in present]), of_prototype * rows)


def _variances(devices: Sequence[str], values: Floats, dof: Floats, *, floor: float = 0.0) -> Test:
    if not devices:
        return Test(devices, values, dof, 1.0)
    expected = max(TOLERANCE * float(np.median(values)), floor, TINY)
    return Test(devices, values / expected, dof, EFFICIENCY * len(devices) * float(np.median(dof)))
