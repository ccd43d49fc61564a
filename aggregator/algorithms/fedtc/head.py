"""A head as arrays: dense layers, with rectified rows of unit length between them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_LENGTH = 1e-12
"""Least length that a row is divided by, as in `torch.nn.functional.normalize`."""


@dataclass(frozen=True)
class Dense:
    """A layer x -> W x + b: `weight` is float32 (outputs, inputs), `bias` float32 (outputs,)."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


def logits_of(layers: Sequence[Dense], features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a head's logits (n, C) for features (n, L)."""
    *adapter, classifier = layers
    for layer in adapter:
        features = np.maximum(features @ layer.weight.T + layer.bias, 0)
        features = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), MIN_LENGTH)
    logits: NDArray[np.float32] = features @ classifier.weight.T + classifier.bias
    return logits
