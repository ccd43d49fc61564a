"""FedProto: every device trains a model of its own, whose class means are drawn to those of all devices.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across heterogeneous clients", AAAI
2022. Here a device's model is an adapter and a classifier on the frozen backbones.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from aggregator.algorithms import local_model
from aggregator.algorithms.algorithm import (
    ABSENT_LOGIT,
    Contribution,
    Fraction,
    Function,
    Functions,
    Rate,
    RoundAlgorithm,
    Size,
    SmallCount,
    Weight,
    by_device,
    class_means,
)

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = Mapping[str, Tensor]

_ROUND = ("prototypes", "present")
"""The round's tensors."""


class FedProto(RoundAlgorithm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[fedproto]`: how each device's own model is trained."""

    name: ClassVar[str] = "fedproto"
    persistent: ClassVar[tuple[str, ...]] = local_model.MODEL

    epochs: SmallCount = 5
    batch_size: SmallCount = 64
    projection_size: Size = 256
    """D, the length of a prototype."""
    pull: Weight = 1.0
    """Lambda: weight of the distance to the global prototype."""
    learning_rate: Rate = 0.01
    """Learning rate of SGD."""
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    """Momentum of SGD."""
    weight_decay: Fraction = 0.0
    """L2, as part of the gradient."""
    standardize: bool = True
    """Train on features of mean 0, and deviation 1 over all of them, on the device's own images."""

    def prototype_size(self, feature_size: int) -> int:
        """Return the length of a projection."""
        del feature_size
        return self.projection_size

    def aggregate(
        self,
        contributions: Sequence[Contribution],
        previous: Mapping[str, NDArray[Any]],
        *,
        num_classes: int,
        seed: int,
    ) -> dict[str, NDArray[Any]]:
        """Average each class's prototypes over the devices that have it, by images ("Global prototype aggregation").

        Law: the order of the contributions does not matter.

        Returns:
            `prototypes` float16 (C, D), zeros for a class that no device has, and `present` uint8 (C,), 1 for a
            class that some device has.
        """
        del previous, seed
        parts = by_device(contributions)
        none = np.zeros((0, self.projection_size), dtype=np.float32)
        prototypes, images = class_means(
            np.concatenate([none, *(part.values for part in parts)]),
            np.concatenate([np.zeros(0, dtype=np.int64), *(part.labels for part in parts)]),
            np.concatenate([np.zeros(0, dtype=np.int64), *(part.counts for part in parts)]),
            num_classes=num_classes,
        )
        return {"prototypes": prototypes.astype(np.float16), "present": (images > 0).astype(np.uint8)}

    def functions(self, *, feature_size: int, num_classes: int, seed: int) -> Functions:
        """Return what devices run; imports torch. All devices start from the same model, which `init` holds."""
        sizes = {"feature_size": feature_size, "num_classes": num_classes}
        return local_model.functions(
            self,
            loss=lambda tensors, features, logits: loss(self, tensors, features, logits),
            head=Function(inputs=("feature", *local_model.MODEL[:2], "mean", "std", *_ROUND), apply=_head),
            round_tensors=dict.fromkeys(_ROUND, ()),
            initial=local_model.initial_parameters(self, **sizes, seed=seed),
            **sizes,
        )


def loss(settings: FedProto, tensors: "Tensors", features: "Tensor", logits: "Tensor") -> "Tensor":
    """Return a batch's cross entropy + lambda times its distance to global prototypes, () ("Local model update").

    The distance is the mean over dimensions of (f(x) - C^y)^2, as in the published code. A sample whose class no
    device has a prototype of adds its cross entropy alone. The features f(x) are (n, D), the logits (n, C).
    """
    from aggregator.algorithms.layers import cross_entropy

    labels = tensors["labels"]
    away = features - tensors["prototypes"][labels]
    distance = (away * away).mean(dim=1) * tensors["present"][labels]
    return (cross_entropy(logits, labels) + settings.pull * distance).mean()


def _head(tensors: "Tensors") -> "dict[str, Tensor]":
    """Return logits that are greatest for the nearest global prototype, as the paper classifies.

    They are f(x).C^j - |C^j|^2 / 2, which is -|f(x) - C^j|^2 / 2 but for what is the same for all classes.
    """
    features, prototypes = local_model.features_of(tensors), tensors["prototypes"]
    logits = ((prototypes * prototypes).sum(dim=1) / -2).addmm(features, prototypes.T)
    logits = logits.where(tensors["present"] > 0, ABSENT_LOGIT)
    return {"logits": logits, "probabilities": logits.softmax(dim=1)}
