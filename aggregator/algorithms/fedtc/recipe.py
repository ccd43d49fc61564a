"""How a head is trained: the paper's recipe, and the default."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from aggregator.algorithms.algorithm import Training

WARM_UP = 0.3
"""Fraction of a one-cycle training in which the rate rises."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a head is trained.

    Attributes:
        epochs: passes over the prototypes; more if they are fewer than `min_steps` steps.
        min_steps: least number of optimizer steps.
        batch_size: prototypes in a step.
        optimizer: plain SGD, or AdamW.
        learning_rate: constant, or the peak of the cycle.
        one_cycle: raise the rate from near nothing and let it fall again, over the whole training.
        restore: restore the variance that averaging removed (`TrainingSet`).
        mix: train each step on random mixtures of two restored deviations, half of them of one class.
        balance: make all classes equally likely, however many prototypes each has, by adding the logarithm of their
            numbers to the logits in training only (Menon et al., "Long-tail learning via logit adjustment", 2021).
        standardize: train on features of mean 0 and deviation 1, folded into the first layer afterwards, so that
            one rate suits the feature scales of all backbones.
        compress: reduce the adapter's layers to a low rank and float16 afterwards.
        closed_form: use the linear discriminant, unless cross-validation says that the adapter is better.
        adapter: train an adapter; False only with `closed_form`.
    """

    epochs: int
    min_steps: int
    batch_size: int
    optimizer: Literal["sgd", "adamw"]
    learning_rate: float
    one_cycle: bool
    restore: bool
    mix: bool
    balance: bool
    standardize: bool
    compress: bool
    closed_form: bool
    adapter: bool = True

    def rate_at(self, progress: float) -> float:
        """Return the fraction of the learning rate at a point of the training between 0 and 1."""
        if not self.one_cycle:
            return 1.0
        if progress < WARM_UP:
            return progress / WARM_UP
        return (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "paper": Recipe(
            epochs=200,
            min_steps=0,
            batch_size=64,
            optimizer="sgd",
            learning_rate=1e-3,
            one_cycle=False,
            restore=False,
            mix=False,
            balance=False,
            standardize=False,
            compress=False,
            closed_form=False,
        ),
        "default": Recipe(
            epochs=8,
            min_steps=300,
            batch_size=256,
            optimizer="adamw",
            learning_rate=1e-3,
            one_cycle=True,
            restore=True,
            mix=True,
            balance=True,
            standardize=True,
            compress=True,
            closed_form=True,
        ),
    }
)


def recipe_of(training: Training) -> Recipe:
    """Return the recipe that a task file configures."""
    recipe = RECIPES[training.recipe]
    if training.restore is not None:
        recipe = replace(recipe, restore=training.restore, mix=recipe.mix and training.restore)
    if training.epochs is not None:
        recipe = replace(recipe, epochs=training.epochs, min_steps=0)
    return recipe
