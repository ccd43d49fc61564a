"""Prototypes of separated classes, and the training of a head from them."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES, Recipe
from aggregator.algorithms.fedtc.train_head import TrainedHead, train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet

Features = NDArray[np.float32]
Integers = NDArray[np.int64]

FEATURE_SIZE = 8
ADAPTER = replace(RECIPES["default"], closed_form=False, min_steps=60)
ALL = pytest.mark.parametrize(
    "recipe", [RECIPES["default"], RECIPES["paper"], ADAPTER], ids=["default", "paper", "adapter"]
)
LEARNED = pytest.mark.parametrize("recipe", [RECIPES["default"], ADAPTER], ids=["default", "adapter"])


def blobs(*labels: int, per_class: int = 20, seed: int = 0) -> tuple[Features, Integers, Integers]:
    """Prototypes of well separated classes: one unit vector per class, and noise."""
    rng = np.random.default_rng(seed)
    of = np.repeat(labels, per_class)
    noise = rng.normal(scale=0.1, size=(len(of), FEATURE_SIZE))
    return (np.eye(FEATURE_SIZE)[of] + noise).astype(np.float32), of, np.full(len(of), 5)


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
