"""FedNCM: the nearest class mean of all devices' prototypes (Legate et al., NeurIPS 2023).

The paper normalizes the means, and fine-tunes the backbone afterwards; here the distance is Euclidean.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from aggregator.algorithms.algorithm import ABSENT_LOGIT, OneShot, Training
from aggregator.algorithms.fedtc.block_head import Sums, sums_of
from aggregator.algorithms.fedtc.discriminant import TINY
from aggregator.algorithms.fedtc.head import TEMPERATURES, Dense, calibrate, cross_entropy
from aggregator.algorithms.fedtc.train_head import TrainedHead
from aggregator.algorithms.fedtc.training_set import TrainingSet


class FedNCM(OneShot, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The nearest class mean."""

    name: ClassVar[str] = "fedncm"
    unused: ClassVar[frozenset[tuple[str, ...]]] = (OneShot.unused - {("client", "prototypes")}) | {
        ("training", name) for name in ("recipe", "restore", "epochs", "device", "seed", "gpus")
    }
    blocks: ClassVar[bool] = True

    def train(
        self,
        data: TrainingSet,
        training: Training,
        *,
        report: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> TrainedHead:
        """Return the layer whose greatest logit is that of the nearest mean, as probable as on the prototypes."""
        del training, report
        images = data.counts if data.weights is None else data.counts * data.weights
        means, present = data.means(images), data.samples > 0
        bias = np.where(present, -np.square(means).sum(axis=1) / 2, ABSENT_LOGIT).astype(np.float32)
        logits = data.values @ means.T + bias
        if data.scatter is None:
            temperature, losses = calibrate(logits, data.labels)
        else:
            temperature = _temperature(sums_of(data, data.scatter))
            losses = cross_entropy(logits / np.float32(temperature), data.labels)
        layer = Dense(
            means / np.float32(temperature), np.where(present, bias / np.float32(temperature), bias)
        )
        return TrainedHead(
            layers=(layer,),
            loss=float(losses.mean()),
            accuracy=float((logits.argmax(axis=1) == data.labels).mean()),
            epochs=0,
            temperature=temperature,
        )


def _temperature(sums: Sums) -> float:
    """Return the temperature at which the log-odds of two classes are those of normal images, the median of all pairs.

    Two logits whose means are a distance d apart differ by d^2 / 2 on average, with a variance v: the log-odds are the
    difference times d^2 / v.
    """
    means = sums.means[sums.images > 0]
    first, second = np.triu_indices(len(means), k=1)
    squares, variances = (
        np.diag(products)[first] + np.diag(products)[second] - 2 * products[first, second]
        for products in (means @ means.T, means @ sums.scatter @ means.T / sums.images.sum())
    )
    found = float(np.median(variances / np.maximum(squares, TINY))) if len(first) else 1.0
    return float(np.clip(found, *TEMPERATURES))
