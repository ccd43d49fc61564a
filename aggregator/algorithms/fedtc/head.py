"""A head as arrays: dense layers, with rectified rows of unit length between them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.arrays import blocks

MIN_LENGTH = 1e-12
"""Least length that a row is divided by, as in `torch.nn.functional.normalize`."""


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
        """The size of its arrays in bytes."""
        return (
            self.weight.nbytes + self.bias.nbytes + (0 if self.projection is None else self.projection.nbytes)
        )

    def of(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the layer's output (n, outputs) for rows (n, inputs), computed in float32."""
        if self.projection is not None:
            rows = rows @ self.projection.T.astype(np.float32)
        return np.asarray(rows @ self.weight.T.astype(np.float32) + self.bias)


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
            rows = unit_rows(layer.of(rows))
        logits[block] = classifier.of(rows)
    return logits
