"""FedTC on the aggregator: a head from the prototypes of all devices."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.discriminant import discriminant
from aggregator.algorithms.head_layers import Dense, logits_of
from protocol.errors import ProtofleetError

FOLDS = 5
"""Parts of the prototypes in cross-validation; fewer than LEAVE_ONE_OUT prototypes are left out one by one."""

LEAVE_ONE_OUT = 100

MIN_HELD_OUT = 30
"""Held-out prototypes from which a difference of one standard error says something."""

TEMPERATURES = np.geomspace(0.1, 100, 200)

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
        closed_form: use the linear discriminant, unless cross-validation says that the adapter is better.
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
    closed_form: bool

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
            standardize=True,
            closed_form=True,
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainedHead:
    """A head and its training's figures.

    Attributes:
        layers: the head.
        loss: mean cross-entropy on held-out prototypes; NaN if no prototype could be held out.
        accuracy: of the head on the prototypes that it was made from.
        epochs: passes over the prototypes; 0 for the linear discriminant.
        temperature: divisor of the logits that makes the probabilities of held-out prototypes most likely.
        seconds: wall time of the training.
    """

    layers: tuple[Dense, ...]
    loss: float
    accuracy: float
    epochs: int
    temperature: float
    seconds: float


@dataclass(frozen=True)
class _Prototypes:
    """Prototypes (m, L) with their labels (m,), image counts (m,), and the number of classes, C."""

    values: NDArray[np.float32]
    labels: NDArray[np.integer]
    counts: NDArray[np.integer]
    num_classes: int
    restore: bool
    """Restore the variance that averaging removed (`restore_variance`)."""

    def part(self, rows: NDArray[np.bool_]) -> "_Prototypes":
        return replace(self, values=self.values[rows], labels=self.labels[rows], counts=self.counts[rows])

    def centers(self) -> NDArray[np.float32]:
        return _class_means(self.values, self.labels, self.counts, self.num_classes)

    def deviations(self, centers: NDArray[np.float32]) -> NDArray[np.float32]:
        spread = np.sqrt(self.counts).astype(np.float32)[:, None] if self.restore else np.float32(1)
        deviations: NDArray[np.float32] = spread * (self.values - centers[self.labels])
        return deviations

    def features(self, centers: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the features that the prototypes stand for, around centers (C, L)."""
        features: NDArray[np.float32] = centers[self.labels] + self.deviations(centers)
        return features

    def unseen_by(self, training: "_Prototypes") -> NDArray[np.float32]:
        """Return the features that held-out prototypes stand for, around the centers of others.

        Their deviations contain the error of these centers, and are shrunk to the spread of features.
        """
        centers = training.centers()
        others = np.maximum(training.samples(), 1)[self.labels]
        error = 1 + (self.counts if self.restore else 1) / others
        return np.asarray(
            centers[self.labels] + self.deviations(centers) / np.sqrt(error)[:, None], dtype=np.float32
        )

    def samples(self) -> NDArray[np.float64]:
        """Return the number of images, or of prototypes that are not restored, of each class (C,)."""
        weights = self.counts if self.restore else None
        return np.bincount(self.labels, weights, minlength=self.num_classes).astype(np.float64)

    def discriminant(self) -> tuple[Dense, ...]:
        centers = self.centers()
        return (discriminant(centers, self.deviations(centers), self.samples()),)


def train_head(
    prototypes: NDArray[np.float32],
    labels: NDArray[np.integer],
    counts: NDArray[np.integer],
    *,
    num_classes: int,
    recipe: Recipe,
    seed: int,
    device: str,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> TrainedHead:
    """Make a head from the pooled prototypes (FedTC eq. 5).

    By the default recipe it is a linear discriminant, or the paper's adapter and head where cross-validation over
    prototypes finds their loss lower by more than its standard error. Logits are divided by the temperature that makes
    held-out prototypes most likely (Guo et al., "On Calibration of Modern Neural Networks", ICML 2017).

    The same input in the same order and the same seed give the same head on the CPU. A class without
    prototypes is never predicted.

    Args:
        prototypes: (m, L) float32, of all devices.
        labels: (m,), in 0 to num_classes - 1.
        counts: (m,), the images in each prototype.
        num_classes: C, the classes of the task.
        recipe: how to train.
        seed: of the folds, the first weights, the shuffling and the mixing.
        device: where the adapter is trained: a torch device, or "auto" for CUDA if available.
        report: called after each epoch of the adapter with `device`, `epoch` from 1, `epochs` and its mean `loss`.

    Raises:
        ProtofleetError: there are no prototypes, invalid ones, or no CUDA device where one is configured.
    """
    _check_prototypes(prototypes, labels, counts, num_classes)
    started = time.perf_counter()
    data = _Prototypes(prototypes, labels, counts, num_classes, recipe.restore)
    epochs, temperature, loss = 0, 1.0, math.nan

    def adapter(part: _Prototypes) -> tuple[tuple[Dense, ...], int]:
        from aggregator.algorithms.fedtc_adapter import train_adapter

        centers = part.centers()
        return train_adapter(
            centers,
            part.deviations(centers),
            part.labels,
            recipe=recipe,
            seed=seed,
            device=device,
            report=report,
        )

    if recipe.closed_form:
        layers, folds = data.discriminant(), _folds(labels, seed)
        tested = np.flatnonzero(folds >= 0)
        if len(tested):
            logits = _cross_validated(data, folds)
            temperature, losses = _calibrated(logits[tested], labels[tested])
            loss = float(losses.mean())
        first = folds == 0
        if first.sum() >= MIN_HELD_OUT:
            trial, _ = adapter(data.part(~first))
            features = data.part(first).unseen_by(data.part(~first))
            scale, trial_losses = _calibrated(logits_of(trial, features), labels[first])
            gain = _calibrated(logits[first], labels[first])[1] - trial_losses
            if gain.mean() > gain.std(ddof=1) / math.sqrt(len(gain)):
                layers, epochs = adapter(data)
                temperature, loss = scale, float(trial_losses.mean())
    else:
        layers, epochs = adapter(data)
    layers = (*layers[:-1], _cooled(layers[-1], temperature, data))
    logits = logits_of(layers, data.features(data.centers()))
    return TrainedHead(
        layers=layers,
        loss=float(_losses(logits, labels).mean()) if math.isnan(loss) else loss,
        accuracy=float((logits.argmax(axis=1) == labels).mean()),
        epochs=epochs,
        temperature=temperature,
        seconds=time.perf_counter() - started,
    )


def _folds(labels: NDArray[np.integer], seed: int) -> NDArray[np.int64]:
    """Divide each class's prototypes over the folds at random; -1 for the only prototype of a class."""
    folds = np.full(len(labels), -1)
    random = np.random.default_rng(seed)
    number = FOLDS if len(labels) >= LEAVE_ONE_OUT else len(labels)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        if len(members) > 1:
            start = folds.max() + 1 if number > FOLDS else 0
            folds[members] = (start + np.arange(len(members))) % number
    return folds


def _cross_validated(data: _Prototypes, folds: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits (m, C) of the discriminant of the other folds; zeros for prototypes without a fold."""
    logits = np.zeros((len(folds), data.num_classes), dtype=np.float32)
    for fold in range(folds.max() + 1):
        held_out, training = data.part(folds == fold), data.part(folds != fold)
        logits[folds == fold] = logits_of(training.discriminant(), held_out.unseen_by(training))
    return logits


def _calibrated(
    logits: NDArray[np.float32], labels: NDArray[np.integer]
) -> tuple[float, NDArray[np.float32]]:
    """Return the temperature of least mean cross-entropy, and the cross-entropy of each row (n, C) at it.

    As if one more row were incorrect (Platt, "Probabilistic outputs for support vector machines", 1999), so that few
    rows that are all correct do not make every answer certain.
    """
    random = logits.mean(axis=1, where=logits > ABSENT_LOGIT)
    costs = []
    for temperature in TEMPERATURES:
        losses = _losses(logits / temperature, labels)
        incorrect = losses + (logits[np.arange(len(labels)), labels] - random) / temperature
        costs.append(float(losses.sum() + incorrect.mean()))
    best = TEMPERATURES[int(np.argmin(costs))]
    return float(best), _losses(logits / best, labels)


def _losses(logits: NDArray[np.float32], labels: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return the cross-entropy of each row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    of_label = shifted[np.arange(len(labels)), labels]
    losses: NDArray[np.float32] = (np.log(np.exp(shifted).sum(axis=1)) - of_label).astype(np.float32)
    return losses


def _cooled(layer: Dense, temperature: float, data: _Prototypes) -> Dense:
    """Divide the logits of a last layer by the temperature; a class without prototypes keeps its logit."""
    present = np.bincount(data.labels, minlength=data.num_classes) > 0
    bias = np.where(present, layer.bias / temperature, ABSENT_LOGIT)
    return Dense((layer.weight / temperature).astype(np.float32), bias.astype(np.float32))


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
