"""Baselines of papers, beside those of `benchmarks.accuracy.baselines`: the same features and images."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.accuracy import baselines
from benchmarks.accuracy.baselines import (
    LAYERS,
    FedAvg,
    Model,
    Prepared,
    Training,
    accuracies_of,
    logits_of,
    prepare,
    prior_of,
)
from protofleet.simulation.fleet import Client

Method: TypeAlias = Literal[
    "Solo", "FedAvg-v", "FedProx", "FedRep", "FedProto", "FedProto averaged", "centralized"
]
"""Solo: every client alone. FedAvg-v: models averaged by images, the backbone frozen (FedTC section 3.2). FedProx:
the same, with a penalty for leaving the round's model. FedRep: a shared adapter, a classifier per client. FedProto: a
model per client, its class means drawn to the global ones; averaged: with the models averaged as well. centralized:
all features in one place, the upper bound."""

METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class Recipe(baselines.Recipe):
    """Hyperparameters of a method."""

    proximal: float = 0.1
    """FedProx's mu."""
    pull: float = 1.0
    """FedProto's lambda."""


def recipe_of(recipe: baselines.Recipe) -> Recipe:
    """Return the same hyperparameters, with the defaults of FedProx and FedProto."""
    return Recipe(**{each.name: getattr(recipe, each.name) for each in fields(recipe)})


ADAM, ALONE, ALONE_DEEPER = map(recipe_of, (baselines.ADAM, baselines.ALONE, baselines.ALONE_DEEPER))


class FedRep(Training):
    """A shared adapter, and a classifier of each client."""

    shared = ("adapter",)
    phases = (("classifier",), ("adapter",))


class FedProx(FedAvg):
    """FedAvg with a penalty for leaving the round's model."""

    recipe: Recipe

    def begin(self, model: Model) -> None:
        """Remember the model that the round starts from."""
        self._start = [parameter.detach().clone() for parameter in model.parameters()]

    def penalty(self, model: Model, hidden: Tensor, labels: Tensor) -> Tensor | float:  # noqa: ARG002 - as in `Training`
        """Return mu / 2 times the squared distance."""
        squares = (
            (parameter - before).square().sum()
            for parameter, before in zip(model.parameters(), self._start, strict=True)
        )
        return self.recipe.proximal / 2 * sum(squares)


class FedProto(Training):
    """Models whose class means are drawn to the global ones."""

    recipe: Recipe
    _pull: tuple[Tensor, Tensor] | None = None
    """Global prototypes (C, D), and 1 for each class that a client has, (C,)."""

    def penalty(self, model: Model, hidden: Tensor, labels: Tensor) -> Tensor | float:  # noqa: ARG002 - as in `Training`
        """Return lambda times the mean squared distance from the images' prototypes."""
        if self._pull is None:
            return 0.0
        prototypes, present = self._pull
        distances = (hidden - prototypes[labels]).square().mean(dim=1)
        return self.recipe.pull * (distances * present[labels]).mean()

    @torch.no_grad()
    def end_round(self, models: Sequence[Model], data: Sequence[Prepared]) -> None:
        """Average all clients' class means, weighted by images."""
        sums = torch.zeros(self.classes, models[0].classifier.in_features)
        counts = torch.zeros(self.classes)
        for model, mine in zip(models, data, strict=True):
            sums.index_add_(0, mine.labels, model.hidden(mine.features))
            counts += torch.bincount(mine.labels, minlength=self.classes)
        self._pull = sums / counts.clamp_min(1)[:, None], (counts > 0).float()


class FedProtoAveraged(FedProto):
    """The same with averaged models."""

    shared = LAYERS


_TRAININGS: dict[Method, type[Training]] = {
    "FedAvg-v": FedAvg,
    "FedProx": FedProx,
    "FedRep": FedRep,
    "FedProto": FedProto,
    "FedProto averaged": FedProtoAveraged,
}


def run_baseline(
    method: Method,
    clients: Sequence[Client],
    recipe: Recipe,
    *,
    classes: int,
    seed: int,
    prior: bool = False,
) -> NDArray[np.float64]:
    """Return each client's accuracy after the training, (K,); the same seed gives the same result.

    With a `prior`, a client expects classes as often as its own images have them, as FedPCL's `prior = true`.
    """
    return accuracies_of(
        clients, baseline_logits(method, clients, recipe, classes=classes, seed=seed, prior=prior)
    )


def baseline_logits(
    method: Method,
    clients: Sequence[Client],
    recipe: Recipe,
    *,
    classes: int,
    seed: int,
    prior: bool = False,
) -> list[NDArray[np.float32]]:
    """Return each client's logits of its test images, (m, C), as for `run_baseline`."""
    if method == "Solo":
        recipe = replace(recipe, rounds=1, epochs=recipe.rounds * recipe.epochs)
    data = [prepare(client, recipe, classes=classes, prior=prior) for client in clients]
    training = _TRAININGS.get(method, Training)(recipe, classes=classes)
    if method == "centralized":
        models = training.run([_together(data, prior=prior or recipe.calibrated)], seed=seed) * len(data)
    else:
        models = training.run(data, seed=seed)
    made = logits_of(models, clients, data)
    if not prior:
        return made
    return [logits + mine.log_prior.numpy() for logits, mine in zip(made, data, strict=True)]


def traffic_bytes(method: Method, recipe: Recipe, *, feature_size: int, classes: int) -> int:
    """Return the bytes that a client sends, and receives, in a round: all shared values in float16, unframed."""
    width = recipe.adapter_size or feature_size
    sizes = {"adapter": recipe.adapter_size * (feature_size + 1), "classifier": classes * (width + 1)}
    kind = _TRAININGS.get(method, Training)
    prototypes = classes * width if issubclass(kind, FedProto) else 0
    return 2 * (sum(sizes[layer] for layer in kind.shared) + prototypes)


def _together(data: Sequence[Prepared], *, prior: bool) -> Prepared:
    """Pool all clients' images, each standardized by its own client's statistics."""
    labels = torch.cat([mine.labels for mine in data])
    classes = len(data[0].log_prior)
    return replace(
        data[0],
        features=torch.cat([mine.features for mine in data]),
        labels=labels,
        log_prior=prior_of(labels, classes) if prior else torch.zeros(classes),
    )
