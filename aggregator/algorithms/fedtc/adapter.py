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
from aggregator.algorithms.fedtc.compression import compress
from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.fedtc.recipe import Recipe
from aggregator.algorithms.fedtc.training_set import TrainingSet
from protocol.errors import ProtofleetError


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
class _Tensors:
    """Prototypes ordered by class: a class center plus a deviation is a feature to train on.

    Attributes:
        centers: (C, L), one per class; zeros for a class without prototypes.
        deviations: (m, L).
        labels: (m,), ascending.
        first: (C,), where a class begins among the prototypes.
        sizes: (C,), prototypes per class.
    """

    centers: Tensor
    deviations: Tensor
    labels: Tensor
    first: Tensor
    sizes: Tensor


@dataclass(frozen=True)
class _Draws:
    """Random numbers of an epoch or a step, on the device.

    Attributes:
        members: (n,), numbers of prototypes.
        angles: (n, 1), between 0 and 1, to mix with another prototype; None to mix none.
        partners: (n,), large numbers that choose it.
    """

    members: Tensor
    angles: Tensor | None = None
    partners: Tensor | None = None

    def split(self, size: int) -> "Iterator[_Draws]":
        """Yield the parts of the steps."""
        parts = [
            torch.split(each, size) for each in (self.members, self.angles, self.partners) if each is not None
        ]
        return itertools.starmap(_Draws, zip(*parts, strict=True))


def train_adapter(
    prototypes: TrainingSet,
    *,
    recipe: Recipe,
    seed: int,
    device: str,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
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
    device = torch_device(device)
    generator = torch.Generator().manual_seed(seed)
    data = _tensors(prototypes, device=device)
    head = _first_head(data, seed).to(device)
    mean, scale = _mean_and_scale(data) if recipe.standardize else (0.0, 1.0)
    for block in blocks(len(data.labels)):
        data.deviations[block] /= scale
    data = replace(data, centers=(data.centers - mean) / scale)
    epochs = _fit(head, data, recipe=recipe, generator=generator, report=report)
    _fold(head.cpu(), torch.as_tensor(mean, device="cpu"), torch.as_tensor(scale, device="cpu"))
    layers = tuple(Dense(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in head.layers)
    if recipe.compress:
        layers = compress(layers, prototypes.features)
    return layers, epochs


def _tensors(prototypes: TrainingSet, *, device: str) -> _Tensors:
    """Sort the prototypes by class. Those in a file stay there: then only the features of a step are on the device."""
    order = np.argsort(prototypes.labels, kind="stable")
    deviations = prototypes.arrays.rows(prototypes.deviations, order)
    if is_in_file(deviations):
        device = "cpu"
    sizes = np.bincount(prototypes.labels, minlength=prototypes.num_classes)
    return _Tensors(
        centers=torch.as_tensor(prototypes.centers, device=device),
        deviations=torch.as_tensor(deviations, device=device),
        labels=torch.as_tensor(prototypes.labels[order].astype(np.int64), device=device),
        first=torch.as_tensor(np.cumsum(sizes) - sizes, device=device),
        sizes=torch.as_tensor(sizes, device=device),
    )


def _first_head(data: _Tensors, seed: int) -> Head:
    """Initialize a head on the CPU, so that every device starts from the same one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Head(feature_size=data.centers.shape[1], num_classes=len(data.sizes))
    absent = (data.sizes == 0).cpu()
    with torch.no_grad():
        head.layers[-1].weight[absent] = 0.0
        head.layers[-1].bias[absent] = ABSENT_LOGIT
    return head


def _mean_and_scale(data: _Tensors) -> tuple[Tensor, Tensor]:
    """Return each feature's mean and standard deviation, (L,), over the features to train on.

    No scale is less than a hundredth of the mean scale, so that a feature that hardly varies among the prototypes is
    not amplified on devices.
    """
    rows, size = data.deviations.shape
    mean, squares = torch.zeros(2, size, dtype=torch.float64, device=data.deviations.device)
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


def _fit(
    head: Head,
    data: _Tensors,
    *,
    recipe: Recipe,
    generator: torch.Generator,
    report: Callable[[dict[str, Any]], None],
) -> int:
    """Run the recipe; return the number of epochs."""
    batches = math.ceil(len(data.labels) / recipe.batch_size)
    epochs = max(recipe.epochs, math.ceil(recipe.min_steps / batches))
    step, device = _optimizer(head, recipe), next(head.parameters()).device
    for epoch in range(epochs):
        total = torch.zeros((), device=device)
        draws = _draws(data, recipe, generator).split(recipe.batch_size)
        for batch, draw in enumerate(draws):
            logits = head(_features(data, draw).to(device))
            batch_loss = functional.cross_entropy(logits, data.labels[draw.members].to(device))
            torch.autograd.backward(batch_loss)
            step(recipe.learning_rate * recipe.rate_at((epoch + batch / batches) / epochs))
            total += batch_loss.detach() * len(draw.members)
        loss = total.item() / len(data.labels)
        report({"device": device.type, "epoch": epoch + 1, "epochs": epochs, "loss": loss})
    return epochs


def _optimizer(head: Head, recipe: Recipe) -> Callable[[float], None]:
    """Return a function that takes a step at a learning rate, and deletes the gradients.

    An object of `torch.optim.Optimizer` would import PyTorch's compiler, which takes as long as PyTorch.
    """
    parameters: list[Tensor] = list(head.parameters())
    averages, squares = ([torch.zeros_like(each) for each in parameters] for _ in range(2))
    steps = [torch.zeros((), device=each.device) for each in parameters]

    @torch.no_grad()
    def step(rate: float) -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        if recipe.optimizer == "sgd":
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=rate)
        else:
            adamw(
                parameters,
                gradients,
                averages,
                squares,
                [],
                steps,
                fused=True,
                amsgrad=False,
                lr=rate,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=0.01,
                maximize=False,
            )
        head.zero_grad()

    return step


def _draws(data: _Tensors, recipe: Recipe, generator: torch.Generator) -> _Draws:
    """Draw an epoch's random numbers on the CPU, the same for every device, and move them to the device at once."""
    order = torch.randperm(len(data.labels), generator=generator)
    angles, partners = [], []
    for members in torch.split(order, recipe.batch_size) if recipe.mix else ():
        angles.append(torch.rand(len(members), 1, generator=generator))
        partners.append(torch.randint(2**62, (len(members),), generator=generator))
    device = data.labels.device
    if not recipe.mix:
        return _Draws(order.to(device))
    return _Draws(order.to(device), torch.cat(angles).to(device), torch.cat(partners).to(device))


def _features(data: _Tensors, draw: _Draws) -> Tensor:
    """Return a step's features, (b, L).

    Mixed, each deviation d becomes cos(t) d + sin(t) d', with d' that of a random prototype of the same class and t
    random: another point of the class, with the class's variance.
    """
    labels = data.labels[draw.members]
    deviations = data.deviations[draw.members]
    if draw.angles is not None and draw.partners is not None:
        angle = draw.angles * (math.pi / 2)
        partners = data.first[labels] + draw.partners % data.sizes[labels]
        deviations = torch.cos(angle) * deviations + torch.sin(angle) * data.deviations[partners]
    return data.centers[labels] + deviations
