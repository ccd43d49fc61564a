"""Persons with several images: how long their sums are, and the attack on membership."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from protocol.statistics.gaussian_privacy import noise_multiplier
from protocol.statistics.integer_rows import MAX_VALUE
from protocol.statistics.noisy_sums import epsilon_of_sums
from research.privacy.persons import MEMBER_IMAGES, Persons, alike, exact_sums, lengths, membership_auc
from research.privacy.private_fleet import DELTA


def longest(images: int) -> np.ndarray[tuple[int, int], np.dtype[np.int8]]:
    rows = np.zeros((images, 10), np.int8)
    rows[:, 0] = MAX_VALUE
    return rows


def test_equal_longest_images_are_as_long_as_their_number() -> None:
    """Those of other classes, or in other directions, are shorter together."""
    labels = np.zeros(5, np.int64)
    person = np.array([0, 0, 0, 1, 1])
    rows = longest(5)
    rows[4] = np.roll(rows[4], 1)
    of_three, of_two = lengths(Persons(rows=rows, labels=labels, person=person))
    assert of_three == pytest.approx(3)
    assert math.sqrt(2) < of_two < 1.5


def test_rows_that_are_alike_are_together() -> None:
    random = np.random.default_rng(0)
    rows = np.repeat(random.integers(-90, 90, (8, 6)), 10, axis=0).astype(np.int8)
    groups = list(alike(rows[random.permutation(80)], 10))
    assert sorted(np.concatenate(groups)) == list(range(80))
    assert {len(group) for group in groups} == {10}


def test_weights_shorten_all_sums_alike() -> None:
    rows, labels = longest(2), np.array([0, 1])
    exact = exact_sums(rows, labels, np.array([1.0, 0.5]), classes=2)
    assert exact.counts.tolist() == [64, 32]
    assert exact.sums[:, 0].tolist() == [64 * 127, 32 * 127]
    assert exact.second_moment[0] == 127**2 * 1.5 // 1


@pytest.mark.parametrize("rows", [1, 10])
def test_attack_finds_what_the_promise_allows(rows: int) -> None:
    """Of equal images, the worst case: the area of a Gaussian event is Phi(mu / sqrt 2)."""
    found = membership_auc(longest(10), rows=rows, epsilon=4.0, releases=300, seed=0)
    z = noise_multiplier(4.0, DELTA, cost=epsilon_of_sums, rows=rows)
    for images in MEMBER_IMAGES:
        assert found[images] == pytest.approx(NormalDist().cdf(images / z / math.sqrt(2)), abs=0.07)
