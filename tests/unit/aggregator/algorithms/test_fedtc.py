from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.algorithms.discriminant import discriminant
from aggregator.algorithms.fedtc import (
    MIN_HELD_OUT,
    RECIPES,
    Recipe,
    TrainedHead,
    restore_variance,
    train_head,
)
from aggregator.algorithms.fedtc_adapter import Head
from aggregator.algorithms.head_layers import Dense, logits_of
from protocol.errors import ProtofleetError

Features = NDArray[np.float32]
Integers = NDArray[np.int64]

FEATURE_SIZE = 8
ADAPTER = replace(RECIPES["default"], closed_form=False)
ALL = pytest.mark.parametrize(
    "recipe", [RECIPES["default"], RECIPES["paper"], ADAPTER], ids=["default", "paper", "adapter"]
)


def _blobs(*labels: int, per_class: int = 20, seed: int = 0) -> tuple[Features, Integers, Integers]:
    """Prototypes of well separated classes: one unit vector per class, and noise."""
    rng = np.random.default_rng(seed)
    of = np.repeat(labels, per_class)
    noise = rng.normal(scale=0.1, size=(len(of), FEATURE_SIZE))
    return (np.eye(FEATURE_SIZE)[of] + noise).astype(np.float32), of, np.full(len(of), 5)


def _train(
    prototypes: Features,
    labels: Integers,
    counts: Integers,
    *,
    num_classes: int = 4,
    recipe: Recipe = RECIPES["default"],
    seed: int = 0,
    device: str = "cpu",
) -> TrainedHead:
    return train_head(
        prototypes,
        labels,
        counts,
        num_classes=num_classes,
        recipe=recipe,
        seed=seed,
        device=device,
    )


def _logits(trained: TrainedHead, features: Features) -> Features:
    return logits_of(trained.layers, features)


@pytest.mark.parametrize("recipe", [RECIPES["paper"], ADAPTER], ids=["paper", "adapter"])
def test_training_reports_a_falling_loss(recipe: Recipe) -> None:
    reports: list[dict[str, float]] = []
    prototypes, labels, counts = _blobs(0, 1, 2, 3)
    trained = train_head(
        prototypes, labels, counts, num_classes=4, recipe=recipe, seed=0, device="cpu", report=reports.append
    )
    assert [report["epoch"] for report in reports] == list(range(1, trained.epochs + 1))
    assert reports[-1]["loss"] < reports[0]["loss"]


@pytest.mark.parametrize("recipe", [RECIPES["default"], ADAPTER], ids=["default", "adapter"])
def test_separable_classes_are_learned(recipe: Recipe) -> None:
    fresh, fresh_labels, _ = _blobs(0, 1, 2, 3, seed=1)
    trained = _train(*_blobs(0, 1, 2, 3), recipe=recipe)
    assert trained.accuracy == 1.0
    assert (_logits(trained, fresh).argmax(axis=1) == fresh_labels).all()


def test_same_seed_same_head() -> None:
    """A head can be made again from the same prototypes; another seed makes another adapter."""
    first, again, other = (_train(*_blobs(0, 1, 2), recipe=ADAPTER, seed=seed) for seed in (1, 1, 2))
    for a, b in zip(first.layers, again.layers, strict=True):
        assert np.array_equal(a.weight, b.weight)
        assert np.array_equal(a.bias, b.bias)
    assert not np.array_equal(first.layers[0].weight, other.layers[0].weight)


@pytest.mark.parametrize(
    ("per_class", "correct"), [((1, 1), 0.8), ((2, 1), 0.8), ((9, 1), 0.8), ((4, 5), 0.9)]
)
def test_few_prototypes_make_a_useful_head(per_class: tuple[int, int], correct: float) -> None:
    """Also with more features than prototypes, and with one class rarer than the other."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(2, 200)) * 0.5
    labels = np.repeat([0, 1], per_class)
    counts = np.full(len(labels), 5)
    prototypes = (centers[labels] + rng.normal(size=(len(labels), 200)) / np.sqrt(5)).astype(np.float32)
    trained = _train(prototypes, labels, counts, num_classes=2)
    asked = np.repeat([0, 1], 200)
    features = (centers[asked] + rng.normal(size=(400, 200))).astype(np.float32)
    predicted = _logits(trained, features).argmax(axis=1)
    assert min((predicted[asked == label] == label).mean() for label in (0, 1)) > correct


def test_adapter_is_used_where_cross_validation_prefers_it() -> None:
    """Spheres of one center have no linear border; normal classes that share a covariance have the best one."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(10 * MIN_HELD_OUT, FEATURE_SIZE))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    labels = np.arange(len(directions)) % 2
    prototypes = (directions * np.where(labels, 4, 1)[:, None]).astype(np.float32)
    curved = _train(prototypes, labels, np.ones_like(labels), num_classes=2)
    assert len(curved.layers) == 3
    assert curved.accuracy > 0.95
    assert curved.epochs > 0
    shifted = (0.3 * labels[:, None] + rng.normal(size=(len(labels), 40))).astype(np.float32)
    linear = _train(shifted, labels, np.ones_like(labels), num_classes=2)
    assert len(linear.layers) == 1
    assert linear.epochs == 0


def test_temperature_makes_probabilities_true() -> None:
    """Of overlapping classes, the mean confidence is near the accuracy."""
    rng = np.random.default_rng(0)
    labels = np.arange(400) % 2
    features = (labels[:, None] * 0.2 + rng.normal(size=(400, 40))).astype(np.float32)
    trained = _train(features[:100], labels[:100], np.ones(100, dtype=np.int64), num_classes=2)
    logits = _logits(trained, features[100:])
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    confidence = (odds.max(axis=1) / odds.sum(axis=1)).mean()
    assert trained.temperature > 1
    assert abs(confidence - (logits.argmax(axis=1) == labels[100:]).mean()) < 0.1


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


@given(rows=st.integers(3, 12), seed=st.integers(0, 99))
def test_discriminant_solves_wide_and_tall_data_alike(rows: int, seed: int) -> None:
    """Features that are always zero change nothing but which of two equal systems is solved."""
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % 2
    features = rng.normal(size=(rows, 3)).astype(np.float32)
    centers = np.stack([features[labels == label].mean(axis=0) for label in range(2)])
    tall = discriminant(centers, features - centers[labels], np.bincount(labels))
    order = np.argsort(-np.arange(rows), kind="stable")
    again = discriminant(centers, (features - centers[labels])[order], np.bincount(labels))
    np.testing.assert_allclose(tall.weight, again.weight, rtol=1e-3, atol=1e-4)
    assert np.isfinite(tall.weight).all()
    assert np.isfinite(tall.bias).all()


def test_unsorted_prototypes_keep_their_counts() -> None:
    """The class with larger counts comes second in one order and first in the other."""
    prototypes, labels, _ = _blobs(1, 0, 1, 0, per_class=3)
    counts = np.where(labels == 1, 1, 9)
    order = np.argsort(labels, kind="stable")
    recipe = replace(ADAPTER, epochs=1, min_steps=2)
    first, second = (
        train_head(
            prototypes[rows], labels[rows], counts[rows], num_classes=2, recipe=recipe, seed=0, device="cpu"
        )
        for rows in (slice(None), order)
    )
    assert np.array_equal(first.layers[0].weight, second.layers[0].weight)


def test_training_leaves_the_global_random_state_alone() -> None:
    """Randomness is uploaded, never taken from torch's global generator."""
    before = torch.get_rng_state()
    _train(*_blobs(0, 1), recipe=ADAPTER)
    assert torch.equal(torch.get_rng_state(), before)


@ALL
def test_absent_class_is_never_predicted(recipe: Recipe) -> None:
    """Its probability is 0, wherever the feature lies."""
    trained = _train(*_blobs(0, 2), recipe=recipe)
    anywhere = np.random.default_rng(0).normal(scale=10, size=(500, FEATURE_SIZE)).astype(np.float32)
    probabilities = torch.softmax(torch.from_numpy(_logits(trained, anywhere)), dim=1)
    assert (probabilities[:, [1, 3]] == 0).all()
    assert probabilities.isfinite().all()


@ALL
@pytest.mark.parametrize("per_class", [1, 5])
def test_a_single_class_trains(recipe: Recipe, per_class: int) -> None:
    """One class, even one prototype, makes a head that predicts it."""
    trained = _train(*_blobs(2, per_class=per_class), recipe=recipe)
    assert (_logits(trained, _blobs(0, 1, 2, 3)[0]).argmax(axis=1) == 2).all()


@ALL
def test_features_of_zero_have_finite_logits(recipe: Recipe) -> None:
    """Normalizing a zero vector is no division by zero, forwards or backwards."""
    prototypes, labels, counts = _blobs(0, 1)
    trained = _train(np.zeros_like(prototypes), labels, counts, recipe=recipe)
    assert np.isfinite(_logits(trained, prototypes)).all()
    assert np.isfinite(trained.loss)


@pytest.mark.parametrize("recipe", [RECIPES["default"], ADAPTER], ids=["default", "adapter"])
def test_the_scale_and_origin_of_features_do_not_matter(recipe: Recipe) -> None:
    """Backbones differ in both by orders of magnitude: the default recipe learns from any."""
    prototypes, labels, counts = _blobs(0, 1, 2, 3)
    fresh, fresh_labels, _ = _blobs(0, 1, 2, 3, seed=1)
    for scale, origin in ((1e-3, 0.0), (1e3, 0.0), (1.0, 100.0)):
        trained = _train(prototypes * np.float32(scale) + np.float32(origin), labels, counts, recipe=recipe)
        logits = _logits(trained, fresh * np.float32(scale) + np.float32(origin))
        assert (logits.argmax(axis=1) == fresh_labels).all()


@pytest.mark.parametrize("recipe", [RECIPES["default"], ADAPTER], ids=["default", "adapter"])
def test_constant_feature_is_not_amplified(recipe: Recipe) -> None:
    """A feature that is constant among the prototypes may differ a little on devices without deciding anything."""
    prototypes, labels, counts = _blobs(0, 1, 2, 3)
    prototypes[:, -1] = 1.0
    trained = _train(prototypes, labels, counts, recipe=recipe)
    moved = prototypes.copy()
    moved[:, -1] += 0.01
    assert (_logits(trained, moved).argmax(axis=1) == labels).all()


def test_a_small_fleet_gets_enough_steps() -> None:
    """Few prototypes are passed over more often, until the recipe's floor of steps is reached."""
    recipe = RECIPES["default"]
    assert _train(*_blobs(0, 1), recipe=ADAPTER).epochs >= recipe.min_steps
    assert recipe.min_steps > recipe.epochs


def test_the_head_is_table_5_of_the_paper() -> None:
    """FC(L, 1024), ReLU, L2; FC(1024, 512), ReLU, L2; FC(512, C), against plain numpy."""
    head = Head(feature_size=FEATURE_SIZE, num_classes=3)
    features = np.random.default_rng(0).normal(size=(4, FEATURE_SIZE)).astype(np.float32)
    expected = logits_of(
        [Dense(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in head.layers], features
    )
    with torch.inference_mode():
        np.testing.assert_allclose(head(torch.from_numpy(features)).numpy(), expected, atol=1e-6)
    assert [layer.out_features for layer in head.layers[:-1]] == [1024, 512]


@given(batch=st.integers(2, 40), seed=st.integers(0, 1000))
def test_restoring_gives_back_the_variance(batch: int, seed: int) -> None:
    """Batch means of normal features, restored, spread as those features do, around the same mean."""
    rng = np.random.default_rng(seed)
    features = rng.normal(loc=3.0, scale=2.0, size=(200 * batch, FEATURE_SIZE))
    means = features.reshape(200, batch, FEATURE_SIZE).mean(axis=1).astype(np.float32)
    labels, counts = np.zeros(200, dtype=np.int64), np.full(200, batch)
    restored = restore_variance(means, labels, counts)
    np.testing.assert_allclose(restored.mean(axis=0), means.mean(axis=0), atol=1e-4)
    assert 0.85 < restored.std() / features.std() < 1.15
    assert means.std() < 0.8 * features.std()


def test_restoring_works_class_by_class_and_weighs_by_count() -> None:
    """mu_v + sqrt(n_j) (P_j - mu_v), written out."""
    prototypes = np.array([[0.0], [3.0], [10.0]], dtype=np.float32)
    restored = restore_variance(prototypes, np.array([0, 0, 4]), np.array([4, 8, 9], dtype=np.uint32))
    np.testing.assert_allclose(restored, [[2 - 2 * 2], [2 + np.sqrt(8)], [10]], rtol=1e-6)


def test_single_images_are_restored_to_themselves() -> None:
    """What was never averaged lost no variance."""
    prototypes, labels, _ = _blobs(0, 1)
    np.testing.assert_allclose(
        restore_variance(prototypes, labels, np.ones(len(labels), dtype=np.int64)), prototypes, atol=1e-6
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_prototypes_that_are_not_finite_are_refused(value: float) -> None:
    """They would end in a head of NaN."""
    prototypes, labels, counts = _blobs(0, 1)
    prototypes[3, 2] = value
    with pytest.raises(ProtofleetError, match="finite"):
        _train(prototypes, labels, counts)


def test_what_does_not_fit_together_is_refused() -> None:
    """No prototypes, labels outside the task, empty prototypes, arrays of different length."""
    prototypes, labels, counts = _blobs(0, 3)
    with pytest.raises(ProtofleetError, match="at least one prototype"):
        _train(prototypes[:0], labels[:0], counts[:0])
    with pytest.raises(ProtofleetError, match="with a label and a count"):
        _train(prototypes, labels[1:], counts)
    with pytest.raises(ProtofleetError, match="labels must lie in 0 to 2"):
        _train(prototypes, labels, counts, num_classes=3)
    with pytest.raises(ProtofleetError, match="at least one image"):
        _train(prototypes, labels, np.zeros_like(counts))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_trains_on_cuda() -> None:
    assert _train(*_blobs(0, 1, 2, 3), recipe=ADAPTER, device="cuda").accuracy == 1.0
