"""Layers of a head: calibrated, compressed, and discriminants against their formulas."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import oas

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.fedtc.discriminant import _principal_axes, _shrinkage, discriminants
from aggregator.algorithms.fedtc.head import Dense, calibrate, compress, cross_entropy, logits_of


def test_temperature_restores_scaled_logits() -> None:
    """Labels drawn with a softmax's probabilities: logits ten times as large need a temperature of ten."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5_000, 4)).astype(np.float32)
    drawn = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    temperature, losses = calibrate(10 * logits, drawn)
    assert 9 < temperature < 11
    np.testing.assert_allclose(losses, cross_entropy(10 * logits / np.float32(temperature), drawn), rtol=1e-4)


def test_few_correct_rows_are_not_certain() -> None:
    """Two correct rows, with a class that has no prototypes: one more incorrect row is assumed."""
    logits = np.array([[5, 0, ABSENT_LOGIT], [0, 5, ABSENT_LOGIT]], dtype=np.float32)
    _, losses = calibrate(logits, np.array([0, 1]))
    assert 0.1 < losses.mean() < 0.7


CLASSES, FEATURES = 4, 256


def _head(rng: np.random.Generator, scale: float) -> list[Dense]:
    """Layers of the paper's sizes and of rank 16, as training leaves them; the first takes features of a scale."""
    layers: list[Dense] = []
    for inputs, outputs in itertools.pairwise((FEATURES, 1024, 512, CLASSES)):
        weight = rng.normal(size=(outputs, 16)) @ rng.normal(size=(16, inputs)) / np.sqrt(inputs)
        layers.append(
            Dense(
                (weight / (1 if layers else scale)).astype(np.float32),
                rng.normal(size=outputs).astype(np.float32),
            )
        )
    return layers


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_compressed_layers_compute_nearly_the_same(scale: float) -> None:
    """Also for features so large or small that float16 could not hold the weights."""
    rng = np.random.default_rng(0)
    head = _head(rng, scale)
    features = (scale * rng.normal(size=(500, FEATURES))).astype(np.float32)
    small = compress(head, features[:400])
    expected = logits_of(head, features[400:])
    difference = logits_of(small, features[400:]) - expected
    assert np.abs(difference).max() < 0.01 * expected.std()
    assert {layer.weight.dtype for layer in small[:-1]} == {np.dtype(np.float16)}


@pytest.mark.parametrize("features", [np.zeros((5, FEATURES)), np.ones((1, FEATURES))])
def test_features_without_variance_are_compressed(features: np.ndarray) -> None:
    head = _head(np.random.default_rng(0), 1.0)
    data = features.astype(np.float32)
    assert np.isfinite(logits_of(compress(head, data), data)).all()


def test_discriminant_equals_the_formula() -> None:
    """With many more samples than features: (S^-1 mu).x - mu.S^-1.mu / 2, but for what all classes share."""
    rng = np.random.default_rng(0)
    mix, labels = rng.normal(size=(4, 4)), np.arange(30_000) % 3
    features = (rng.normal(size=(len(labels), 4)) @ mix + np.eye(3, 4)[labels]).astype(np.float32)
    centers = np.stack([features[labels == label].mean(axis=0) for label in range(3)])
    deviations = features - centers[labels]
    inverse = np.linalg.inv(deviations.T @ deviations / (len(labels) - 3))
    expected = features @ inverse @ centers.T - (centers @ inverse * centers).sum(axis=1) / 2
    (head,) = discriminants(centers, deviations, np.bincount(labels), (1.0,))
    logits = logits_of([head], features)
    np.testing.assert_allclose(
        logits - logits.mean(axis=1, keepdims=True),
        expected - expected.mean(axis=1, keepdims=True),
        atol=0.06,
    )


@given(rows=st.integers(2, 30), size=st.integers(2, 30), seed=st.integers(0, 99))
def test_shrinkage_is_the_oracle_approximating_one(rows: int, size: int, seed: int) -> None:
    deviations = np.random.default_rng(seed).normal(size=(rows, size))
    _, expected = oas(deviations, assume_centered=True)
    _, squares = _principal_axes(deviations)
    assert _shrinkage(squares, rows, size) == pytest.approx(expected)


@given(rows=st.integers(1, 30), size=st.integers(1, 30), seed=st.integers(0, 99))
def test_axes_span_the_rows(rows: int, size: int, seed: int) -> None:
    """With more rows and with more features, the squares and axes make up R^T R."""
    deviations = np.random.default_rng(seed).normal(size=(rows, size))
    axes, squares = _principal_axes(deviations)
    np.testing.assert_allclose((axes.T * squares) @ axes, deviations.T @ deviations, atol=1e-9)
    np.testing.assert_allclose(axes @ axes.T, np.eye(len(axes)), atol=1e-6)


def test_share_of_zero_is_the_nearest_class_mean() -> None:
    """Of classes of as many images, so that the bias for rare ones makes no difference."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 4
    features = (rng.normal(size=(40, 6)) + 2 * np.eye(4, 6)[labels]).astype(np.float32)
    centers = np.stack([features[labels == label].mean(axis=0) for label in range(4)])
    (head,) = discriminants(centers, features - centers[labels], np.bincount(labels), (0.0,))
    asked = rng.normal(size=(100, 6)).astype(np.float32)
    nearest = np.linalg.norm(asked[:, None] - centers, axis=2).argmin(axis=1)
    assert (logits_of([head], asked).argmax(axis=1) == nearest).all()


def test_regression_equals_the_formula() -> None:
    """(S + N/K M'M + lambda I)^-1 M', with fewer samples than features, but for a factor and what all classes share."""
    rng, size = np.random.default_rng(0), 12
    labels = np.arange(10) % 5
    features = (rng.normal(size=(10, size)) + 3 * np.eye(5, size)[labels]).astype(np.float32)
    centers = np.stack([features[labels == label].mean(axis=0) for label in range(5)])
    deviations = (features - centers[labels]).astype(np.float64)
    scatter, freedom = deviations.T @ deviations, 10 - 5
    identity = _shrinkage(np.linalg.eigvalsh(scatter), freedom, size)
    kept = 0.5 * (1 - identity)
    ridge = (1 - kept) * np.trace(scatter) / size / kept
    means = centers - centers.mean(axis=0)
    inverse = np.linalg.inv(scatter + 2 * means.T @ means + ridge * np.eye(size))
    expected = (features - centers.mean(axis=0)) @ inverse @ means.T
    _, head = discriminants(
        centers, deviations.astype(np.float32), np.bincount(labels), (0.5,), regressions=True
    )
    logits = logits_of([head], features)
    logits -= logits.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(logits / logits.std(), expected / expected.std(), atol=1e-4)


def test_regression_of_two_classes_is_their_discriminant() -> None:
    """But for a factor, also of classes of unequal numbers of images."""
    rng, labels = np.random.default_rng(0), np.array([0] * 9 + [1] * 3)
    features = (rng.normal(size=(12, 6)) + labels[:, None]).astype(np.float32)
    centers = np.stack([features[labels == label].mean(axis=0) for label in range(2)])
    heads = discriminants(centers, features - centers[labels], np.bincount(labels), (1.0,), regressions=True)
    discriminant, regression = (logits_of([head], features)[:, 0] for head in heads)
    np.testing.assert_allclose(regression / regression.std(), discriminant / discriminant.std(), rtol=1e-4)


@pytest.mark.parametrize("images", [1, 3, 16])
def test_class_of_few_images_in_the_middle_is_not_predicted_for_images_of_others(images: int) -> None:
    random = np.random.default_rng(0)
    centers = np.zeros((5, 32), dtype=np.float32)
    centers[np.arange(4), np.arange(4)] = 4.0
    centers[4] = centers[:4].mean(axis=0)
    rows = random.normal(size=(400, 32)).astype(np.float32)
    labels = np.repeat(np.arange(4), 100)
    numbers = np.array([1000, 1000, 1000, 1000, images])

    for head in discriminants(centers, rows, numbers, (1.0,), regressions=True):
        found = logits_of([head], centers[labels] + rows).argmax(axis=1)
        assert (found == labels).mean() > 0.85
