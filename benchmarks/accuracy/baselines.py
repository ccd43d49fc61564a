"""Baselines in torch: the same features and images, trained with and without sharing."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from aggregator.algorithms.layers import log_prior, statistics
from protofleet.simulation.fleet import Client

Method: TypeAlias = Literal[
    "Solo", "FedAvg-v", "FedProx", "FedRep", "FedProto", "FedProto averaged", "centralized"
]
"""Solo: every client alone. FedAvg-v: models averaged by images, the backbone frozen (FedTC section 3.2). FedProx:
the same, with a penalty for leaving the round's model. FedRep: a shared adapter, a classifier per client. FedProto: a
model per client, its class means drawn to the global ones; averaged: with the models averaged as well. centralized:
all features in one place, the upper bound."""

METHODS: tuple[Method, ...] = get_args(Method)
_SHARED: dict[Method, tuple[str, ...]] = {
    "FedAvg-v": ("adapter", "classifier"),
    "FedProx": ("adapter", "classifier"),
    "FedRep": ("adapter",),
    "FedProto averaged": ("adapter", "classifier"),
}
"""Layers that are averaged after every round."""

LAYERS = ("adapter", "classifier")
_PHASES: dict[Method, tuple[tuple[str, ...], ...]] = {"FedRep": (("classifier",), ("adapter",))}
"""Layers that a round trains one after the other; all at once for methods not listed."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters of a method; `epochs` are the passes over the images in a round."""

    rounds: int
    epochs: int
    batch_size: int
    optimizer: Literal["adam", "sgd"]
    """SGD has momentum 0.9."""
    learning_rate: float
    weight_decay: float
    standardize: bool
    """Train on features of mean 0 and deviation 1 on the client's own images."""
    adapter_size: int
    """Width of a layer with ReLU before the classifier; 0 for none."""
    proximal: float = 0.1
    """FedProx's mu."""
    pull: float = 1.0
    """FedProto's lambda."""
    calibrated: bool = False
    """Train with the prior of the client's images and predict without it (FedLC; Zhang et al. 2022)."""
    server_momentum: float = 0.0
    """Of the averaged layers' change from round to round (FedAvgM; Hsu, Qi, Brown 2019)."""


ADAM = Recipe(
    rounds=40,
    epochs=1,
    batch_size=32,
    optimizer="adam",
    learning_rate=1e-3,
    weight_decay=1e-4,
    standardize=True,
    adapter_size=256,
)
ALONE = replace(ADAM, standardize=False)
ALONE_DEEPER = replace(ADAM, learning_rate=3e-3, weight_decay=1e-3)
"""The best of `Solo` on validation images: for the last layer of a backbone, and for hidden layers."""


class Model(nn.Module):
    """Adapter and classifier; without an adapter, features go into the classifier."""

    def __init__(self, *, feature_size: int, adapter_size: int, classes: int) -> None:
        super().__init__()
        self.adapter = nn.Linear(feature_size, adapter_size) if adapter_size else nn.Identity()
        self.classifier = nn.Linear(adapter_size or feature_size, classes)

    def hidden(self, features: Tensor) -> Tensor:
        """Return the classifier's inputs."""
        adapted: Tensor = self.adapter(features)
        return adapted.relu() if isinstance(self.adapter, nn.Linear) else adapted

    def train_only(self, layers: Sequence[str]) -> None:
        """Freeze the other layers."""
        for name in LAYERS:
            for parameter in getattr(self, name).parameters():
                parameter.requires_grad_(name in layers)
                parameter.grad = None

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the classifier's inputs and the logits."""
        hidden = self.hidden(features)
        return hidden, self.classifier(hidden)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A client's images as tensors, and the statistics that its features were standardized with."""

    features: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor
    log_prior: Tensor
    """Added to all logits, in training and evaluation, (C,); zeros without a prior."""


@dataclass(frozen=True)
class Pull:
    """FedProto's global prototypes, (C, D), and 1 for each class that a client has, (C,)."""

    prototypes: Tensor
    present: Tensor


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
    logits = baseline_logits(method, clients, recipe, classes=classes, seed=seed, prior=prior)
    predicted = (mine.argmax(axis=1) for mine in logits)
    return np.array([client.accuracy(mine) for client, mine in zip(clients, predicted, strict=True)])


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
    trained_prior = prior or recipe.calibrated
    data = [
        _prepare(client, standardize=recipe.standardize, classes=classes, prior=trained_prior)
        for client in clients
    ]
    if method == "centralized":
        models = train(
            method, [_together(data, prior=trained_prior)], recipe, classes=classes, seed=seed
        ) * len(data)
    else:
        models = train(method, data, recipe, classes=classes, seed=seed)
    made = []
    for model, client, mine in zip(models, clients, data, strict=True):
        with torch.inference_mode():
            _, logits = model((torch.from_numpy(client.test) - mine.mean) / mine.std)
        made.append((logits + mine.log_prior if prior else logits).numpy())
    return made


def traffic_bytes(method: Method, recipe: Recipe, *, feature_size: int, classes: int) -> int:
    """Return the bytes that a client sends, and receives, in a round: all shared values in float16, unframed."""
    adapter = recipe.adapter_size * (feature_size + 1)
    width = recipe.adapter_size or feature_size
    sizes = {"adapter": adapter, "classifier": classes * (width + 1)}
    prototypes = classes * width if method in ("FedProto", "FedProto averaged") else 0
    return 2 * (sum(sizes[layer] for layer in _SHARED.get(method, ())) + prototypes)


def train(
    method: Method, data: Sequence[Prepared], recipe: Recipe, *, classes: int, seed: int
) -> list[Model]:
    """Return each client's trained model; all start from the same one."""
    torch.manual_seed(seed)
    sizes = {"feature_size": data[0].features.shape[1], "adapter_size": recipe.adapter_size}
    first = Model(classes=classes, **sizes)
    models = [copy.deepcopy(first) for _ in data]
    optimizers = [_optimizer(model, recipe) for model in models]
    shared, pull = _SHARED.get(method, ()), None
    momentum = _ServerMomentum(recipe.server_momentum)
    for _ in range(recipe.rounds):
        momentum.start(models[0], shared)
        for model, mine, optimizer in zip(models, data, optimizers, strict=True):
            if shared:
                optimizer.state.clear()
            proximal = recipe.proximal if method == "FedProx" else 0.0
            for layers in _PHASES.get(method, (LAYERS,)):
                model.train_only(layers)
                _train_round(model, mine, recipe, optimizer, proximal=proximal, pull=pull)
        _average(models, data, shared)
        momentum.apply(models, shared)
        if method in ("FedProto", "FedProto averaged"):
            pull = _pool(models, data, classes)
    return models


def _prepare(client: Client, *, standardize: bool, classes: int, prior: bool) -> Prepared:
    features, labels = torch.from_numpy(client.train), torch.from_numpy(client.train_labels)
    mean, std = statistics(features, standardize=standardize)
    return Prepared(
        features=(features - mean) / std,
        labels=labels,
        mean=mean,
        std=std,
        log_prior=_log_prior(labels, classes, prior=prior),
    )


def _log_prior(labels: Tensor, classes: int, *, prior: bool) -> Tensor:
    return log_prior(torch.bincount(labels, minlength=classes).float()) if prior else torch.zeros(classes)


def _together(data: Sequence[Prepared], *, prior: bool) -> Prepared:
    """Pool all clients' images, each standardized by its own client's statistics."""
    labels = torch.cat([mine.labels for mine in data])
    return replace(
        data[0],
        features=torch.cat([mine.features for mine in data]),
        labels=labels,
        log_prior=_log_prior(labels, len(data[0].log_prior), prior=prior),
    )


def _optimizer(model: Model, recipe: Recipe) -> torch.optim.Optimizer:
    rate, decay = recipe.learning_rate, recipe.weight_decay
    if recipe.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay, fused=True)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay, fused=True)


def _train_round(
    model: Model,
    mine: Prepared,
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    *,
    proximal: float,
    pull: Pull | None,
) -> None:
    """Train on a client's images for the epochs of a round."""
    start = [parameter.detach().clone() for parameter in model.parameters()] if proximal else []
    for _ in range(recipe.epochs):
        for rows in torch.split(torch.randperm(len(mine.labels)), recipe.batch_size):
            labels = mine.labels[rows]
            hidden, logits = model(mine.features[rows])
            loss = functional.cross_entropy(logits + mine.log_prior, labels)
            if pull is not None:
                distances = (hidden - pull.prototypes[labels]).square().mean(dim=1)
                loss = loss + recipe.pull * (distances * pull.present[labels]).mean()
            for parameter, before in zip(model.parameters(), start, strict=bool(start)):
                loss = loss + proximal / 2 * (parameter - before).square().sum()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()


@torch.no_grad()
def _average(models: Sequence[Model], data: Sequence[Prepared], layers: Sequence[str]) -> None:
    """Replace these layers of all clients by their mean, weighted by images."""
    weights = torch.tensor([float(len(mine.labels)) for mine in data])
    weights /= weights.sum()
    for layer in layers:
        for same in zip(*(getattr(model, layer).parameters() for model in models), strict=True):
            mean = sum(weight * parameter for weight, parameter in zip(weights, same, strict=True))
            for parameter in same:
                parameter.copy_(mean)


class _ServerMomentum:
    """Keeps the averaged layers moving in the direction of earlier rounds."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._before: list[Tensor] = []
        self._velocity: list[Tensor] = []

    def start(self, model: Model, layers: Sequence[str]) -> None:
        """Remember the layers that a round starts from."""
        if self._factor:
            self._before = [parameter.detach().clone() for parameter in _parameters(model, layers)]

    @torch.no_grad()
    def apply(self, models: Sequence[Model], layers: Sequence[str]) -> None:
        """Add the momentum to the averaged layers of all models."""
        if not self._factor:
            return
        changes = [
            after - before for after, before in zip(_parameters(models[0], layers), self._before, strict=True)
        ]
        velocity = self._velocity or [torch.zeros_like(change) for change in changes]
        self._velocity = [self._factor * old + change for old, change in zip(velocity, changes, strict=True)]
        for model in models:
            for parameter, before, step in zip(
                _parameters(model, layers), self._before, self._velocity, strict=True
            ):
                parameter.copy_(before + step)


def _parameters(model: Model, layers: Sequence[str]) -> list[nn.Parameter]:
    return [parameter for layer in layers for parameter in getattr(model, layer).parameters()]


@torch.no_grad()
def _pool(models: Sequence[Model], data: Sequence[Prepared], classes: int) -> Pull:
    """Average all clients' class means, weighted by images."""
    sums, counts = torch.zeros(classes, models[0].classifier.in_features), torch.zeros(classes)
    for model, mine in zip(models, data, strict=True):
        sums.index_add_(0, mine.labels, model.hidden(mine.features))
        counts += torch.bincount(mine.labels, minlength=classes)
    return Pull(sums / counts.clamp_min(1)[:, None], (counts > 0).float())
