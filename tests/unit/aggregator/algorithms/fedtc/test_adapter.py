from dataclasses import replace

import numpy as np
import pytest
import torch

from aggregator.algorithms.fedtc.adapter import Head, _Optimizer
from aggregator.algorithms.fedtc.head import Dense, logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES, Recipe
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from tests.unit.aggregator.algorithms.fedtc.heads import (
    ADAPTER,
    FEATURE_SIZE,
    blobs,
    train,
)


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


@pytest.mark.parametrize("name", RECIPES)
def test_steps_are_those_of_pytorchs_optimizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, without an object of it, which would import PyTorch's compiler in each training."""
    ours, theirs = (Head(feature_size=FEATURE_SIZE, num_classes=3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(theirs.parameters(), fused=True)
    if RECIPES[name].optimizer == "sgd":
        optimizer = torch.optim.SGD(theirs.parameters())
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", None)
    step = _Optimizer(ours, RECIPES[name]).step
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(4, FEATURE_SIZE)).astype(np.float32))
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


@pytest.mark.parametrize("recipe", [RECIPES["paper"], ADAPTER], ids=["paper", "adapter"])
def test_training_reports_a_falling_loss(recipe: Recipe) -> None:
    reports: list[dict[str, float]] = []
    data = TrainingSet(*blobs(0, 1, 2, 3), 4)
    trained = train_head(data, recipe, seed=0, device="cpu", report=reports.append)
    assert [report["epoch"] for report in reports] == list(range(1, trained.epochs + 1))
    assert reports[-1]["loss"] < reports[0]["loss"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_trains_on_cuda() -> None:
    assert train(*blobs(0, 1, 2, 3), recipe=ADAPTER, device="cuda").accuracy == 1.0
