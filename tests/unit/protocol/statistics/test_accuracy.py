"""Accuracy over all classes alike, and bins of confidence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.statistics.balanced_accuracy import balanced_accuracy
from protocol.statistics.confidence import LOWEST, WIDTH, bin_centers, confidence_bins
from protocol.wire.messages import CONFIDENCE_BINS


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


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ([0.5, 0.5], 8),
        ([0.49, 0.26, 0.25], 7),
        ([0.25, 0.75], 10),
        ([1e-5, 1 - 1e-5], 31),
        ([1.0, 0.0], 31),
        ([0.001] * 1000, 0),
        ([0.0, 0.0], 0),
        ([-1.0, -2.0], 0),
        ([3.0, -2.0], 31),
    ],
)
def test_bin_of_a_row(row: list[float], place: int) -> None:
    """From chance among many classes to certainty; what a broken head gives has some bin as well."""
    assert confidence_bins(np.array([row], np.float32)).tolist() == [place]


@given(st.lists(st.floats(-5, 13), min_size=1, max_size=20), st.integers(2, 30))
def test_bin_contains_the_log_odds(values: list[float], classes: int) -> None:
    """Whichever class is the best, and however the others share the rest."""
    log_odds = np.maximum(np.array(values), 0.1 - np.log(classes - 1))
    best = 1 / (1 + np.exp(-log_odds))
    rows = np.repeat(((1 - best) / (classes - 1))[:, None], classes, axis=1)
    rows[np.arange(len(rows)), np.arange(len(rows)) % classes] = best
    places = confidence_bins(rows)
    inside = np.clip(log_odds, bin_centers()[0], bin_centers()[-1])
    assert (np.abs(bin_centers()[places] - inside) <= WIDTH / 2 + 1e-9).all()
    assert bin_centers()[0] == LOWEST + WIDTH / 2
    assert len(bin_centers()) == CONFIDENCE_BINS
