"""FedTC's adapter and head (Table 5), trained with PyTorch on prototypes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from aggregator.algorithms.fedtc.adapter_steps import AdapterTraining, Head, SortedPrototypes
from aggregator.algorithms.fedtc.arrays import blocks, is_in_file
from aggregator.algorithms.fedtc.compression import compress
from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.fedtc.recipe import Recipe
from aggregator.algorithms.fedtc.training_set import TrainingSet

Report = Callable[[dict[str, Any]], None]


class Fit(Protocol):
    """Runs a training to its end; returns the head, on the CPU, and the number of epochs."""

    def __call__(
        self, data: SortedPrototypes, *, recipe: Recipe, seed: int, device: str, report: Report
    ) -> tuple[Head, int]:
        """Train on CPU tensors, and report each epoch's `device`, `epoch` from 1, `epochs` and mean `loss`.

        Raises:
            ProtofleetError: a CUDA device is configured and there is none.
        """


def fit_here(
    data: SortedPrototypes, *, recipe: Recipe, seed: int, device: str, report: Report
) -> tuple[Head, int]:
    """Train in this process."""
    training = AdapterTraining(data, recipe=recipe, seed=seed, device=device)
    while training.done < training.epochs:
        report(training.epoch())
    return training.head.cpu(), training.epochs


def train_adapter(
    prototypes: TrainingSet,
    *,
    recipe: Recipe,
    seed: int,
    device: str,
    fit: Fit | None = None,
    report: Report = lambda _: None,
) -> tuple[tuple[Dense, ...], int]:
    """Train adapter and head with cross-entropy (FedTC eq. 5); returns their layers and the number of epochs.

    The same input in the same order and the same seed give the same layers on the CPU.

    Args:
        prototypes: a class without any is never predicted.
        recipe: how to train.
        seed: of the first weights, the shuffling and the mixing.
        device: a torch device, or "auto" for CUDA if available.
        fit: runs the training; in this process if it is None.
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
    head, epochs = (fit or fit_here)(data, recipe=recipe, seed=seed, device=device, report=report)
    _fold(head, mean, scale)
    layers = tuple(Dense(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in head.layers)
    if recipe.compress:
        layers = compress(layers, prototypes.features)
    return layers, epochs


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
