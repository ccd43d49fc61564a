"""A head as arrays: dense layers, with rectified rows of unit length between them, its temperature and compression."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.fedtc.arrays import blocks
from protocol.errors import ProtofleetError

MIN_LENGTH = 1e-12
"""Least length that a row is divided by, as in `torch.nn.functional.normalize`."""

TEMPERATURES = 0.1, 10_000.0
"""Bounds of a temperature."""

OUTPUTS_PER_RANK = 8
"""Outputs of a layer for each dimension of its projection."""


@dataclass(frozen=True)
class Dense:
    """A layer x -> W P x + b, or x -> W x + b without a projection.

    Attributes:
        weight: W, float32 or float16 (outputs, rank).
        bias: b, float32 (outputs,).
        projection: P, float32 or float16 (rank, inputs).
    """

    weight: NDArray[np.floating]
    bias: NDArray[np.float32]
    projection: NDArray[np.floating] | None = None

    def after(self, factors: NDArray[np.float32]) -> "Dense":
        """Return the layer of rows (n, inputs) that takes them before they are multiplied by factors (inputs,)."""
        if self.projection is None:
            return replace(self, weight=(self.weight * factors).astype(self.weight.dtype))
        return replace(self, projection=(self.projection * factors).astype(self.projection.dtype))

    @property
    def nbytes(self) -> int:
        return (
            self.weight.nbytes + self.bias.nbytes + (0 if self.projection is None else self.projection.nbytes)
        )

    def outputs(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the layer's output (n, outputs) for rows (n, inputs), computed in float32."""
        if self.projection is not None:
            rows = rows @ self.projection.T.astype(np.float32)
        return np.asarray(rows @ self.weight.T.astype(np.float32) + self.bias)


def require_layers(layers: Sequence[Dense], *, features: int, classes: int) -> None:
    """Raise ProtofleetError unless layers take rows of `features` values, and give a finite logit for each class."""
    size = features
    for layer in layers:
        first = layer.weight if layer.projection is None else layer.projection
        rank = layer.weight.shape[1] if layer.projection is None else layer.projection.shape[0]
        outputs = layer.weight.shape[0]
        if (first.shape[1], layer.weight.shape[1], layer.bias.shape) != (size, rank, (outputs,)):
            raise ProtofleetError(
                f"the algorithm returned a layer that does not take {size} values: weight {layer.weight.shape}, bias "
                f"{layer.bias.shape}"
            )
        if not all(np.isfinite(each).all() for each in (first, layer.weight, layer.bias)):
            raise ProtofleetError("the algorithm returned a layer with NaN or infinity")
        size = outputs
    if not layers or size != classes:
        raise ProtofleetError(f"the algorithm returned a head of {size} logits for {classes} classes")


def unit_rows(dense: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rectified rows (n, L), divided by their length."""
    positive = np.maximum(dense, 0)
    return np.asarray(positive / np.maximum(np.linalg.norm(positive, axis=1, keepdims=True), MIN_LENGTH))


def logits_of(layers: Sequence[Dense], features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a head's logits (n, C) for features (n, L)."""
    *adapter, classifier = layers
    logits = np.empty((len(features), len(classifier.bias)), np.float32)
    for block in blocks(len(features)):
        rows = features[block]
        for layer in adapter:
            rows = unit_rows(layer.outputs(rows))
        logits[block] = classifier.outputs(rows)
    return logits


def calibrate(
    logits: NDArray[np.float32], labels: NDArray[np.integer], *, common: NDArray[np.bool_] | None = None
) -> tuple[float, NDArray[np.float32]]:
    """Return the temperature of least mean cross-entropy, and the cross-entropy of each row (n,) at it.

    Logits are divided by the temperature, so that probabilities are those of being correct (Guo et al., "On calibration
    of modern neural networks", ICML 2017).

    As if one more row were incorrect (Platt, "Probabilistic outputs for support vector machines", 1999), so that few
    rows that are all correct do not make every answer certain.

    Args:
        logits: (n, C), of features that the head was not made from.
        labels: (n,).
        common: (C,), the classes that an incorrect row may be of; None for all with prototypes.
    """
    from scipy.optimize import minimize_scalar

    is_possible = logits > ABSENT_LOGIT
    random = logits.mean(axis=1, where=is_possible if common is None else is_possible & common)
    lead = logits[np.arange(len(labels)), labels] - random

    def cost(exponent: float) -> float:
        temperature = np.exp(exponent)
        losses = cross_entropy(logits / temperature, labels)
        return float(losses.sum() + (losses + lead / temperature).mean())

    solution = minimize_scalar(cost, bounds=tuple(np.log(TEMPERATURES)), method="bounded")
    best = float(np.exp(solution.x))
    return best, cross_entropy(logits / np.float32(best), labels)


def cross_entropy(logits: NDArray[np.float32], labels: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return the cross-entropy (n,) of each row of logits (n, C)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    of_label = shifted[np.arange(len(labels)), labels]
    return np.asarray(np.log(np.exp(shifted).sum(axis=1)) - of_label, dtype=np.float32)


def compress(layers: Sequence[Dense], features: NDArray[np.float32]) -> tuple[Dense, ...]:
    """Return layers that compute nearly the same for features like these.

    The outputs of each layer but the last are projected on their first principal components, an eighth as many as
    outputs, if that is smaller, and the weights are rounded to float16. The paper's adapter of 1280 features then has a
    tenth of its bytes.

    Args:
        layers: of a head that takes features (n, L).
        features: (m, L), of the training set.
    """
    *adapter, classifier = layers
    compressed: list[Dense] = []

    def inputs() -> Iterator[NDArray[np.float32]]:
        for block in blocks(len(features)):
            rows = features[block]
            for layer in compressed:
                rows = unit_rows(layer.outputs(rows))
            yield rows

    for layer in adapter:
        outputs, size = layer.weight.shape
        rank = max(1, outputs // OUTPUTS_PER_RANK)
        is_smaller = rank * (outputs + size) < outputs * size
        compressed.append(_rounded(_projected(layer, inputs, rank) if is_smaller else layer))
    return *compressed, classifier


def _projected(layer: Dense, inputs: Callable[[], Iterable[NDArray[np.float32]]], rank: int) -> Dense:
    """Project the outputs for inputs, in blocks (b, L), on their first principal components."""
    outputs, size = layer.weight.shape
    total, number = np.zeros(size), 0
    for rows in inputs():
        total += rows.sum(axis=0, dtype=np.float64)
        number += len(rows)
    mean = (total / number).astype(np.float32)
    products = np.zeros((outputs, outputs), np.float32)
    for rows in inputs():
        deviations = (rows - mean) @ layer.weight.T
        products += deviations.T @ deviations
    _, components = np.linalg.eigh(products)
    left = components[:, -rank:]
    center = layer.weight @ mean
    bias = np.asarray(layer.bias + center - left @ (left.T @ center), np.float32)
    return Dense(left, bias, left.T @ layer.weight)


def _rounded(layer: Dense) -> Dense:
    """Round to float16, after a scaling that the length of the output alone shows, which does not count."""
    weight, projection = layer.weight, layer.projection
    if projection is not None:
        scales = np.maximum(np.abs(projection).max(axis=1), np.finfo(np.float32).tiny)
        weight, projection = weight * scales, (projection / scales[:, None]).astype(np.float16)
    length = max(np.abs(weight).max(), np.finfo(np.float32).tiny)
    return Dense((weight / length).astype(np.float16), layer.bias / length, projection)
