"""FINCH against partitions worked out by hand and the laws that it obeys, and groups of devices."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from aggregator.algorithms.clustering import NO_GROUP, coarsest, group_devices, partitions

Groups = set[frozenset[int]]


def on_circle(*degrees: float) -> NDArray[np.float64]:
    """Unit vectors at these angles: the nearer two angles, the larger the cosine."""
    angles = np.deg2rad(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def groups(labels: NDArray[np.int64]) -> Groups:
    """Return the points of each cluster."""
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in labels.tolist()}


def points(*, least: int = 1) -> st.SearchStrategy[NDArray[np.float64]]:
    """Points with small integer coordinates: ties, duplicates, opposites and zeros are common."""
    return st.integers(least, 12).flatmap(
        lambda count: arrays(np.float64, (count, 3), elements=st.integers(-2, 2).map(float))
    )


def test_points_are_joined_through_first_neighbors() -> None:
    """Three at 0, 10 and 25 degrees and two at 120 and 130 are two clusters, and then one.

    First neighbors: 0 -> 10, 10 -> 0 (10 degrees, against 15 to 25), 25 -> 10, 120 -> 130, 130 -> 120.
    Links: 0-10 (each other's), 25-10, and 0-25 (both have 10); 120-130. Nothing leads from one group to the other.
    The means of two clusters are each other's first neighbors, so the next partition has one.
    """
    found = partitions(on_circle(0, 10, 25, 120, 130))
    assert [labels.tolist() for labels in found] == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]


def test_the_means_of_clusters_are_clustered_in_turn() -> None:
    """Four pairs, near one another by two: first the pairs, then the two groups, then all.

    Pairs at 0/2, 20/22, 180/182 and 200/202 degrees: each point's first neighbor is its partner, 2 degrees away;
    the next is 18 away. Their means point to 1, 21, 181 and 201: 1 <-> 21 and 181 <-> 201 (20 degrees, against
    160). The means of those point to 11 and 191: two clusters, and so one in the end.
    """
    found = partitions(on_circle(0, 2, 20, 22, 180, 182, 200, 202))
    assert [labels.tolist() for labels in found] == [
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert coarsest(on_circle(0, 2, 20, 22, 180, 182, 200, 202)).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_clusters_are_numbered_as_they_occur() -> None:
    """The pairs 90/91 and 0/1, mixed: the first point's cluster is 0."""
    assert partitions(on_circle(90, 0, 1, 91))[0].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[3.0, 4.0]], [0]),  # one point: a cluster of its own
        ([[1.0, 0.0], [-1.0, 0.0]], [0, 0]),  # two: each has no other neighbor
        ([[1.0, 2.0]] * 4, [0, 0, 0, 0]),  # duplicates: all are equally near
        (np.eye(3).tolist(), [0, 0, 0]),  # every cosine is 0: all are tied, so all are linked
        ([[0.0, 0.0], [0.0, 0.0]], [0, 0]),  # nothing but points without direction: they are one cluster
    ],
)
def test_small_and_degenerate_sets(values: list[list[float]], expected: list[int]) -> None:
    """Cases that the paper leaves open end in one partition, and never in an error or NaN."""
    found = partitions(np.array(values))
    assert [labels.tolist() for labels in found] == [expected]
    assert coarsest(np.array(values)).tolist() == expected


def test_duplicates_do_not_hide_a_second_group() -> None:
    """Three times 0 degrees and two at 90 and 91: the copies are one another's first neighbors."""
    assert partitions(on_circle(0, 90, 0, 91, 0))[0].tolist() == [0, 1, 0, 1, 0]


def test_a_tie_links_to_both() -> None:
    """45 degrees lies between the pairs 0/1 and 89/90, as near to 1 as to 89: it joins both to one cluster."""
    assert groups(partitions(on_circle(0, 1, 45, 89, 90))[0]) == {frozenset(range(5))}


def test_points_without_direction_change_no_cluster() -> None:
    """Zeros, before and after the two groups that the other points make; a cluster of zeros would be a third one."""
    values = np.concatenate([np.zeros((1, 2)), on_circle(0, 1, 90, 91), np.zeros((2, 2))])
    assert partitions(values)[0].tolist() == [-1, 0, 0, 1, 1, -1, -1]
    assert coarsest(values).tolist() == [-1, 0, 0, 1, 1, -1, -1]


@given(points(least=2), st.integers(0, 2**32 - 1))
def test_the_order_of_points_does_not_matter(values: NDArray[np.float64], seed: int) -> None:
    """Shuffled points make the same clusters, with ties, duplicates and zeros among them."""
    order = np.random.default_rng(seed).permutation(len(values))
    for straight, shuffled in zip(partitions(values), partitions(values[order]), strict=True):
        assert groups(straight[order]) == groups(shuffled)


@given(points(), st.floats(1e-3, 1e3))
def test_a_common_factor_does_not_matter(values: NDArray[np.float64], factor: float) -> None:
    """Directions are all that counts."""
    for small, large in zip(partitions(values), partitions(values * factor), strict=True):
        np.testing.assert_array_equal(small, large)


@given(points())
def test_partitions_only_ever_join(values: NDArray[np.float64]) -> None:
    """Each partition has fewer clusters than the one before, and splits none."""
    for fine, coarse in itertools.pairwise(partitions(values)):
        assert coarse.max() < fine.max()
        assert all(any(group <= larger for larger in groups(coarse)) for group in groups(fine))


@given(st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_the_first_partition_is_that_of_equation_1(count: int, seed: int) -> None:
    """Without ties it is the connected components of the paper's matrix, written out."""
    values = np.random.default_rng(seed).normal(size=(count, 4))
    nearest = []
    for m in range(count):
        cosines = [
            -2.0 if n == m else values[m] @ values[n] / np.linalg.norm(values[m]) / np.linalg.norm(values[n])
            for n in range(count)
        ]
        nearest.append(int(np.argmax(cosines)))
    expected = {frozenset({m}) for m in range(count)}
    for m, n in itertools.combinations(range(count), 2):
        if nearest[m] == n or nearest[n] == m or nearest[m] == nearest[n]:
            touched = {group for group in expected if m in group or n in group}
            expected = (expected - touched) | {frozenset[int]().union(*touched)}
    assert groups(partitions(values)[0]) == expected


L, C = 30, 4


def groups_of(domains: list[int], *, apart: float, seed: int) -> NDArray[np.int64]:
    """Group devices with ten images of each class, whose domains' class means differ by so many deviations."""
    random = np.random.default_rng(seed)
    of_domains = apart * random.normal(size=(max(domains) + 1, C, L))
    devices, labels = np.repeat(np.arange(len(domains)), C), np.tile(np.arange(C), len(domains))
    means = of_domains[np.array(domains)[devices], labels] + random.normal(size=(len(devices), L)) / 10**0.5
    fleet = np.stack([means[labels == label].mean(axis=0) for label in range(C)])
    return group_devices(means - fleet[labels], labels, np.full(len(devices), 10), devices)


@pytest.mark.parametrize("seed", range(5))
def test_devices_of_one_domain_are_a_group(seed: int) -> None:
    """A device alone in its domain is in none."""
    domains = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 3]
    groups = groups_of(domains, apart=1.0, seed=seed)
    assert groups.tolist() == [NO_GROUP if domain == 3 else domain for domain in domains]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("domains", "apart"),
    [
        ([0] * 12, 1.0),
        (list(range(12)), 0.0),
        (list(range(12)), 1.0),
        ([0, 0, 1, 1, 2, 2], 1.0),
        ([0, 0, 0], 1.0),
    ],
    ids=["one domain", "alike", "a domain each", "two devices each", "few"],
)
def test_other_devices_are_in_no_group(domains: list[int], apart: float, seed: int) -> None:
    """Means that do not predict the others', and groups in which one device would know or decide another's mean."""
    assert set(groups_of(domains, apart=apart, seed=seed).tolist()) == {NO_GROUP}


def test_classes_of_one_device_are_no_reason_for_groups() -> None:
    """Nothing is known of them but by the device itself; nor is there anything to group without devices."""
    devices = np.arange(6)
    offsets = np.random.default_rng(0).normal(size=(6, L))
    assert group_devices(offsets, devices, np.full(6, 10), devices).tolist() == [NO_GROUP] * 6
    none = np.zeros(0, np.int64)
    assert group_devices(np.zeros((0, L)), none, none, none).tolist() == []
