"""Clusters of prototypes by FINCH, and groups of devices that share their class means, found from the means alone.

FINCH makes clusters from first neighbors, without a number of clusters or a threshold to choose: Sarfraz, Sharma,
Stiefelhagen, "Efficient parameter-free clustering using first neighbor relations", CVPR 2019.
"""

import numpy as np
from numpy.typing import NDArray

TIE = 1e-9
"""Cosines closer than this are equal, and a point this much shorter than the longest one has no direction; rounding
by the order of a sum is a millionth of it."""

NO_CLUSTER = -1
"""The label of a point without direction, which is in no cluster."""

NO_GROUP = -1
"""The group of a device that is in none."""

GROUP_DEVICES = 3
"""Devices of a group, at least: of fewer, one would learn another's means, or decide them."""

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
    if len(best) <= GROUP_DEVICES:
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
    """Return the partition's groups of GROUP_DEVICES and more, numbered anew."""
    _, places, members = np.unique(partition, return_inverse=True, return_counts=True)
    is_large = (partition != NO_GROUP) & (members[places] >= GROUP_DEVICES)
    groups = np.full(len(partition), NO_GROUP)
    groups[is_large] = np.unique(partition[is_large], return_inverse=True)[1]
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


def partitions(points: NDArray[np.floating]) -> list[NDArray[np.int64]]:
    """Cluster finite points (p, D), p >= 1, then the means of the clusters, and so on until no clusters join.

    Where the paper is not specific, a point with several nearest neighbors is linked to all of them,
    which keeps the result free of the points' order. Points of length 0 have no direction: they are in no cluster, so
    that they change no other point's, unless there are no others. Nor have means of length 0: these clusters join each
    other alone. A lone point is a cluster.

    Laws: the order of the points does not matter, nor does a positive factor common to all of them. Each
    partition but the first has fewer clusters than the one before, and splits none of its clusters.

    Returns:
        From fine to coarse, at least one: the cluster of each point, int64 (p,), numbered from 0 in the order
        in which clusters first occur; NO_CLUSTER of a point without direction.
    """
    lengths = np.linalg.norm(points.astype(np.float64), axis=1)
    shortest = TIE * lengths.max()
    directed = (lengths > shortest) | (lengths.max() == 0)
    precise = points[directed].astype(np.float64)
    levels = [_linked(precise, shortest)]
    while len(coarser := _linked(_means(precise, levels[-1]), shortest)) > coarser.max() + 1:
        levels.append(coarser[levels[-1]])
    of_points = np.full((len(levels), len(points)), NO_CLUSTER, dtype=np.int64)
    of_points[:, directed] = levels
    return list(of_points)


def coarsest(points: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the last partition with at least two clusters, else the first."""
    levels = partitions(points)
    return next((labels for labels in reversed(levels) if labels.max() > 0), levels[0])


def _linked(points: NDArray[np.float64], shortest: float) -> NDArray[np.int64]:
    """Return one partition (eq. 1): m and n are linked if one is the other's first neighbor or both share one.

    Two points with the same first neighbor are connected through it, so links to first neighbors suffice.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    lengths = np.linalg.norm(points, axis=1)
    directed = lengths > shortest
    units = points[directed] / lengths[directed, None]
    cosines = units @ units.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = cosines.max(axis=1, initial=-np.inf, keepdims=True)
    first, second = np.nonzero((cosines >= nearest - TIE) & np.isfinite(cosines))
    rows = np.flatnonzero(directed)
    lost = np.flatnonzero(~directed)
    links = np.concatenate([rows[first], lost[:-1]]), np.concatenate([rows[second], lost[1:]])
    graph = coo_array((np.ones(len(links[0])), links), shape=(len(points), len(points)))
    return _renumbered(connected_components(graph, directed=False)[1])


def _renumbered(labels: NDArray[np.integer]) -> NDArray[np.int64]:
    """Number clusters in the order in which they first occur."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first)).astype(np.int64)[inverse]


def _means(points: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    sums = np.zeros((labels.max() + 1, points.shape[1]))
    np.add.at(sums, labels, points)
    return sums / np.bincount(labels)[:, None]
