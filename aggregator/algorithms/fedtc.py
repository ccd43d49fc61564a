"""FedTC on the aggregator: trains a head on the prototypes of all devices."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from protocol.errors import ProtofleetError

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
        restore: restore the variance that averaging removed (`restore_variance`).
        mix: train each step on random mixtures of two restored deviations of a class.
        standardize: train on features of mean 0 and deviation 1, folded into the first layer afterwards, so that
            one rate suits the feature scales of all backbones.
    """

    epochs: int
    min_steps: int
    batch_size: int
    optimizer: Literal["sgd", "adamw"]
    learning_rate: float
    one_cycle: bool
    restore: bool
    mix: bool
    standardize: bool

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
            standardize=False,
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
            standardize=True,
        ),
    }
)


class Head(nn.Module):
    """The paper's adapter and head (Table 5): features (n, L) to logits (n, C)."""

    def __init__(self, *, feature_size: int, num_classes: int, hidden: Sequence[int] = (1024, 512)) -> None:
        super().__init__()
        sizes = (feature_size, *hidden, num_classes)
        self.layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        self.registered = nn.ModuleList(self.layers)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits; rows of zeros stay zero instead of NaN."""
        *adapter, classifier = self.layers
        for layer in adapter:
            features = functional.normalize(functional.relu(layer(features)))
        logits: Tensor = classifier(features)
        return logits


@dataclass(frozen=True, kw_only=True)
class TrainedHead:
    """A head and its training's figures.

    Attributes:
        module: the head, on the CPU, in evaluation mode.
        loss: mean cross-entropy over the last epoch.
        accuracy: of the head on the prototypes as trained on.
        epochs: passes over the prototypes.
        seconds: wall time of the training.
    """

    module: Head
    loss: float
    accuracy: float
    epochs: int
    seconds: float


@dataclass(frozen=True)
class _TrainingSet:
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


def restore_variance(
    prototypes: NDArray[np.float32], labels: NDArray[np.integer], counts: NDArray[np.integer]
) -> NDArray[np.float32]:
    """Spread prototypes around their class mean as widely as the features that they average.

    The mean of n features has an n-th of their variance, so the features on a device are spread sqrt(n) times as
    widely as the prototypes. P_j -> mu_v + sqrt(n_j) (P_j - mu_v) compensates that; mu_v is the count-weighted mean of
    the class. Not in the paper.

    Laws: class means stay where counts are equal; prototypes of one image each are unchanged.

    Args:
        prototypes: (m, L) float32.
        labels: (m,), the class of each prototype.
        counts: (m,), the images in each prototype.

    Returns:
        (m, L) float32.
    """
    centers = _class_means(prototypes, labels, counts, int(labels.max()) + 1)[labels]
    spread = np.sqrt(counts).astype(np.float32)[:, None]
    restored: NDArray[np.float32] = centers + spread * (prototypes - centers)
    return restored


def train_head(
    prototypes: NDArray[np.float32],
    labels: NDArray[np.integer],
    counts: NDArray[np.integer],
    *,
    num_classes: int,
    recipe: Recipe,
    seed: int,
    device: str,
    on_epoch: Callable[[int, int, float], None] | None = None,
) -> TrainedHead:
    """Train adapter and head on the pooled prototypes with cross-entropy (FedTC eq. 5).

    The same input in the same order and the same seed give the same head on the CPU. A class without
    prototypes is never predicted.

    Args:
        prototypes: (m, L) float32, of all devices.
        labels: (m,), in 0 to num_classes - 1.
        counts: (m,), the images in each prototype.
        num_classes: C, the classes of the task.
        recipe: how to train.
        seed: of the first weights, the shuffling and the mixing.
        device: a torch device, such as "cpu" or "cuda".
        on_epoch: called after each epoch with its number from 1, the number of epochs and its mean loss.

    Raises:
        ProtofleetError: there are no prototypes, or invalid ones.
    """
    _check_prototypes(prototypes, labels, counts, num_classes)
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    data = _training_set(
        prototypes, labels, counts, num_classes=num_classes, restore=recipe.restore, device=device
    )
    head = _first_head(data, seed).to(device)
    mean, scale = _mean_and_scale(data) if recipe.standardize else (0.0, 1.0)
    data = replace(data, centers=(data.centers - mean) / scale, deviations=data.deviations / scale)
    epochs, loss = _fit(head, data, recipe=recipe, generator=generator, on_epoch=on_epoch)
    accuracy = _accuracy(head, data)
    _fold(head, mean, scale)
    return TrainedHead(
        module=head.cpu().eval(),
        loss=loss,
        accuracy=accuracy,
        epochs=epochs,
        seconds=time.perf_counter() - started,
    )


def _check_prototypes(
    prototypes: NDArray[np.float32],
    labels: NDArray[np.integer],
    counts: NDArray[np.integer],
    num_classes: int,
) -> None:
    if prototypes.ndim != 2 or not len(prototypes) == len(labels) == len(counts) > 0:
        raise ProtofleetError(
            "training takes at least one prototype, each with a label and a count, not arrays of "
            f"{prototypes.shape}, {labels.shape} and {counts.shape}"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ProtofleetError(
            f"labels must lie in 0 to {num_classes - 1}, not in {labels.min()} to {labels.max()}"
        )
    if counts.min() < 1:
        raise ProtofleetError("every prototype must average at least one image")
    if not np.isfinite(prototypes).all():
        raise ProtofleetError("prototypes must be finite; refuse their submission")


def _class_means(
    prototypes: NDArray[np.float32],
    labels: NDArray[np.integer],
    counts: NDArray[np.integer],
    num_classes: int,
) -> NDArray[np.float32]:
    """Return the count-weighted mean of each class, (C, L); zeros for a class without prototypes."""
    means = np.zeros((num_classes, prototypes.shape[1]), dtype=np.float32)
    for label in np.unique(labels):
        members = labels == label
        means[label] = np.average(prototypes[members], axis=0, weights=counts[members])
    return means


def _training_set(
    prototypes: NDArray[np.float32],
    labels: NDArray[np.integer],
    counts: NDArray[np.integer],
    *,
    num_classes: int,
    restore: bool,
    device: str,
) -> _TrainingSet:
    order = np.argsort(labels, kind="stable")
    labels, prototypes = labels[order], prototypes[order]
    features = restore_variance(prototypes, labels, counts[order]) if restore else prototypes
    centers = _class_means(prototypes, labels, counts[order], num_classes)
    sizes = np.bincount(labels, minlength=num_classes)
    return _TrainingSet(
        centers=torch.as_tensor(centers, device=device),
        deviations=torch.as_tensor(features - centers[labels], device=device),
        labels=torch.as_tensor(labels.astype(np.int64), device=device),
        first=torch.as_tensor(np.cumsum(sizes) - sizes, device=device),
        sizes=torch.as_tensor(sizes, device=device),
    )


def _first_head(data: _TrainingSet, seed: int) -> Head:
    """Initialize a head on the CPU, so that every device starts from the same one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Head(feature_size=data.centers.shape[1], num_classes=len(data.sizes))
    absent = (data.sizes == 0).cpu()
    with torch.no_grad():
        head.layers[-1].weight[absent] = 0.0
        head.layers[-1].bias[absent] = ABSENT_LOGIT
    return head


def _mean_and_scale(data: _TrainingSet) -> tuple[Tensor, Tensor]:
    """Return each feature's mean and standard deviation, (L,), over the features to train on.

    No scale is less than a hundredth of the mean scale, so that a feature that hardly varies among the prototypes is
    not amplified on devices.
    """
    features = data.centers[data.labels] + data.deviations
    scale = features.std(dim=0, correction=0)
    floor = scale.mean() / 100
    return features.mean(dim=0), scale.clamp_min(floor if floor > 0 else 1.0)


def _fold(head: Head, mean: Tensor | float, scale: Tensor | float) -> None:
    """Fold standardization into the first layer: a head trained on (x - mean) / scale then takes x."""
    first = head.layers[0]
    with torch.no_grad():
        first.weight /= scale
        first.bias.sub_((first.weight * mean).sum(dim=1))


def _fit(
    head: Head,
    data: _TrainingSet,
    *,
    recipe: Recipe,
    generator: torch.Generator,
    on_epoch: Callable[[int, int, float], None] | None,
) -> tuple[int, float]:
    """Run the recipe; return the number of epochs and the mean loss of the last one."""
    batches = math.ceil(len(data.labels) / recipe.batch_size)
    epochs = max(recipe.epochs, math.ceil(recipe.min_steps / batches))
    optimizer = _optimizer(head, recipe)
    loss = math.nan
    for epoch in range(epochs):
        total = torch.zeros((), device=data.labels.device)
        order = torch.randperm(len(data.labels), generator=generator)
        for step, members in enumerate(torch.split(order, recipe.batch_size)):
            progress = (epoch + step / batches) / epochs
            optimizer.param_groups[0]["lr"] = recipe.learning_rate * recipe.rate_at(progress)
            logits = head(_features(data, members, generator=generator, mix=recipe.mix))
            batch_loss = functional.cross_entropy(logits, data.labels[members])
            optimizer.zero_grad()
            torch.autograd.backward(batch_loss)
            optimizer.step()
            total += batch_loss.detach() * len(members)
        loss = total.item() / len(order)
        if on_epoch:
            on_epoch(epoch + 1, epochs, loss)
    return epochs, loss


def _optimizer(head: Head, recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(head.parameters(), lr=recipe.learning_rate)
    return torch.optim.AdamW(head.parameters(), lr=recipe.learning_rate, fused=True)


def _features(data: _TrainingSet, members: Tensor, *, generator: torch.Generator, mix: bool) -> Tensor:
    """Return a step's features, (b, L).

    Mixed, each deviation d becomes cos(t) d + sin(t) d', with d' that of a random prototype of the same class and t
    random: another point of the class, with the class's variance.
    """
    labels = data.labels[members]
    deviations = data.deviations[members]
    if mix:
        angle = torch.rand(len(members), 1, generator=generator).to(labels.device) * (math.pi / 2)
        draw = torch.randint(2**62, (len(members),), generator=generator).to(labels.device)
        partners = data.first[labels] + draw % data.sizes[labels]
        deviations = torch.cos(angle) * deviations + torch.sin(angle) * data.deviations[partners]
    return data.centers[labels] + deviations


def _accuracy(head: Head, data: _TrainingSet) -> float:
    """Return the head's accuracy on the prototypes."""
    with torch.inference_mode():
        predicted = head(data.centers[data.labels] + data.deviations).argmax(dim=1)
    return float((predicted == data.labels).float().mean())
