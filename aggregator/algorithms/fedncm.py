"""FedNCM: the nearest class mean of all devices' prototypes (Legate et al., NeurIPS 2023).

The paper normalizes the means, and fine-tunes the backbone afterwards; here the distance is Euclidean.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from aggregator.algorithms.algorithm import ABSENT_LOGIT, OneShot, Training
from aggregator.algorithms.fedtc.block_head import temperature_of_means
from aggregator.algorithms.fedtc.head import Dense, calibrate, cross_entropy
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
        means, present = data.means(data.counted_images), data.samples > 0
        bias = np.where(present, -np.square(means).sum(axis=1) / 2, ABSENT_LOGIT).astype(np.float32)
        logits = data.values @ means.T + bias
        if data.scatter is None:
            temperature, losses = calibrate(logits, data.labels)
        else:  # the prototypes are means of classes on devices
            temperature = temperature_of_means(data, data.scatter)
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
