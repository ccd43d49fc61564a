"""FINCH: clusters from first neighbors, without a number of clusters or a threshold to choose.

Sarfraz, Sharma, Stiefelhagen, "Efficient parameter-free clustering using first neighbor relations", CVPR 2019.
"""

import numpy as np
from numpy.typing import NDArray

TIE = 1e-9
"""Cosines closer than this are equal, and a point this much shorter than the longest one has no direction; rounding
by the order of a sum is a millionth of it."""

NO_CLUSTER = -1
"""The label of a point without direction, which is in no cluster."""


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
    found = [_linked(precise, shortest)]
    while len(coarser := _linked(_means(precise, found[-1]), shortest)) > coarser.max() + 1:
        found.append(coarser[found[-1]])
    of_points = np.full((len(found), len(points)), NO_CLUSTER, dtype=np.int64)
    of_points[:, directed] = found
    return list(of_points)


def coarsest(points: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the last partition with at least two clusters, else the first."""
    found = partitions(points)
    return next((labels for labels in reversed(found) if labels.max() > 0), found[0])


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
