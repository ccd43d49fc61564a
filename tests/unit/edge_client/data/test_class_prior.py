"""The class prior of a place: its estimate, its test, and probabilities that are adjusted to it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from scipy import stats

from edge_client.data.class_prior import Adjuster, Prior, adjusted, chi_squared_limit, estimate, smoothed

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 6))
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
HOSTILE = arrays.arrays(np.float32, SHAPES, elements=st.floats(-1, 2, width=32) | FINITE)
SEEDS = st.integers(0, 2**32 - 1)


def _probabilities(seed: int, shares: list[float], images: int = 200) -> NDArray[np.float32]:
    """Return calibrated probabilities of images at a place with these shares, by a head without a prior."""
    random = np.random.default_rng(seed)
    labels = random.choice(len(shares), images, p=shares)
    odds = np.exp(4 * (np.eye(len(shares))[labels] + random.normal(size=(images, len(shares))) / 2))
    odds /= odds.sum(axis=1, keepdims=True)
    return np.asarray(odds, np.float32)


@pytest.mark.parametrize("freedom", [1, 2, 3, 9, 99, 4095])
def test_quantile_is_scipys(freedom: int) -> None:
    assert chi_squared_limit(freedom) == pytest.approx(stats.chi2.ppf(0.999, freedom), rel=0.035)


def test_estimate_follows_the_formula_of_its_source() -> None:
    """Written with loops: 50 steps of EM from equal shares, with one more of each class."""
    rows = _probabilities(0, [0.7, 0.2, 0.1]).astype(float)
    rows /= rows.sum(axis=1, keepdims=True)
    shares = [1 / 3] * 3
    for _ in range(50):
        of_image = [[p * q / sum(row * shares) for p, q in zip(row, shares, strict=True)] for row in rows]
        shares = [(sum(each[label] for each in of_image) + 1) / (len(rows) + 3) for label in range(3)]
    found = estimate(rows.astype(np.float32))
    assert found is not None
    np.testing.assert_allclose(found, shares, rtol=1e-4)
    np.testing.assert_allclose(found, [0.7, 0.2, 0.1], atol=0.08)


@given(SEEDS)
def test_even_classes_and_few_images_show_no_prior(seed: int) -> None:
    """One image cannot; these are exactly even."""
    rows = _probabilities(seed, [0.5, 0.5])
    assert estimate(np.concatenate([rows, rows[:, ::-1]])) is None
    assert estimate(rows[:1]) is None


@given(SEEDS, st.lists(st.floats(0.05, 1), min_size=2, max_size=5))
def test_order_of_images_and_unknown_classes_do_not_matter(seed: int, weights: list[float]) -> None:
    rows = _probabilities(seed, list(np.array(weights) / sum(weights)))
    found = estimate(rows)
    turned, wider = estimate(rows[::-1]), estimate(np.insert(rows, 1, 0, axis=1))
    assert (found is None) == (turned is None) == (wider is None)
    if found is not None and turned is not None and wider is not None:
        np.testing.assert_allclose(found, turned, rtol=1e-6)
        np.testing.assert_allclose(np.insert(found, 1, 0), wider, rtol=1e-6)


@given(HOSTILE)
def test_results_are_probabilities_whatever_the_head_gives(rows: NDArray[np.float32]) -> None:
    classes = rows.shape[1]
    found = estimate(rows)
    if found is not None:
        assert found.sum() == pytest.approx(1)
        assert (found >= 0).all()
    for shares in (found, np.full(classes, 1 / classes)):
        if shares is not None:
            changed = adjusted(rows, shares)
            assert np.isfinite(changed).all()
            np.testing.assert_allclose(changed.sum(axis=1), 1, rtol=1e-5)


@given(SEEDS, st.integers(2, 6))
def test_equal_shares_change_nothing(seed: int, classes: int) -> None:
    rows = _probabilities(seed, [1 / classes] * classes)
    np.testing.assert_allclose(adjusted(rows, np.full(classes, 1 / classes)), rows, rtol=1e-5, atol=1e-7)


def test_labels_give_smoothed_shares() -> None:
    """Of the head's classes; a class without images has the least share."""
    adjuster = Adjuster(("cat", "dog", "owl"), "labels", labels={"cat": 6, "owl": 1, "elk": 9})
    _, prior = adjuster.adjust(np.full((1, 3), 1 / 3, np.float32))
    assert prior == Prior("labels", {"cat": 0.7, "dog": 0.1, "owl": 0.2})
    assert prior.fields(["owl"]) == {"prior": "labels", "prior_shares": {"owl": 0.2}}
    assert smoothed(np.zeros(4)).tolist() == [0.25] * 4
