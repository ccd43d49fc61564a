from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.algorithms.fedtc import RECIPES, Head, TrainedHead, restore_variance, train_head
from protocol.errors import ProtofleetError

Features = NDArray[np.float32]
Integers = NDArray[np.int64]

FEATURE_SIZE = 8


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
    recipe: str = "default",
    seed: int = 0,
    device: str = "cpu",
) -> TrainedHead:
    return train_head(
        prototypes,
        labels,
        counts,
        num_classes=num_classes,
        recipe=RECIPES[recipe],
        seed=seed,
        device=device,
    )


def _logits(trained: TrainedHead, features: Features) -> Features:
    with torch.inference_mode():
        logits: Features = trained.module(torch.from_numpy(features)).numpy()
    return logits


@pytest.mark.parametrize("recipe", RECIPES)
def test_separable_classes_are_learned(recipe: str) -> None:
    """Either recipe learns classes that anything could, and the loss falls."""
    losses: list[float] = []
    prototypes, labels, counts = _blobs(0, 1, 2, 3)
    trained = train_head(
        prototypes,
        labels,
        counts,
        num_classes=4,
        recipe=RECIPES[recipe],
        seed=0,
        device="cpu",
        on_epoch=lambda _epoch, _epochs, loss: losses.append(loss),
    )
    assert len(losses) == trained.epochs
    assert losses[-1] == trained.loss < losses[0]
    if recipe == "default":
        fresh, fresh_labels, _ = _blobs(0, 1, 2, 3, seed=1)
        assert trained.accuracy == 1.0
        assert (_logits(trained, fresh).argmax(axis=1) == fresh_labels).all()


def test_same_seed_same_head() -> None:
    """A head can be made again from the same prototypes; another seed makes another one."""
    first, again, other = (_train(*_blobs(0, 1, 2), seed=seed) for seed in (1, 1, 2))
    for a, b in zip(first.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.module.layers[0].weight, other.module.layers[0].weight)


def test_unsorted_prototypes_keep_their_counts() -> None:
    """The class with larger counts comes second in one order and first in the other."""
    prototypes, labels, _ = _blobs(1, 0, 1, 0, per_class=3)
    counts = np.where(labels == 1, 1, 9)
    order = np.argsort(labels, kind="stable")
    recipe = replace(RECIPES["default"], epochs=1, min_steps=2)
    first, second = (
        train_head(
            prototypes[rows], labels[rows], counts[rows], num_classes=2, recipe=recipe, seed=0, device="cpu"
        )
        for rows in (slice(None), order)
    )
    assert torch.equal(first.module.layers[0].weight, second.module.layers[0].weight)


def test_training_leaves_the_global_random_state_alone() -> None:
    """Randomness is uploaded, never taken from torch's global generator."""
    before = torch.get_rng_state()
    _train(*_blobs(0, 1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_class_that_nobody_has_is_never_predicted(recipe: str) -> None:
    """Its probability is nought, wherever the feature lies."""
    trained = _train(*_blobs(0, 2), recipe=recipe)
    anywhere = np.random.default_rng(0).normal(scale=10, size=(500, FEATURE_SIZE)).astype(np.float32)
    probabilities = torch.softmax(torch.from_numpy(_logits(trained, anywhere)), dim=1)
    assert (probabilities[:, [1, 3]] == 0).all()
    assert probabilities.isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("per_class", [1, 5])
def test_a_single_class_trains(recipe: str, per_class: int) -> None:
    """One class, even one prototype, gives a head that answers it."""
    trained = _train(*_blobs(2, per_class=per_class), recipe=recipe)
    assert (_logits(trained, _blobs(0, 1, 2, 3)[0]).argmax(axis=1) == 2).all()


def test_a_feature_without_direction_gets_finite_logits() -> None:
    """Normalizing a zero vector is no division by zero, forwards or backwards."""
    prototypes, labels, counts = _blobs(0, 1)
    trained = _train(np.zeros_like(prototypes), labels, counts)
    assert np.isfinite(_logits(trained, prototypes)).all()
    assert np.isfinite(trained.loss)


def test_the_scale_and_origin_of_features_do_not_matter() -> None:
    """Backbones differ in both by orders of magnitude: the default recipe learns from any."""
    prototypes, labels, counts = _blobs(0, 1, 2, 3)
    fresh, fresh_labels, _ = _blobs(0, 1, 2, 3, seed=1)
    for scale, origin in ((1e-3, 0.0), (1e3, 0.0), (1.0, 100.0)):
        trained = _train(prototypes * np.float32(scale) + np.float32(origin), labels, counts)
        logits = _logits(trained, fresh * np.float32(scale) + np.float32(origin))
        assert (logits.argmax(axis=1) == fresh_labels).all()


def test_a_feature_that_never_moves_is_not_blown_up() -> None:
    """What is constant among the prototypes may differ a little on the device without deciding anything."""
    prototypes, labels, counts = _blobs(0, 1, 2, 3)
    prototypes[:, -1] = 1.0
    trained = _train(prototypes, labels, counts)
    moved = prototypes.copy()
    moved[:, -1] += 0.01
    assert (_logits(trained, moved).argmax(axis=1) == labels).all()


def test_a_small_fleet_gets_enough_steps() -> None:
    """Few prototypes are passed over more often, until the recipe's floor of steps is reached."""
    recipe = RECIPES["default"]
    assert _train(*_blobs(0, 1)).epochs >= recipe.min_steps
    assert recipe.min_steps > recipe.epochs


def test_the_head_is_table_5_of_the_paper() -> None:
    """FC(L, 1024), ReLU, L2; FC(1024, 512), ReLU, L2; FC(512, C), against plain numpy."""
    head = Head(feature_size=FEATURE_SIZE, num_classes=3)
    features = np.random.default_rng(0).normal(size=(4, FEATURE_SIZE)).astype(np.float32)
    expected = features
    for layer in head.layers[:-1]:
        expected = np.maximum(expected @ layer.weight.detach().numpy().T + layer.bias.detach().numpy(), 0)
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    expected = expected @ head.layers[-1].weight.detach().numpy().T + head.layers[-1].bias.detach().numpy()
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
    """The head comes back to the CPU."""
    trained = _train(*_blobs(0, 1, 2, 3), device="cuda")
    assert trained.accuracy == 1.0
    assert {parameter.device.type for parameter in trained.module.parameters()} == {"cpu"}
