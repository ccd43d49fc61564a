"""FedTC (eq. 5): train a head from the prototypes of all devices."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT, OneShot, Training
from aggregator.algorithms.fedtc.block_head import block_head, sums_of
from aggregator.algorithms.fedtc.discriminant import discriminants
from aggregator.algorithms.fedtc.head import Dense, calibrate, cross_entropy, logits_of
from aggregator.algorithms.fedtc.recipe import Recipe, recipe_of
from aggregator.algorithms.fedtc.training_set import TrainingSet, even_rows

FOLDS = 5
"""Parts of the prototypes in cross-validation; of fewer than LEAVE_PAIRS_OUT, two of a class are left out at a time."""

LEAVE_PAIRS_OUT = 100

SHARES = (1.0, 0.5, 0.25, 0.1)
"""Shares of the shrunk covariance that cross-validation chooses from."""

REGRESSION_SHARES = SHARES[:3]
"""Shares of the regressions: with a tenth, regressions lost accuracy where their loss was not much higher."""

FEATURES_PER_PROTOTYPE = 4
"""Values of a prototype, relative to the number of prototypes, from which regressions are candidates."""

MIN_PROTOTYPES, MIN_PER_CLASS = 100, 10
"""Prototypes, and prototypes of a class on average, from which the adapter is a candidate."""

ALWAYS_ADAPTER = 100
"""Prototypes of a class on average from which the adapter is the head (ADR 0076)."""


@dataclass(frozen=True, kw_only=True)
class TrainedHead:
    """A head and its training's figures.

    Attributes:
        layers: the head.
        loss: mean cross-entropy on held-out prototypes; on all if none could be held out.
        accuracy: of the head on the prototypes that it was made from.
        epochs: passes over the prototypes; 0 for a head in closed form.
        temperature: divisor of the logits that makes the probabilities of held-out prototypes most likely.
        adapter_missing: an adapter would have been trained, but PyTorch is not installed.
    """

    layers: tuple[Dense, ...]
    loss: float
    accuracy: float
    epochs: int
    temperature: float
    adapter_missing: bool = False


@dataclass(frozen=True)
class _Candidate:
    """A head before its logits are divided by the temperature."""

    layers: tuple[Dense, ...]
    epochs: int = 0
    temperature: float = 1.0
    loss: float = math.nan
    """The loss on held-out prototypes; NaN if there are none."""
    adapter_missing: bool = False


class FedTC(OneShot, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """FedTC: a linear head, or of batches alone the paper's adapter and head, by cross-validation over prototypes."""

    name: ClassVar[str] = "fedtc"
    unused = OneShot.unused - {("client", "prototypes")}
    blocks: ClassVar[bool] = True

    def train(
        self,
        data: TrainingSet,
        training: Training,
        *,
        report: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> TrainedHead:
        return train_head(
            data, recipe_of(training), seed=training.seed, device=training.device, report=report
        )


def train_head(
    data: TrainingSet,
    recipe: Recipe,
    *,
    seed: int,
    device: str,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> TrainedHead:
    """Make a head from the pooled prototypes (FedTC eq. 5).

    Where a device has principal prototypes, the head is that of `block_head`.

    By the default recipe, cross-validation over prototypes chooses between linear discriminants and ridge regressions,
    regularized more or less. With more prototypes the paper's adapter is a candidate, too; with many it is the head.
    Where nothing can be held out, the head is the nearest class mean. Logits are divided by the temperature that makes
    held-out prototypes most likely.

    The same input in the same order and the same seed give the same head on the CPU. A class without
    prototypes is never predicted.

    Args:
        data: of all devices. The values of several backbones are brought to one scale for the training.
        recipe: how to train.
        seed: of the folds, the first weights, the shuffling and the mixing.
        device: where the adapter is trained: a torch device, or "auto" for CUDA if available.
        report: called after each epoch of the adapter with `device`, `epoch` from 1, `epochs` and its mean `loss`.

    Raises:
        ProtofleetError: there is no CUDA device where one is configured.
    """

    def adapter(part: TrainingSet) -> tuple[tuple[Dense, ...], int]:
        from aggregator.algorithms.fedtc.adapter import train_adapter

        even = part.evenly_weighted()
        return train_adapter(even, recipe=recipe, seed=seed, device=device, report=report)

    data = replace(data, restore=recipe.restore)
    if several := len(data.widths) > 1:
        factors = data.factors()
        data = data.times(factors)
    if data.scatter is not None:
        layer, temperature = block_head(sums_of(data, data.scatter), data.common_classes)
        chosen = _Candidate((layer,), temperature=temperature)
    elif recipe.closed_form:
        # Features that were not averaged judge an adapter correctly, and a task's own epochs may be too few.
        by_size = recipe.restore and recipe.min_steps > 0
        chosen = _choose(data, adapter if recipe.adapter else None, seed, by_size=by_size)
    else:
        chosen = _Candidate(*adapter(data))
    layers = _divided(chosen, data.samples > 0)
    logits = logits_of(layers, data.features if data.scatter is None else data.values)
    return TrainedHead(
        layers=(layers[0].after(factors), *layers[1:]) if several else layers,
        loss=float(cross_entropy(logits, data.labels).mean()) if math.isnan(chosen.loss) else chosen.loss,
        accuracy=float((logits.argmax(axis=1) == data.labels).mean()),
        epochs=chosen.epochs,
        temperature=chosen.temperature,
        adapter_missing=chosen.adapter_missing,
    )


def _choose(
    data: TrainingSet,
    adapter: Callable[[TrainingSet], tuple[tuple[Dense, ...], int]] | None,
    seed: int,
    *,
    by_size: bool,
) -> _Candidate:
    """Return the head in closed form, or the adapter, if any, where there are enough prototypes.

    The adapter is trained without a fifth of the prototypes first: its temperature is that of this fifth. It is the
    head if its loss on this fifth is lower than that of the head in closed form, and with `by_size` always from
    ALWAYS_ADAPTER prototypes of a class on.
    """
    folds = _folds(data.labels, seed)
    closed, logits = _closed_form(data, folds)
    first = (folds == 0) & data.common_rows
    per_class = len(folds) / np.count_nonzero(data.samples)
    if len(folds) < MIN_PROTOTYPES or per_class < MIN_PER_CLASS or adapter is None or not first.any():
        return closed
    rows = _even(data, first)
    try:
        trial, _ = adapter(data.part(~first))
        of_trial = np.zeros_like(logits)
        of_trial[first] = logits_of(trial, data.part(first).extrapolated())
        (_, least), (temperature, losses) = (
            calibrate(each[rows], data.labels[rows], common=data.common_classes)
            for each in (logits, of_trial)
        )
        if (by_size and per_class >= ALWAYS_ADAPTER) or losses.mean() < least.mean():
            return _Candidate(*adapter(data), temperature=temperature, loss=float(losses.mean()))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return replace(closed, adapter_missing=True)
    return closed


def _closed_form(data: TrainingSet, folds: NDArray[np.int64]) -> tuple[_Candidate, NDArray[np.float32]]:
    """Return the best head in closed form, and the logits (m, C) of the prototypes by heads of the other folds.

    Two classes have the same regression as discriminant, and regressions do not limit classes that are not common.
    Where values are few, the discriminant's covariance is known well.
    """
    tested = (folds >= 0) & data.common_rows
    if not tested.any():
        nearest_mean = tuple(_discriminants(data, (0.0,)))
        own = logits_of(nearest_mean, data.values)
        return _Candidate(nearest_mean, temperature=calibrate(own, data.labels)[0]), own
    are_few = FEATURES_PER_PROTOTYPE * len(data.labels) <= data.values.shape[1]
    regressions = bool(are_few and data.common_rows.all() and np.count_nonzero(data.samples) > 2)
    logits = _cross_validated(data, folds, regressions=regressions)
    rows, common = _even(data, tested), data.common_classes
    calibrated = [calibrate(each[rows], data.labels[rows], common=common) for each in logits]
    best = int(np.argmin([losses.mean() for _, losses in calibrated[: len(SHARES)]]))
    chosen = best
    if regressions and len(rows) > 1:
        correct = (logits[:, rows].argmax(axis=2) == data.labels[rows]).sum(axis=1)
        chosen = _preferred([losses for _, losses in calibrated], correct, best)
    temperature, losses = calibrated[chosen]
    kind, share = divmod(chosen, len(SHARES))
    *_, layer = _discriminants(data, (SHARES[share],), regressions=kind > 0)
    return _Candidate((layer,), temperature=temperature, loss=float(losses.mean())), logits[chosen]


def _preferred(losses: Sequence[NDArray[np.float32]], correct: NDArray[np.integer], best: int) -> int:
    """Return the first regression whose loss is within one standard error of the least, else `best`, a discriminant.

    The rule is that of Breiman et al., "Classification and regression trees" (1984). A regression must also be correct
    for as many held-out prototypes: it never predicts a class whose mean lies between the means of two others.

    Args:
        losses: of each head, on held-out prototypes (n,).
        correct: (heads,), how many of these each predicts correctly.
        best: the discriminant of least loss.
    """
    numbers = range(len(SHARES), len(SHARES) + len(REGRESSION_SHARES))
    least = losses[min((best, *numbers), key=lambda number: losses[number].mean())]
    fit = (number for number in numbers if not _is_lower(losses[number] - least))
    return next((number for number in fit if correct[number] >= correct[best]), best)


def _is_lower(gain: NDArray[np.float32]) -> bool:
    """Return True if the differences (n,) of two losses are positive on average by more than their standard error."""
    return bool(gain.mean() > gain.std(ddof=1) / math.sqrt(len(gain)))


def _even(data: TrainingSet, included: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the numbers of those of some prototypes (m,) that together weigh what these do."""
    weights = None if data.weights is None else data.weights[included]
    return np.flatnonzero(included)[even_rows(data.labels[included], weights)]


def _folds(labels: NDArray[np.integer], seed: int) -> NDArray[np.int64]:
    """Divide each class's prototypes over the folds at random, at least two to a fold; -1 in a class of less than 3."""
    number = FOLDS if len(labels) >= LEAVE_PAIRS_OUT else len(labels)
    random = np.random.default_rng(seed)
    folds, first = np.full(len(labels), -1), 0
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        if len(members) < 3:
            continue
        parts = min(number, len(members) // 2)
        members = members[: 2 if parts == 1 else None]  # one of three remains to train on
        folds[members] = (first + np.arange(len(members)) % parts) % number
        first += parts
    return folds


def _cross_validated(
    data: TrainingSet, folds: NDArray[np.int64], *, regressions: bool
) -> NDArray[np.float32]:
    """Return the logits (heads, m, C) of the other folds' discriminants; zeros for prototypes without a fold.

    The heads are a discriminant for each of SHARES, and with `regressions` a regression for each.
    """
    kinds = 2 if regressions else 1
    logits = np.zeros((kinds * len(SHARES), len(folds), data.num_classes), dtype=np.float32)
    for fold in np.unique(folds[folds >= 0]):
        held_out, training = data.part(folds == fold), data.part(folds != fold)
        features = held_out.extrapolated()
        for number, head in enumerate(_discriminants(training, SHARES, regressions=regressions)):
            share, kind = divmod(number, kinds)
            logits[kind * len(SHARES) + share, folds == fold] = logits_of([head], features)
    return logits


def _discriminants(
    data: TrainingSet, shares: Sequence[float], *, regressions: bool = False
) -> Iterator[Dense]:
    even = data.evenly_weighted()
    centers, deviations, samples, common = even.centers, even.deviations, even.samples, even.common_classes
    return discriminants(centers, deviations, samples, shares, common=common, regressions=regressions)


def _divided(head: _Candidate, present: NDArray[np.bool_]) -> tuple[Dense, ...]:
    """Divide a head's logits by its temperature; a class without prototypes keeps its logit."""
    *adapter, last = head.layers
    bias = np.where(present, last.bias / head.temperature, ABSENT_LOGIT).astype(np.float32)
    return *adapter, Dense((last.weight / head.temperature).astype(np.float32), bias)
