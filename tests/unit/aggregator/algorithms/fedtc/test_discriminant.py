import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import oas

from aggregator.algorithms.fedtc.discriminant import _shrinkage, _solve, discriminant
from aggregator.algorithms.fedtc.head import logits_of


def test_discriminant_equals_the_formula() -> None:
    """With many more samples than features: (S^-1 mu).x - mu.S^-1.mu / 2, but for what all classes share."""
    rng = np.random.default_rng(0)
    mix, labels = rng.normal(size=(4, 4)), np.arange(30_000) % 3
    features = (rng.normal(size=(len(labels), 4)) @ mix + np.eye(3, 4)[labels]).astype(np.float32)
    centers = np.stack([features[labels == label].mean(axis=0) for label in range(3)])
    deviations = features - centers[labels]
    inverse = np.linalg.inv(deviations.T @ deviations / (len(labels) - 3))
    expected = features @ inverse @ centers.T - (centers @ inverse * centers).sum(axis=1) / 2
    logits = logits_of([discriminant(centers, deviations, np.bincount(labels))], features)
    np.testing.assert_allclose(
        logits - logits.mean(axis=1, keepdims=True),
        expected - expected.mean(axis=1, keepdims=True),
        atol=0.06,
    )


@given(rows=st.integers(2, 30), size=st.integers(2, 30), seed=st.integers(0, 99))
def test_shrinkage_is_the_oracle_approximating_one(rows: int, size: int, seed: int) -> None:
    deviations = np.random.default_rng(seed).normal(size=(rows, size))
    _, expected = oas(deviations, assume_centered=True)
    assert _shrinkage(deviations, rows) == pytest.approx(expected)


@given(rows=st.integers(1, 30), size=st.integers(1, 30), seed=st.integers(0, 99))
def test_both_systems_have_the_same_solution(rows: int, size: int, seed: int) -> None:
    """The larger matrix is inverted here, whether there are more rows or more features."""
    rng = np.random.default_rng(seed)
    deviations, right = rng.normal(size=(rows, size)), rng.normal(size=(3, size))
    inverse = np.linalg.inv(0.5 * np.eye(size) + 0.1 * deviations.T @ deviations)
    np.testing.assert_allclose(_solve(deviations, 0.5, 0.1, right), right @ inverse, atol=1e-9)
