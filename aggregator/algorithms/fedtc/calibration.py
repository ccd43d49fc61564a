"""The temperature of a head: what its logits are divided by, so that its probabilities are those of being correct.

Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.
"""

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT

TEMPERATURES = 0.1, 10_000.0
"""Bounds of a temperature."""


def calibrate(
    logits: NDArray[np.float32], labels: NDArray[np.integer], *, common: NDArray[np.bool_] | None = None
) -> tuple[float, NDArray[np.float32]]:
    """Return the temperature of least mean cross-entropy, and the cross-entropy of each row (n,) at it.

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

    found = minimize_scalar(cost, bounds=tuple(np.log(TEMPERATURES)), method="bounded")
    best = float(np.exp(found.x))
    return best, cross_entropy(logits / np.float32(best), labels)


def cross_entropy(logits: NDArray[np.float32], labels: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return the cross-entropy (n,) of each row of logits (n, C)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    of_label = shifted[np.arange(len(labels)), labels]
    return np.asarray(np.log(np.exp(shifted).sum(axis=1)) - of_label, dtype=np.float32)
