"""Groups of devices that share their class means, such as those of one domain, found from the means alone."""

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.clustering.finch import partitions

NO_GROUP = -1
"""The group of a device that is in none."""

MIN_DEVICES = 3
"""Devices of a group: of fewer, one would learn another's means, or decide them."""

MAX_GROUPS = 32
"""All devices receive the means of all groups."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def group_devices(
    offsets: NDArray[np.floating], labels: Integers, images: Integers, devices: Integers
) -> Integers:
    """Group devices whose means predict each other's better than the fleet's do.

    Partitions are those of FINCH over the devices' mean offsets. The best one minimizes the squared errors, weighted by
    images, of a device's means predicted by those of its group without it. A device that the fleet's means without it
    predict at least as well leaves its group.

    Law: the order of the rows does not matter, but for rounding.

    Args:
        offsets: (p, L), devices' class means less those of the fleet, weighted by images.
        labels: the class of each, (p,).
        images: in each, (p,), positive.
        devices: the device of each, (p,), numbered from 0.

    Returns:
        The group of each device, numbered from 0 without gaps, or NO_GROUP.
    """
    best = np.full(devices.max(initial=-1) + 1, NO_GROUP)
    if len(best) <= MIN_DEVICES:
        return best
    sums = np.zeros((len(best), offsets.shape[1]))
    np.add.at(sums, devices, offsets * images[:, None])
    of_fleet = _errors(offsets, labels, images, devices, groups=best)
    least = of_fleet.sum()
    for partition in partitions(sums / np.maximum(np.bincount(devices, images), 1)[:, None]):
        groups = _large(partition)
        errors = _errors(offsets, labels, images, devices, groups=groups)
        groups = _large(np.where(errors < of_fleet, groups, NO_GROUP))
        error = _errors(offsets, labels, images, devices, groups=groups).sum()
        if error < least and groups.max() < MAX_GROUPS:
            best, least = groups, error
    return best


def _large(partition: Integers) -> Integers:
    """Return the partition's groups of MIN_DEVICES and more, numbered anew."""
    _, places, members = np.unique(partition, return_inverse=True, return_counts=True)
    kept = (partition != NO_GROUP) & (members[places] >= MIN_DEVICES)
    groups = np.full(len(partition), NO_GROUP)
    groups[kept] = np.unique(partition[kept], return_inverse=True)[1]
    return groups


def _errors(
    offsets: NDArray[np.floating], labels: Integers, images: Integers, devices: Integers, *, groups: Integers
) -> Floats:
    """Return the squared errors (K,) of devices' means, predicted by the others of the group, else of the fleet."""
    errors = np.zeros(len(groups))
    for label in np.unique(labels):
        own = labels == label
        rows, counts, sets = offsets[own].astype(np.float64), images[own], groups[devices[own]]
        of_fleet, of_group = _others(rows, np.zeros_like(sets), counts), _others(rows, sets, counts)
        grouped = (sets != NO_GROUP)[:, None] & np.isfinite(of_group)
        squares = np.square(rows - np.where(grouped, of_group, of_fleet)).sum(axis=1)
        errors[devices[own]] += np.where(
            np.isfinite(squares), counts * squares, 0
        )  # else no other has the class
    return errors


def _others(rows: Floats, sets: Integers, images: Integers) -> Floats:
    """Return the mean of the other rows in each row's set, (p, L), weighted by images; not finite without any."""
    weighted = rows * images[:, None]
    _, places = np.unique(sets, return_inverse=True)
    sums = np.zeros((places.max() + 1, rows.shape[1]))
    np.add.at(sums, places, weighted)
    rest = np.bincount(places, images)[places] - images
    others: Floats = (sums[places] - weighted) / np.where(rest > 0, rest, np.nan)[:, None]
    return others
