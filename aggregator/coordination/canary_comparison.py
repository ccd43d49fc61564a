"""The comparison of a head with the previous one on several devices, none of which decides alone. Pure.

A fraction of the devices is tolerated: so many may fail to use a head that is activated, and so many of the best and of
the worst comparisons do not count. Of the others, each counts with at most CANARY_MULTIPLE times the images of the
median device (`bounds`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from aggregator.coordination.minimums import MEDIAN_DEVICES

CANARY_MULTIPLE = 10.0
"""Times the median canary's held-out images that a canary counts at most: the best and the worst device are omitted
beforehand, and a device that gains by it decides one head, not what is learned. Fewer images would make the comparison
less certain."""

_ROUNDING = 1e-9


@dataclass(frozen=True)
class CanaryResult:
    """A device's evaluation of a head on its held-out images."""

    correct: int
    images: int
    previous_correct: int | None = None
    """Images that the previous head classified correctly; None if there was none."""
    problem: str = ""
    """Why the device cannot use the head; empty if it can."""

    @property
    def gain(self) -> float:
        """The accuracy less the previous head's, for a device that has evaluated both."""
        return (self.correct - (self.previous_correct or 0)) / self.images


@dataclass(frozen=True)
class Comparison:
    """Images that count, and those that the head and the previous one classify correctly."""

    images: float
    correct: float
    previous_correct: float
    counted: int
    """Devices that count."""
    devices: int
    """Devices that have evaluated both heads on images."""


def tolerated(number: int, fraction: float) -> int:
    """Return how many of a number of devices do not decide: a fraction of them, at least one of three or more."""
    if not fraction:
        return 0
    return min(max(1, math.floor(fraction * number + _ROUNDING)), max(number - 1, 0) // 2)


def compare(results: Sequence[CanaryResult], tolerated_fraction: float) -> Comparison:
    """Return the comparison over all devices without the tolerated number of the best and of the worst.

    Law: the order of the results does not matter.
    """
    compared = sorted(
        (each for each in results if each.previous_correct is not None and each.images),
        key=lambda each: (each.gain, each.images),
    )
    omitted = tolerated(len(compared), tolerated_fraction)
    limit = _limit([each.images for each in compared])
    weighted = [(min(1.0, limit / each.images), each) for each in compared][omitted : len(compared) - omitted]
    return Comparison(
        images=sum(weight * each.images for weight, each in weighted),
        correct=sum(weight * each.correct for weight, each in weighted),
        previous_correct=sum(weight * (each.previous_correct or 0) for weight, each in weighted),
        counted=len(weighted),
        devices=len(compared),
    )


def _limit(images: Sequence[int]) -> float:
    """Return how many images of a device count at most, as `bounds.median_limits` does."""
    return CANARY_MULTIPLE * median_low(images) if len(images) >= MEDIAN_DEVICES else math.inf


def is_accepted(results: Sequence[CanaryResult], tolerated_fraction: float, margin: float) -> bool:
    """Return True if the head's accuracy is at most `margin` below the previous head's."""
    comparison = compare(results, tolerated_fraction)
    return comparison.correct >= comparison.previous_correct - margin * comparison.images - _ROUNDING


def one_decides(results: Sequence[CanaryResult], tolerated_fraction: float, margin: float) -> bool:
    """Return True if two devices have compared the heads and disagree: of two none is omitted."""
    compared = [each for each in results if each.previous_correct is not None and each.images]
    verdicts = {
        is_accepted([each], tolerated_fraction=tolerated_fraction, margin=margin) for each in compared
    }
    return len(compared) == len(verdicts) == 2


def summary(results: Sequence[CanaryResult], *, tolerated_fraction: float) -> str:
    """Return the head's accuracy on the devices that count, beside the previous head's."""
    comparison = compare(results, tolerated_fraction)
    if not results:
        return "no canary has answered"
    if not comparison.images:
        running = sum(not each.problem for each in results)
        return f"it runs on {canaries(running)}, without images to compare it on"
    correct, previous, images = comparison.correct, comparison.previous_correct, comparison.images
    of_all = canaries(comparison.devices)
    number = of_all if comparison.counted == comparison.devices else f"{comparison.counted} of {of_all}"
    return (
        f"accuracy {correct / images:.1%} ({correct:.0f}/{images:.0f}) on {number}, "
        f"{previous / images:.1%} ({previous:.0f}/{images:.0f}) with the previous head"
    )


def canaries(count: int) -> str:
    return "1 canary" if count == 1 else f"{count} canaries"
