"""FedAvg of a head on frozen features, and each client alone, in torch."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from aggregator.algorithms.layers import log_prior, statistics
from protofleet.simulation.fleet import Client

LAYERS = ("adapter", "classifier")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters of a training; `epochs` are the passes over the images in a round."""

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
"""The best of a client alone on validation images: for the last layer of a backbone, and for hidden layers."""


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


class Training:
    """Rounds in which clients train, and some layers are averaged by images; none here."""

    shared: tuple[str, ...] = ()
    """Layers that are averaged after every round."""
    phases: tuple[tuple[str, ...], ...] = (LAYERS,)
    """Layers that a round trains one after the other."""

    def __init__(self, recipe: Recipe, *, classes: int) -> None:
        self.recipe = recipe
        self.classes = classes

    def begin(self, model: Model) -> None:
        """Prepare for a client's part of a round."""

    def penalty(self, model: Model, hidden: Tensor, labels: Tensor) -> Tensor | float:  # noqa: ARG002 - of subclasses
        """Return what is added to a batch's cross-entropy."""
        return 0.0

    def end_round(self, models: Sequence[Model], data: Sequence[Prepared]) -> None:
        """Do what follows the averaging."""

    def run(self, data: Sequence[Prepared], *, seed: int) -> list[Model]:
        """Return each client's trained model; all start from the same one, and the same seed gives the same ones."""
        torch.manual_seed(seed)
        sizes = {"feature_size": data[0].features.shape[1], "adapter_size": self.recipe.adapter_size}
        first = Model(classes=self.classes, **sizes)
        models = [copy.deepcopy(first) for _ in data]
        optimizers = [_optimizer(model, self.recipe) for model in models]
        momentum = _ServerMomentum(self.recipe.server_momentum)
        for _ in range(self.recipe.rounds):
            momentum.start(models[0], self.shared)
            for model, mine, optimizer in zip(models, data, optimizers, strict=True):
                if self.shared:
                    optimizer.state.clear()
                for layers in self.phases:
                    model.train_only(layers)
                    self._train_round(model, mine, optimizer)
            _average(models, data, self.shared)
            momentum.apply(models, self.shared)
            self.end_round(models, data)
        return models

    def _train_round(self, model: Model, mine: Prepared, optimizer: torch.optim.Optimizer) -> None:
        """Train on a client's images for the epochs of a round."""
        self.begin(model)
        for _ in range(self.recipe.epochs):
            for rows in torch.split(torch.randperm(len(mine.labels)), self.recipe.batch_size):
                labels = mine.labels[rows]
                hidden, logits = model(mine.features[rows])
                loss = functional.cross_entropy(logits + mine.log_prior, labels)
                loss = loss + self.penalty(model, hidden, labels)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()


class FedAvg(Training):
    """All layers are averaged."""

    shared = LAYERS


def alone_logits(
    clients: Sequence[Client], recipe: Recipe, *, classes: int, seed: int
) -> list[NDArray[np.float32]]:
    """Return each client's logits of its test images, (m, C), of the model that it trains alone."""
    once = replace(recipe, rounds=1, epochs=recipe.rounds * recipe.epochs)
    data = [prepare(client, recipe, classes=classes) for client in clients]
    return logits_of(Training(once, classes=classes).run(data, seed=seed), clients, data)


def average_accuracies(
    clients: Sequence[Client], recipe: Recipe, *, classes: int, seed: int
) -> NDArray[np.float64]:
    """Return each client's accuracy with the averaged model, (K,)."""
    data = [prepare(client, recipe, classes=classes) for client in clients]
    models = FedAvg(recipe, classes=classes).run(data, seed=seed)
    return accuracies_of(clients, logits_of(models, clients, data))


def logits_of(
    models: Sequence[Model], clients: Sequence[Client], data: Sequence[Prepared]
) -> list[NDArray[np.float32]]:
    """Return the logits of each client's test images, (m, C), without the prior."""
    made = []
    for model, client, mine in zip(models, clients, data, strict=True):
        with torch.inference_mode():
            _, logits = model((torch.from_numpy(client.test) - mine.mean) / mine.std)
        made.append(logits.numpy())
    return made


def accuracies_of(clients: Sequence[Client], logits: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return each client's accuracy, (K,)."""
    return np.array(
        [client.accuracy(mine.argmax(axis=1)) for client, mine in zip(clients, logits, strict=True)]
    )


def linear_bytes(*, feature_size: int, classes: int) -> int:
    """Return the bytes of a linear head in float16, unframed, which a client sends in a round."""
    return 2 * classes * (feature_size + 1)


def prepare(client: Client, recipe: Recipe, *, classes: int, prior: bool = False) -> Prepared:
    """Return a client's images as tensors, with the prior of its own images if that or the recipe asks for it."""
    features, labels = torch.from_numpy(client.train), torch.from_numpy(client.train_labels)
    mean, std = statistics(features, standardize=recipe.standardize)
    return Prepared(
        features=(features - mean) / std,
        labels=labels,
        mean=mean,
        std=std,
        log_prior=prior_of(labels, classes) if prior or recipe.calibrated else torch.zeros(classes),
    )


def prior_of(labels: Tensor, classes: int) -> Tensor:
    """Return the logarithm of each class's share of the labels, (C,)."""
    return log_prior(torch.bincount(labels, minlength=classes).float())


def _optimizer(model: Model, recipe: Recipe) -> torch.optim.Optimizer:
    rate, decay = recipe.learning_rate, recipe.weight_decay
    if recipe.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay, fused=True)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay, fused=True)


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
