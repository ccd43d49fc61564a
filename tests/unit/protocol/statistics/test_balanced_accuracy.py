"""Accuracy over all classes alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.statistics.balanced_accuracy import balanced_accuracy


def test_every_class_counts_alike() -> None:
    """The number of its images does not matter; classes that are not asked for do not count."""
    assert balanced_accuracy((90, 0, 3), (10, 10, 1), {0, 1}) == pytest.approx(0.45)
    assert balanced_accuracy((90, 0, 3), (10, 10, 1), {0, 1, 2}) == pytest.approx(0.55)


def test_a_class_without_images_counts_as_not_recognized() -> None:
    """A device that predicts its own class for everything: 98 % on its own images, half of two classes."""
    assert balanced_accuracy((49, 0), (1, 0), {0, 1}) == pytest.approx(0.49)


def test_without_images_there_is_none() -> None:
    assert balanced_accuracy((0, 0), (0, 0), {0, 1}) is None
    assert balanced_accuracy((5, 0), (1, 0), {1}) is None
    assert balanced_accuracy((5, 0), (1, 0), ()) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_it_is_at_most_the_accuracy_of_the_best_class(counts: list[tuple[int, int]]) -> None:
    """It is at least 0."""
    correct, incorrect = zip(*counts, strict=True)
    balanced = balanced_accuracy(correct, incorrect, range(len(counts)))
    shares = [one / (one + other) for one, other in counts if one + other]
    assert (balanced is None) == (not shares)
    assert balanced is None or 0 <= balanced <= max(shares) + 1e-9
