"""FPL: one shared model for devices of different domains, regularized by clusters of prototypes.

Huang, Ye, Shi, Li, Du, "Rethinking federated learning with domain shift: a prototype view", CVPR 2023. Here the
shared model is an adapter and a classifier on the frozen backbones.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from aggregator.algorithms import local_model
from aggregator.algorithms.algorithm import (
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
)
from aggregator.algorithms.clustering import coarsest
from aggregator.algorithms.local_model import PARAMETERS
from protocol.errors import ProtofleetError

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = Mapping[str, Tensor]


class FPL(RoundAlgorithm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[fpl]`: how the shared model is trained.

    The defaults are the best that `python -m research fpl` found. The paper's are `rounds = 100`, `epochs = 10`,
    `tau = 0.02`, `learning_rate = 0.01`, `standardize = false`, and `regularization = 1` in its published code.
    """

    name: ClassVar[str] = "fpl"
    uploaded: ClassVar[tuple[str, ...]] = PARAMETERS

    epochs: SmallCount = 5
    batch_size: SmallCount = 64
    projection_size: Size = 256
    """D, the length of a prototype."""
    tau: Rate = 0.07
    """Temperature of the contrast with cluster prototypes."""
    regularization: Weight = 0.03
    """Weight of the mean square of an image's distance to the unbiased prototype; the sum that eq. 10 prints has the
    weight `projection_size`, which is 256."""
    learning_rate: Rate = 0.1
    """Learning rate of SGD."""
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    weight_decay: Fraction = 1e-5
    """L2, as part of the gradient."""
    standardize: bool = True
    """Train on features of mean 0, and deviation 1 over all of them, on the device's own images."""

    def prototype_size(self, feature_size: int) -> int:
        del feature_size
        return self.projection_size

    def first_tensors(self, *, feature_size: int, num_classes: int, seed: int) -> dict[str, NDArray[Any]]:
        sizes = {"feature_size": feature_size, "num_classes": num_classes}
        model = local_model.initial_parameters(self, **sizes, seed=seed)
        return {**model, **_pooled_prototypes([], num_classes, self.projection_size)}

    def aggregate(
        self,
        contributions: Sequence[Contribution],
        previous: Mapping[str, NDArray[Any]],
        *,
        num_classes: int,
        seed: int,
    ) -> dict[str, NDArray[Any]]:
        """Average the models by their numbers of images, and cluster the prototypes of each class (eq. 4 to 6).

        Averaging changes equals averaging models where all started from the same one, and lets a late one count.

        Law: the order of the contributions does not matter.

        Returns:
            The model, float32; `clusters` float16 (P, D), P >= 1, the cluster prototypes, and `cluster_labels`
            uint32 (P,), their classes: one of zeros if there is none; `unbiased` float16 (C, D), zeros for a
            class that no device has; `present` uint8 (C,), 1 for a class that some device has.

        Raises:
            ProtofleetError: a contribution lacks a change, or has one of another shape.
        """
        del seed
        parts = by_device(contributions)
        weights = [float(part.counts.sum()) for part in parts]
        model = {name: np.array(previous[name], dtype=np.float32) for name in PARAMETERS}
        for part, weight in zip(parts, weights, strict=True):
            for name in PARAMETERS:
                change = _change(part, name, model[name].shape)
                model[name] += np.float32(weight / max(sum(weights), 1.0)) * change
        return {**model, **_pooled_prototypes(parts, num_classes, self.projection_size)}

    def functions(self, *, feature_size: int, num_classes: int, seed: int) -> Functions:
        del seed  # round 0 ships the first model
        return local_model.functions(
            self,
            loss=lambda tensors, features, logits: loss(self, tensors, features, logits),
            head=Function(inputs=("feature", *local_model.MODEL), apply=_head),
            round_tensors={
                "clusters": ("clusters", None),
                "cluster_labels": ("clusters",),
                "unbiased": (),
                "present": (),
            },
            feature_size=feature_size,
            num_classes=num_classes,
        )


def loss(settings: FPL, tensors: "Tensors", features: "Tensor", logits: "Tensor") -> "Tensor":
    """Return CE + CPCL + weighted UPCR of a batch, () (eq. 12); a sample of a class without prototypes adds CE alone.

    UPCR is the mean over dimensions, as in the published code; the paper prints a sum (eq. 10), D times as much. The
    features z are the adapter's output, (n, D); the logits are (n, C).
    """
    from aggregator.algorithms.layers import cross_entropy, log_sum_exp, unit

    labels, present = tensors["labels"], tensors["present"]
    cosines = unit(features) @ unit(tensors["clusters"]).T / settings.tau
    own = labels[:, None] == tensors["cluster_labels"]
    # eq. 7 and 8: the clusters of the sample's class against all clusters
    contrast = log_sum_exp(cosines) - log_sum_exp(cosines, own)
    away = features - tensors["unbiased"][labels]
    regularizer = (away * away).mean(dim=1)  # eq. 10
    prototype_terms = (contrast + settings.regularization * regularizer) * present[labels]
    return (cross_entropy(logits, labels) + prototype_terms).mean()


def _head(tensors: "Tensors") -> "dict[str, Tensor]":
    logits = local_model.logits_of(tensors, local_model.features_of(tensors))
    return {"logits": logits, "probabilities": logits.softmax(dim=1)}


def _change(part: Contribution, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    change = part.tensors.get(name)
    if change is None or change.shape != shape:
        raise ProtofleetError(
            f"device {part.device} must upload the change of {name} as {shape}, "
            f"not {'nothing' if change is None else change.shape}"
        )
    return change


def _pooled_prototypes(
    parts: Sequence[Contribution], num_classes: int, projection_size: int
) -> dict[str, NDArray[Any]]:
    """Return the cluster prototypes (eq. 5) and unbiased prototypes (eq. 6) of all classes, as `aggregate` does."""
    unbiased = np.zeros((num_classes, projection_size), dtype=np.float32)
    present = np.zeros(num_classes, dtype=np.uint8)
    clusters, labels = [], []
    for label in range(num_classes):
        members = [part.values[part.labels == label] for part in parts if (part.labels == label).any()]
        if members:
            means = cluster_means(np.concatenate(members))
            clusters.append(means)
            labels += [label] * len(means)
            unbiased[label], present[label] = means.mean(axis=0), 1
    return {
        "clusters": (np.concatenate(clusters) if clusters else unbiased[:1]).astype(np.float16),
        "cluster_labels": np.array(labels or [0], dtype=np.uint32),
        "unbiased": unbiased.astype(np.float16),
        "present": present,
    }


def cluster_means(prototypes: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean of each cluster, (clusters, D), of one class's prototypes (p, D), p >= 1 (eq. 4 and 5)."""
    groups = coarsest(prototypes)
    means = [prototypes[groups == group].mean(axis=0) for group in range(groups.max() + 1)]
    return np.stack(means).astype(np.float32)
