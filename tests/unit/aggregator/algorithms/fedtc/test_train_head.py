"""Training a head: the linear candidates, and the adapter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aggregator.algorithms.fedtc import train_head as module
from aggregator.algorithms.fedtc.adapter import Head, _Optimizer, train_adapter
from aggregator.algorithms.fedtc.head import Dense, logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES, Recipe
from aggregator.algorithms.fedtc.train_head import (
    ALWAYS_ADAPTER,
    MIN_PER_CLASS,
    MIN_PROTOTYPES,
    REGRESSION_SHARES,
    SHARES,
    TrainedHead,
    _discriminants,
    _folds,
    _preferred,
    train_head,
)
from aggregator.algorithms.fedtc.training_set import TrainingSet
from tests.support.messages.prototype_sets import BLOB_SIZE, Features, Integers, blobs

ADAPTER = replace(RECIPES["default"], closed_form=False, min_steps=30)
PAPER = replace(RECIPES["paper"], epochs=20)
ALL = pytest.mark.parametrize(
    "recipe", [RECIPES["default"], PAPER, ADAPTER], ids=["default", "paper", "adapter"]
)
LEARNED = pytest.mark.parametrize("recipe", [RECIPES["default"], ADAPTER], ids=["default", "adapter"])


def train(
    prototypes: Features,
    labels: Integers,
    counts: Integers,
    *,
    num_classes: int = 4,
    widths: tuple[int, ...] = (),
    recipe: Recipe = RECIPES["default"],
    seed: int = 0,
    device: str = "cpu",
) -> TrainedHead:
    data = TrainingSet(prototypes, labels, counts, num_classes, widths=widths)
    return train_head(data, recipe, seed=seed, device=device)


def logits_from(trained: TrainedHead, features: Features) -> Features:
    return logits_of(trained.layers, features)


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
    trained = train(prototypes, labels, counts, num_classes=2)
    asked = np.repeat([0, 1], 200)
    features = (centers[asked] + rng.normal(size=(400, 200))).astype(np.float32)
    predicted = logits_from(trained, features).argmax(axis=1)
    assert min((predicted[asked == label] == label).mean() for label in (0, 1)) > correct


@ALL
def test_scale_of_a_backbone_does_not_matter(recipe: Recipe) -> None:
    """Values that are a thousand times those of the other backbone would otherwise be all that counts."""
    prototypes, labels, counts = blobs(0, 1, 2, 3)
    widths = (BLOB_SIZE // 2,) * 2
    fresh, _, _ = blobs(0, 1, 2, 3, seed=1)
    expected = logits_from(train(prototypes, labels, counts, widths=widths, recipe=recipe), fresh)
    for scale in (1e-3, 1e3):
        factors = np.repeat(np.array([1, scale], np.float32), BLOB_SIZE // 2)
        scaled = train(prototypes * factors, labels, counts, widths=widths, recipe=recipe)
        np.testing.assert_allclose(logits_from(scaled, fresh * factors), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("value", [30, 1e3, 1e30])
def test_one_extreme_prototype_switches_no_backbone_off(value: float) -> None:
    """A fleet of few devices does not find it as an outlier."""
    values, labels, counts = blobs(0, 1, 2, 3)
    given = TrainingSet(values, labels, counts, 4, widths=(4, 4))
    expected = given.factors()
    values[7, :4] = value
    np.testing.assert_allclose(given.factors(), expected, rtol=0.05)


def test_factors_stay_within_float16() -> None:
    values, labels, counts = blobs(0, 1, 2, 3)
    values[:, :4] *= 1e9
    factors = TrainingSet(values, labels, counts, 4, widths=(4, 4)).factors()
    assert factors.tolist() == pytest.approx([1e-4] * 4 + [1] * 4)


@pytest.mark.parametrize("constant", [slice(0, 4), slice(0, 8)])
def test_a_backbone_without_variation_makes_a_finite_head(constant: slice) -> None:
    prototypes, labels, counts = blobs(0, 1, 2, 3)
    prototypes[:, constant] = 1
    trained = train(prototypes, labels, counts, widths=(4, 4))
    assert np.isfinite(logits_from(trained, prototypes)).all()


def _shifted(per_class: int, classes: int = 2) -> tuple[Features, Integers, Integers]:
    """Prototypes of normal classes that share a covariance: a discriminant is the best head."""
    rng, labels = np.random.default_rng(0), np.arange(per_class * classes) % classes
    prototypes = 0.3 * labels[:, None] + rng.normal(size=(len(labels), 40))
    return prototypes.astype(np.float32), labels, np.ones_like(labels)


def test_adapter_is_used_where_held_out_prototypes_prefer_it() -> None:
    """Spheres of one center have no linear border; normal classes that share a covariance have the best one."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(ALWAYS_ADAPTER, BLOB_SIZE))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    labels = np.arange(len(directions)) % 2
    prototypes = (directions * np.where(labels, 4, 1)[:, None]).astype(np.float32)
    recipe = replace(RECIPES["default"], min_steps=60)
    curved = train(prototypes, labels, np.ones_like(labels), num_classes=2, recipe=recipe)
    assert len(curved.layers) == 3
    assert curved.accuracy > 0.95
    assert curved.epochs > 0
    linear = train(*_shifted(ALWAYS_ADAPTER // 2), num_classes=2, recipe=recipe)
    assert len(linear.layers) == 1
    assert linear.epochs == 0


@pytest.mark.parametrize(
    ("per_class", "classes", "changed", "trainings"),
    [
        (MIN_PER_CLASS - 1, 20, {}, 0),
        (MIN_PROTOTYPES // 2 - 1, 2, {}, 0),
        (MIN_PROTOTYPES // 2, 2, {}, 1),
        (ALWAYS_ADAPTER, 2, {}, 2),
        (ALWAYS_ADAPTER, 2, {"epochs": 1, "min_steps": 0}, 1),
        (ALWAYS_ADAPTER, 2, {"restore": False, "mix": False}, 1),
    ],
)
def test_number_of_prototypes_decides_how_often_an_adapter_is_trained(
    per_class: int, classes: int, changed: dict[str, Any], trainings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never of few, once to compare it with a discriminant that is better, and of many as the head.

    A task's own epochs, and features that are not restored, are compared.
    """
    trained: list[TrainingSet] = []

    def spy(part: TrainingSet, *, recipe: Recipe, **options: Any) -> tuple[tuple[Dense, ...], int]:
        trained.append(part)
        return train_adapter(part, recipe=replace(recipe, epochs=1, min_steps=1), **options)

    monkeypatch.setattr("aggregator.algorithms.fedtc.adapter.train_adapter", spy)
    recipe = replace(RECIPES["default"], **changed)
    head = train(*_shifted(per_class, classes), num_classes=classes, recipe=recipe)
    assert (len(trained), head.epochs > 0) == (trainings, trainings == 2)


def test_adapter_takes_classes_as_equally_likely() -> None:
    """Of two classes of the same features, it does not prefer the one with more prototypes."""
    labels = np.repeat([0, 1], [180, 20])
    prototypes = np.random.default_rng(0).normal(size=(200, BLOB_SIZE)).astype(np.float32)
    shares = []
    for balance in (True, False):
        recipe = replace(ADAPTER, balance=balance, min_steps=20)
        trained = train(prototypes, labels, np.full(200, 5), num_classes=2, recipe=recipe)
        shares.append((logits_from(trained, 3 * prototypes).argmax(axis=1) == 0).mean())
    assert 0.2 < shares[0] < 0.8 < shares[1]


def _few(per_class: int, places: list[float], *, size: int = 400) -> tuple[Features, Integers, Integers]:
    """Prototypes of five images of classes in these places on a line."""
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(len(places)), per_class)
    prototypes = rng.normal(size=(len(labels), size)) / np.sqrt(5)
    prototypes[:, 0] += np.array(places)[labels]
    return prototypes.astype(np.float32), labels, np.full(len(labels), 5)


def test_regression_is_chosen_unless_a_discriminant_is_better() -> None:
    """Within one standard error of the least loss, and correct as often; the first of them."""
    first = len(SHARES)
    losses = [np.full(40, 4.0, np.float32) for _ in range(first + len(REGRESSION_SHARES))]
    correct = np.full(len(losses), 30)
    losses[1][:] = 3.9
    losses[first + 1][::2] = 5.0  # higher on average, but by less than a standard error
    losses[first + 1][1::2] = 3.0
    assert _preferred(losses, correct, 1) == first + 1
    losses[first + 1][:] = 4.0
    assert _preferred(losses, correct, 1) == 1
    losses[first] = losses[1]
    assert _preferred(losses, correct, 1) == first
    correct[1] += 1
    assert _preferred(losses, correct, 1) == 1


def test_regression_of_few_prototypes() -> None:
    """The head that is trained is the regression, divided by the temperature."""
    data = blobs(0, 1, 2, 3, per_class=4)
    trained = train(*data)
    even = TrainingSet(*data, 4, restore=True)
    (layer,), expected = (trained.layers, [*_discriminants(even, REGRESSION_SHARES, regressions=True)][1::2])
    assert any(np.allclose(layer.weight * trained.temperature, each.weight, rtol=1e-4) for each in expected)


def test_class_between_two_others_keeps_the_discriminant() -> None:
    """A regression to one-hot labels never predicts it."""
    trained = train(*_few(4, [-6.0, 0.0, 6.0]), num_classes=3)
    fresh, labels, _ = _few(200, [-6.0, 0.0, 6.0])
    assert (logits_from(trained, fresh).argmax(axis=1) == labels).mean() > 0.95


@pytest.mark.parametrize("rare", [True, False])
def test_where_regressions_are_no_candidates(*, rare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a class of few devices, which they do not limit, and of two classes, the head is as without them."""
    monkeypatch.delattr(module, "_preferred")
    prototypes, labels, counts = blobs(*range(3 if rare else 2), per_class=4)
    data = TrainingSet(prototypes, labels, counts, 3, common=labels < 2)
    head = module.train_head(data, RECIPES["default"], seed=0, device="cpu")
    assert len(head.layers) == 1


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4), repeated=st.sampled_from([1, 20]))
def test_folds_leave_pairs_out_and_something_to_train_on(sizes: list[int], repeated: int) -> None:
    """A class of three or more has at least two prototypes in each of its folds, and others outside."""
    labels = np.repeat(np.arange(len(sizes)), np.array(sizes) * repeated)
    folds = _folds(labels, 0)
    for label in np.unique(labels):
        of_class = folds[labels == label]
        if len(of_class) < 3:
            assert (of_class == -1).all()
        for fold in np.unique(of_class[of_class >= 0]):
            assert 2 <= (of_class == fold).sum() < len(of_class)


@ALL
def test_absent_class_is_never_predicted(recipe: Recipe) -> None:
    """Its probability is 0, wherever the feature lies."""
    trained = train(*blobs(0, 2), recipe=recipe)
    anywhere = np.random.default_rng(0).normal(scale=10, size=(500, BLOB_SIZE)).astype(np.float32)
    probabilities = torch.softmax(torch.from_numpy(logits_from(trained, anywhere)), dim=1)
    assert (probabilities[:, [1, 3]] == 0).all()
    assert probabilities.isfinite().all()


@ALL
@pytest.mark.parametrize("per_class", [1, 5])
def test_a_single_class_trains(recipe: Recipe, per_class: int) -> None:
    """One class, even one prototype, makes a head that predicts it."""
    trained = train(*blobs(2, per_class=per_class), recipe=recipe)
    assert (logits_from(trained, blobs(0, 1, 2, 3)[0]).argmax(axis=1) == 2).all()


@ALL
def test_features_of_zero_have_finitelogits(recipe: Recipe) -> None:
    """Normalizing a zero vector is no division by zero, forwards or backwards."""
    prototypes, labels, counts = blobs(0, 1)
    trained = train(np.zeros_like(prototypes), labels, counts, recipe=recipe)
    assert np.isfinite(logits_from(trained, prototypes)).all()
    assert np.isfinite(trained.loss)


@LEARNED
def test_the_scale_and_origin_of_features_do_not_matter(recipe: Recipe) -> None:
    """Backbones differ in both by orders of magnitude: the default recipe learns from any."""
    prototypes, labels, counts = blobs(0, 1, 2, 3)
    fresh, fresh_labels, _ = blobs(0, 1, 2, 3, seed=1)
    for scale, origin in ((1e-3, 0.0), (1e3, 0.0), (1.0, 100.0)):
        trained = train(prototypes * np.float32(scale) + np.float32(origin), labels, counts, recipe=recipe)
        logits = logits_from(trained, fresh * np.float32(scale) + np.float32(origin))
        assert (logits.argmax(axis=1) == fresh_labels).all()


@LEARNED
def test_constant_feature_is_not_amplified(recipe: Recipe) -> None:
    """A feature that is constant among the prototypes may differ a little on devices without deciding anything."""
    prototypes, labels, counts = blobs(0, 1, 2, 3)
    prototypes[:, -1] = 1.0
    trained = train(prototypes, labels, counts, recipe=recipe)
    moved = prototypes.copy()
    moved[:, -1] += 0.01
    assert (logits_from(trained, moved).argmax(axis=1) == labels).all()


def test_the_head_is_table_5_of_the_paper() -> None:
    """FC(L, 1024), ReLU, L2; FC(1024, 512), ReLU, L2; FC(512, C), against plain numpy."""
    head = Head(feature_size=BLOB_SIZE, num_classes=3)
    features = np.random.default_rng(0).normal(size=(4, BLOB_SIZE)).astype(np.float32)
    expected = logits_of(
        [Dense(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in head.layers], features
    )
    with torch.inference_mode():
        np.testing.assert_allclose(head(torch.from_numpy(features)).numpy(), expected, atol=1e-6)
    assert [layer.out_features for layer in head.layers[:-1]] == [1024, 512]


@pytest.mark.parametrize("name", RECIPES)
def test_steps_are_those_of_pytorchs_optimizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, without an object of it, which would import PyTorch's compiler in each training."""
    ours, theirs = (Head(feature_size=BLOB_SIZE, num_classes=3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(theirs.parameters(), fused=True)
    if RECIPES[name].optimizer == "sgd":
        optimizer = torch.optim.SGD(theirs.parameters())
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", None)
    step = _Optimizer(ours, RECIPES[name]).step
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(4, BLOB_SIZE)).astype(np.float32))
    for rate in (0.1, 0.01, 0.2):
        for head in (ours, theirs):
            torch.autograd.backward(head(features).square().sum())
        step(rate)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_training_leaves_the_global_random_state_alone() -> None:
    """Randomness is uploaded, never taken from torch's global generator."""
    before = torch.get_rng_state()
    train(*blobs(0, 1), recipe=ADAPTER)
    assert torch.equal(torch.get_rng_state(), before)


def test_unsorted_prototypes_keep_their_counts() -> None:
    """The class with larger counts comes second in one order and first in the other."""
    prototypes, labels, _ = blobs(1, 0, 1, 0, per_class=3)
    counts = np.where(labels == 1, 1, 9)
    order = np.argsort(labels, kind="stable")
    recipe = replace(ADAPTER, epochs=1, min_steps=2, compress=False)
    first, second = (
        train(prototypes[rows], labels[rows], counts[rows], num_classes=2, recipe=recipe)
        for rows in (slice(None), order)
    )
    assert np.array_equal(first.layers[0].weight, second.layers[0].weight)


def test_same_seed_same_head() -> None:
    """A head can be made again from the same prototypes; another seed makes another adapter."""
    first, again, other = (train(*blobs(0, 1, 2), recipe=ADAPTER, seed=seed) for seed in (1, 1, 2))
    for a, b in zip(first.layers, again.layers, strict=True):
        assert np.array_equal(a.weight, b.weight)
        assert np.array_equal(a.bias, b.bias)
    assert not np.array_equal(first.layers[0].weight, other.layers[0].weight)


def test_a_small_fleet_gets_enough_steps() -> None:
    """Few prototypes are passed over more often, until the recipe's floor of steps is reached."""
    assert train(*blobs(0, 1), recipe=ADAPTER).epochs >= ADAPTER.min_steps
    assert ADAPTER.min_steps > ADAPTER.epochs


@pytest.mark.parametrize("recipe", [PAPER, ADAPTER], ids=["paper", "adapter"])
def test_training_reports_a_falling_loss(recipe: Recipe) -> None:
    reports: list[dict[str, float]] = []
    data = TrainingSet(*blobs(0, 1, 2, 3), 4)
    trained = train_head(data, recipe, seed=0, device="cpu", report=reports.append)
    assert [report["epoch"] for report in reports] == list(range(1, trained.epochs + 1))
    assert reports[-1]["loss"] < reports[0]["loss"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_trains_on_cuda() -> None:
    assert train(*blobs(0, 1, 2, 3), recipe=ADAPTER, device="cuda").accuracy == 1.0
