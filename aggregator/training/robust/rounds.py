"""Protection of a round against wrong values, pure and the same for all algorithms: clipping, trimming, the median.

`weights` bounds how much a device counts; this bounds how far its values are from the others', and how much a change of
parameters counts by its length and the device's images together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Contribution, by_device
from aggregator.training.robust.training_set import TRIMMED_SHARE
from aggregator.training.robust.weights import MIN_DEVICES, median_limit

Floats = NDArray[np.float32]
Combine = Literal["none", "trimmed", "median"]


def robust_contributions(
    contributions: Sequence[Contribution], *, clip_multiple: float, combine: Combine, power: Literal[1, 2] = 1
) -> list[Contribution]:
    """Return the contributions, sorted by device, with little influence of values that are far from the others'.

    No prototype stays longer than `clip_multiple` times the median device's median: few devices may have its class.
    Prototypes of a class are then measured from their coordinate-wise median over the devices. What is farther than
    `clip_multiple` times the median device is brought to that distance. `median` puts the coordinate-wise median in the
    place of all values, and `trimmed` that of the values of the fifth of the devices that is farthest from it. Last,
    no change of parameters moves the mean by images more than the median device's, with `power` 2 the mean of squares.
    With `clip_multiple` 0 nothing is limited. Values of fewer than MIN_DEVICES devices stay unchanged.
    """
    parts = _clipped_lengths(by_device(contributions), multiple=clip_multiple)
    combined = _combined_changes(
        _with_prototypes(parts, clip_multiple=clip_multiple, combine=combine), by=combine
    )
    return _limited_changes(combined, power=power) if clip_multiple else combined


def _clipped_lengths(parts: Sequence[Contribution], *, multiple: float) -> list[Contribution]:
    """Scale down prototypes to a multiple of the median device's median length."""
    lengths = [np.linalg.norm(part.values.astype(np.float64), axis=1) for part in parts]
    medians = [np.median(each) for each in lengths if len(each)]
    if not multiple or len(medians) < MIN_DEVICES:
        return list(parts)
    limit = multiple * float(np.median(medians))
    factors = [np.minimum(1.0, limit / np.maximum(each, 1e-30))[:, None] for each in lengths]
    return [
        replace(part, values=np.where(each < 1, each * part.values, part.values).astype(np.float32))
        for part, each in zip(parts, factors, strict=True)
    ]


def _with_prototypes(
    parts: Sequence[Contribution], *, clip_multiple: float, combine: Combine
) -> list[Contribution]:
    values = [part.values.copy() for part in parts]
    for label in {int(label) for part in parts for label in part.labels}:
        rows = [(number, np.flatnonzero(part.labels == label)) for number, part in enumerate(parts)]
        owned = [(number, own[0]) for number, own in rows if len(own)]
        if len(owned) < MIN_DEVICES:
            continue
        stacked = np.stack([values[number][row] for number, row in owned])
        changed = _combined(_clipped(stacked, multiple=clip_multiple), by=combine)
        for (number, row), each in zip(owned, changed, strict=True):
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
    factors = np.minimum(1.0, median_limit(influences, 1.0) / np.where(influences > 0, influences, 1.0))
    factors = (factors * images.sum() / (float(factors @ images) or 1.0)) ** (1 / power)
    return [
        part
        if factor == 1
        else replace(part, tensors={name: np.float32(factor) * each for name, each in part.tensors.items()})
        for part, factor in zip(parts, factors, strict=True)
    ]


def _combined_changes(parts: Sequence[Contribution], *, by: Combine) -> list[Contribution]:
    if by == "none" or len(parts) < MIN_DEVICES or not parts[0].tensors:
        return list(parts)
    names = sorted(parts[0].tensors)
    stacked = np.stack([np.concatenate([part.tensors[name].ravel() for name in names]) for part in parts])
    changed = _combined(stacked, by=by)
    return [
        replace(part, tensors=_split(each, part.tensors)) for part, each in zip(parts, changed, strict=True)
    ]


def _split(flat: Floats, like: Mapping[str, Floats]) -> dict[str, Floats]:
    names = sorted(like)
    ends = np.cumsum([like[name].size for name in names])[:-1]
    return {
        name: each.reshape(like[name].shape) for name, each in zip(names, np.split(flat, ends), strict=True)
    }


def _clipped(values: Floats, *, multiple: float) -> Floats:
    """Return values (K, n), none farther from their median than a multiple of the median distance."""
    if not multiple:
        return values
    center = np.median(values, axis=0)
    away = values.astype(np.float64) - center
    factors = _factors(np.linalg.norm(away, axis=1), multiple)[:, None]
    return np.where(factors < 1, center + factors * away, values).astype(np.float32)


def _factors(lengths: NDArray[np.float64], multiple: float) -> NDArray[np.float64]:
    """Return by how much each length is multiplied to be no more than a multiple of the median length."""
    limit = multiple * float(np.median(lengths))
    return np.minimum(1.0, limit / np.where(lengths > 0, lengths, 1.0))


def _combined(values: Floats, *, by: Combine) -> Floats:
    if by == "none":
        return values
    median = np.median(values, axis=0).astype(np.float32)
    distances = np.linalg.norm(values.astype(np.float64) - median, axis=1)
    number = len(values) if by == "median" else max(1, round(TRIMMED_SHARE * len(values)))
    changed = values.copy()
    changed[np.argsort(-distances, kind="stable")[:number]] = median
    return changed
