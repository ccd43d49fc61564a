"""The temperature of a head: what its logits are divided by, so that its probabilities are those of being correct.

Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.
"""

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT

TEMPERATURES = np.geomspace(0.1, 10_000, 300)


def calibrate(logits: NDArray[np.float32], labels: NDArray[np.integer]) -> tuple[float, NDArray[np.float32]]:
    """Return the temperature of least mean cross-entropy, and the cross-entropy of each row (n,) at it.

    As if one more row were incorrect (Platt, "Probabilistic outputs for support vector machines", 1999), so that few
    rows that are all correct do not make every answer certain.

    Args:
        logits: (n, C), of features that the head was not made from.
        labels: (n,).
    """
    random = logits.mean(axis=1, where=logits > ABSENT_LOGIT)
    costs = []
    for temperature in TEMPERATURES:
        losses = cross_entropy(logits / temperature, labels)
        incorrect = losses + (logits[np.arange(len(labels)), labels] - random) / temperature
        costs.append(float(losses.sum() + incorrect.mean()))
    best = TEMPERATURES[int(np.argmin(costs))]
    return float(best), cross_entropy(logits / best, labels)


def cross_entropy(logits: NDArray[np.float32], labels: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return the cross-entropy (n,) of each row of logits (n, C)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    of_label = shifted[np.arange(len(labels)), labels]
    return np.asarray(np.log(np.exp(shifted).sum(axis=1)) - of_label, dtype=np.float32)
