"""FedTC's adapter and head (Table 5), trained with PyTorch on prototypes."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.adamw import adamw

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.fedtc.arrays import blocks, is_in_file
from aggregator.algorithms.fedtc.head import Dense, compress
from aggregator.algorithms.fedtc.recipe import Recipe
from aggregator.algorithms.fedtc.training_set import TrainingSet
from protocol.errors import ProtofleetError

Report = Callable[[dict[str, Any]], None]


def torch_device(configured: str) -> str:
    """Return the device to train on; `auto` is CUDA if available.

    Raises:
        ProtofleetError: a CUDA device is configured and there is none.
    """
    if configured == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if configured.startswith("cuda") and not torch.cuda.is_available():
        raise ProtofleetError(
            f'training.device is "{configured}", but PyTorch finds no CUDA device: use "auto"'
        )
    return configured


def train_adapter(
    prototypes: TrainingSet,
    *,
    recipe: Recipe,
    seed: int,
    device: str,
    report: Report = lambda _: None,
) -> tuple[tuple[Dense, ...], int]:
    """Train adapter and head with cross-entropy (FedTC eq. 5); returns their layers and the number of epochs.

    The same input in the same order and the same seed give the same layers on the CPU.

    Args:
        prototypes: a class without any is never predicted.
        recipe: how to train.
        seed: of the first weights, the shuffling and the mixing.
        device: a torch device, or "auto" for CUDA if available.
        report: called after each epoch with `device`, `epoch` from 1, `epochs` and its mean `loss`.

    Raises:
        ProtofleetError: a CUDA device is configured and there is none.
    """
    data = _sorted_by_class(prototypes)
    mean, scale = torch.zeros(()), torch.ones(())
    if recipe.standardize:
        mean, scale = _mean_and_scale(data)
        for block in blocks(len(data.labels)):
            data.deviations[block] /= scale
        data = replace(data, centers=(data.centers - mean) / scale)
    head, epochs = _fit(data, recipe=recipe, seed=seed, device=device, report=report)
    _fold(head, mean, scale)
    layers = tuple(Dense(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in head.layers)
    if recipe.compress:
        layers = compress(layers, prototypes.features)
    return layers, epochs


class Head(nn.Module):
    """The paper's adapter and head (Table 5): features (n, L) to logits (n, C)."""

    def __init__(self, *, feature_size: int, num_classes: int) -> None:
        super().__init__()
        sizes = (feature_size, 1024, 512, num_classes)
        self.layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        self.registered = nn.ModuleList(self.layers)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits; rows of zeros stay zero instead of NaN."""
        *adapter, classifier = self.layers
        for layer in adapter:
            features = functional.normalize(functional.relu(layer(features)))
        logits: Tensor = classifier(features)
        return logits


@dataclass(frozen=True)
class SortedPrototypes:
    """Prototypes ordered by class: a class center plus a deviation is a feature to train on.

    Attributes:
        centers: (C, L), one per class; zeros for a class without prototypes.
        deviations: (m, L).
        labels: (m,), ascending.
        first: (C,), where a class begins among the prototypes.
        sizes: (C,), prototypes per class.
        in_file: the deviations are in a file, where they stay: only the features of a step are on the device.
    """

    centers: Tensor
    deviations: Tensor
    labels: Tensor
    first: Tensor
    sizes: Tensor
    in_file: bool = False

    def on(self, device: torch.device) -> "SortedPrototypes":
        if self.in_file:
            return self
        names = ("centers", "deviations", "labels", "first", "sizes")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def _sorted_by_class(prototypes: TrainingSet) -> SortedPrototypes:
    order = np.argsort(prototypes.labels, kind="stable")
    deviations = prototypes.arrays.rows(prototypes.deviations, order)
    sizes = np.bincount(prototypes.labels, minlength=prototypes.num_classes)
    return SortedPrototypes(
        centers=torch.as_tensor(prototypes.centers),
        deviations=torch.as_tensor(deviations),
        labels=torch.as_tensor(prototypes.labels[order].astype(np.int64)),
        first=torch.as_tensor(np.cumsum(sizes) - sizes),
        sizes=torch.as_tensor(sizes),
        in_file=is_in_file(deviations),
    )


def _fit(
    data: SortedPrototypes, *, recipe: Recipe, seed: int, device: str, report: Report
) -> tuple[Head, int]:
    """Train; return the head, on the CPU, and the number of epochs."""
    place = torch.device(torch_device(device))
    data, head = data.on(place), _first_head(data, seed).to(place)
    optimizer, generator = _Optimizer(head, recipe), torch.Generator().manual_seed(seed)
    batches = math.ceil(len(data.labels) / recipe.batch_size)
    epochs = max(recipe.epochs, math.ceil(recipe.min_steps / batches))
    rates = data.sizes.clamp(min=1).log() if recipe.balance else torch.zeros((), device=place)
    for epoch in range(epochs):
        total = torch.zeros((), device=place)
        for batch, draw in enumerate(_draws(data, recipe, generator).split(recipe.batch_size)):
            logits = head(_features(data, draw).to(place))
            batch_loss = functional.cross_entropy(
                logits + rates.to(place), data.labels[draw.members].to(place), reduction="sum"
            )
            torch.autograd.backward(batch_loss / len(draw.members))
            optimizer.step(recipe.learning_rate * recipe.rate_at((epoch + batch / batches) / epochs))
            total += batch_loss.detach()
        loss = total.item() / len(data.labels)
        report({"device": place.type, "epoch": epoch + 1, "epochs": epochs, "loss": loss})
    return head.cpu(), epochs


def _first_head(data: SortedPrototypes, seed: int) -> Head:
    """Initialize a head on the CPU, so that every device starts from the same one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Head(feature_size=data.centers.shape[1], num_classes=len(data.sizes))
    absent = data.sizes == 0
    with torch.no_grad():
        head.layers[-1].weight[absent] = 0.0
        head.layers[-1].bias[absent] = ABSENT_LOGIT
    return head


class _Optimizer:
    """Takes steps.

    An object of `torch.optim.Optimizer` would import PyTorch's compiler, which takes as long as PyTorch.
    """

    def __init__(self, head: Head, recipe: Recipe) -> None:
        self.parameters: list[Tensor] = list(head.parameters())
        self._is_sgd = recipe.optimizer == "sgd"
        self._averages, self._squares = ([torch.zeros_like(each) for each in self.parameters] for _ in "12")
        self._steps = [torch.zeros((), device=each.device) for each in self.parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take a step at a learning rate with the gradients, and delete them."""
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        if self._is_sgd:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=rate)
        else:
            adamw(
                self.parameters,
                gradients,
                self._averages,
                self._squares,
                [],
                self._steps,
                fused=True,
                amsgrad=False,
                lr=rate,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=0.01,
                maximize=False,
            )
        for parameter in self.parameters:
            parameter.grad = None


@dataclass(frozen=True)
class _Draws:
    """Random numbers of an epoch or a step.

    Attributes:
        members: (n,), numbers of prototypes.
        angles: (n, 1), between 0 and 1, to mix with another prototype; None to mix none.
        partners: (n,), large numbers that choose it.
    """

    members: Tensor
    angles: Tensor | None = None
    partners: Tensor | None = None

    def _parts(self) -> list[Tensor]:
        return [each for each in (self.members, self.angles, self.partners) if each is not None]

    def split(self, size: int) -> "Iterator[_Draws]":
        parts = [torch.split(each, size) for each in self._parts()]
        return itertools.starmap(_Draws, zip(*parts, strict=True))


def _draws(data: SortedPrototypes, recipe: Recipe, generator: torch.Generator) -> _Draws:
    """Draw an epoch's random numbers on the CPU, the same for every device, and move them to the data at once."""
    order = torch.randperm(len(data.labels), generator=generator)
    angles, partners = [], []
    for members in torch.split(order, recipe.batch_size) if recipe.mix else ():
        angles.append(torch.rand(len(members), 1, generator=generator))
        partners.append(torch.randint(2**62, (len(members),), generator=generator))
    device = data.labels.device
    if not recipe.mix:
        return _Draws(order.to(device))
    return _Draws(order.to(device), torch.cat(angles).to(device), torch.cat(partners).to(device))


def _features(data: SortedPrototypes, draw: _Draws) -> Tensor:
    """Return a step's features, (b, L).

    Mixed, each deviation d becomes cos(t) d + sin(t) d' with t random. Half of the d' are of a random prototype of the
    same class: another point of the class, with its variance. The others are of any prototype, as in a discriminant,
    whose classes share a covariance: a class of few prototypes has few deviations of its own.
    """
    labels = data.labels[draw.members]
    deviations = data.deviations[draw.members]
    if draw.angles is not None and draw.partners is not None:
        angle = draw.angles * (math.pi / 2)
        number = draw.partners // 2
        of_class = data.first[labels] + number % data.sizes[labels]
        partners = torch.where(draw.partners % 2 == 0, of_class, number % len(data.labels))
        deviations = torch.cos(angle) * deviations + torch.sin(angle) * data.deviations[partners]
    return data.centers[labels] + deviations


def _mean_and_scale(data: SortedPrototypes) -> tuple[Tensor, Tensor]:
    """Return each feature's mean and standard deviation, (L,), over the features to train on.

    No scale is less than a hundredth of the mean scale, so that a feature that hardly varies among the prototypes is
    not amplified on devices.
    """
    rows, size = data.deviations.shape
    mean, squares = torch.zeros(2, size, dtype=torch.float64)
    for block in blocks(rows):
        mean += (data.centers[data.labels[block]] + data.deviations[block]).sum(dim=0, dtype=torch.float64)
    mean /= rows
    for block in blocks(rows):
        features = data.centers[data.labels[block]] + data.deviations[block]
        squares += (features - mean).square().sum(dim=0)
    scale = (squares / rows).sqrt().float()
    floor = scale.mean() / 100
    return mean.float(), scale.clamp_min(floor if floor > 0 else 1.0)


def _fold(head: Head, mean: Tensor, scale: Tensor) -> None:
    """Fold standardization into the first layer: a head trained on (x - mean) / scale then takes x."""
    first = head.layers[0]
    with torch.no_grad():
        first.weight /= scale
        first.bias.sub_((first.weight * mean).sum(dim=1))
