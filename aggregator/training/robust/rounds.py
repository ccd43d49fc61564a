"""Protection of a round against wrong values, pure and the same for all algorithms.

`weights` limits how many of a device's images count; this limits how far its values are from the others', and how
much a change of parameters counts by its length and the device's images together.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Contribution, by_device
from aggregator.coordination.bounds import (
    EQUAL_MULTIPLE,
    limiting_factors,
    median_limits,
)
from aggregator.coordination.minimums import MEDIAN_DEVICES
from aggregator.intake.validation import Prototypes

Floats = NDArray[np.float32]


def contribution_of(device: str, part: Prototypes) -> Contribution:
    """Return a device's checked submission as its contribution to a round."""
    return Contribution(
        device=device, values=part.values, labels=part.labels, counts=part.counts, tensors=part.tensors
    )


def robust_contributions(
    contributions: Sequence[Contribution], *, clip_multiple: float, power: Literal[1, 2] = 1
) -> list[Contribution]:
    """Return the contributions, sorted by device, with little influence of values that are far from the others'.

    No prototype stays longer than `clip_multiple` times the median device's median: few devices may have its class.
    Prototypes of a class are then measured from their coordinate-wise median over the devices. What is farther than
    `clip_multiple` times the median device is brought to that distance. Last, no change of parameters moves the mean by
    images more than the median device's, with `power` 2 the mean of squares. With `clip_multiple` 0 nothing is limited.
    Values of fewer than MEDIAN_DEVICES devices stay unchanged.
    """
    parts = by_device(contributions)
    if not clip_multiple:
        return parts
    parts = _clipped_lengths(parts, multiple=clip_multiple)
    return _limited_changes(_clipped_distances(parts, multiple=clip_multiple), power=power)


def _clipped_lengths(parts: Sequence[Contribution], *, multiple: float) -> list[Contribution]:
    lengths = [np.linalg.norm(part.values.astype(np.float64), axis=1) for part in parts]
    medians = [np.median(each) for each in lengths if len(each)]
    if len(medians) < MEDIAN_DEVICES:
        return list(parts)
    limit = multiple * float(np.median(medians))
    factors = [limiting_factors(each, limit)[:, None] for each in lengths]
    return [
        replace(part, values=np.where(each < 1, each * part.values, part.values).astype(np.float32))
        for part, each in zip(parts, factors, strict=True)
    ]


def _clipped_distances(parts: Sequence[Contribution], *, multiple: float) -> list[Contribution]:
    values = [part.values.copy() for part in parts]
    for label in {int(label) for part in parts for label in part.labels}:
        rows = [(number, np.flatnonzero(part.labels == label)) for number, part in enumerate(parts)]
        owned = [(number, own[0]) for number, own in rows if len(own)]
        if len(owned) < MEDIAN_DEVICES:
            continue
        stacked = np.stack([values[number][row] for number, row in owned])
        for (number, row), each in zip(owned, _clipped(stacked, multiple=multiple), strict=True):
            values[number][row] = each
    return [replace(part, values=each) for part, each in zip(parts, values, strict=True)]


def _limited_changes(parts: Sequence[Contribution], *, power: Literal[1, 2]) -> list[Contribution]:
    """Scale changes so that in their mean by images no power is more, times its images, than the median device's.

    A limited device loses weight, which all get by their images: the mean does not become shorter.
    """
    images = np.array([part.counts.sum() for part in parts], dtype=np.float64)
    lengths = [
        np.linalg.norm([np.linalg.norm(each.astype(np.float64)) for each in part.tensors.values()])
        for part in parts
    ]
    influences = images * np.array(lengths) ** power
    factors = limiting_factors(influences, median_limits(influences, EQUAL_MULTIPLE))
    factors = (factors * images.sum() / (float(factors @ images) or 1.0)) ** (1 / power)
    return [
        part
        if factor == 1
        else replace(part, tensors={name: np.float32(factor) * each for name, each in part.tensors.items()})
        for part, factor in zip(parts, factors, strict=True)
    ]


def _clipped(values: Floats, *, multiple: float) -> Floats:
    """Return values (K, n), none farther from their median than a multiple of the median distance."""
    center = np.median(values, axis=0)
    away = values.astype(np.float64) - center
    lengths = np.linalg.norm(away, axis=1)
    factors = limiting_factors(lengths, multiple * float(np.median(lengths)))[:, None]
    return np.where(factors < 1, center + factors * away, values).astype(np.float32)
