"""FPL: one shared model for devices of unlike domains, held together by clusters of prototypes.

Huang, Ye, Shi, Li, Du, "Rethinking federated learning with domain shift: a prototype view", CVPR 2023. Here the
shared model is an adapter and a classifier on the frozen backbones.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from aggregator.algorithms.finch import coarsest
from aggregator.algorithms.program import Contribution, Functions, by_device
from protocol.errors import ProtofleetError

_PARAMETERS = ("adapter_weight", "adapter_bias", "classifier_weight", "classifier_bias")


class FPL(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[fpl]`: how the shared model is learned.

    The defaults are what `python -m benchmarks fpl` found best. The paper's are `rounds = 100`, `epochs = 10`,
    `tau = 0.02`, `learning_rate = 0.01`, `regularization = 1` and `standardize = false`.
    """

    rounds: Annotated[int, Meta(ge=1, le=100_000)] = 40
    epochs: Annotated[int, Meta(ge=1, le=65535)] = 5
    batch_size: Annotated[int, Meta(ge=1, le=65535)] = 64
    adapter_size: Annotated[int, Meta(ge=1, le=4096)] = 256
    """D."""
    tau: Annotated[float, Meta(gt=0, le=10)] = 0.07
    """Temperature."""
    regularization: Annotated[float, Meta(ge=0, le=1000)] = 0.03
    """Weight of the distance to the unbiased prototype (eq. 9)."""
    learning_rate: Annotated[float, Meta(gt=0, le=10)] = 0.1
    """Of SGD."""
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 1e-5
    """L2, as part of the gradient."""
    standardize: bool = True
    """Learn on features that have mean 0, and deviation 1 over all of them, on the device's own images."""

    @property
    def name(self) -> str:
        """What the task file calls it."""
        return "fpl"

    @property
    def projection_size(self) -> int:
        """D: prototypes are means of the adapter's output."""
        return self.adapter_size

    @property
    def max_norm(self) -> float:
        """Of a prototype: an adapter's output has any length."""
        return math.inf

    @property
    def persistent(self) -> tuple[str, ...]:
        """State that a device keeps from round to round: none, every round begins with the shared model."""
        return ()

    @property
    def uploaded(self) -> tuple[str, ...]:
        """State whose change is uploaded: the whole model."""
        return _PARAMETERS

    def epochs_of(self, number: int) -> int:
        """Passes in a round: the same in all of them."""
        del number
        return self.epochs

    def first_tensors(self, *, feature_size: int, num_classes: int, seed: int) -> dict[str, NDArray[Any]]:
        """Return the tensors of round 0: a random model, and no class with a prototype yet.

        Args:
            feature_size: L.
            num_classes: C.
            seed: of the model's weights, uniform in +-1/sqrt(inputs) as torch's own linear layers begin.
        """
        random = np.random.default_rng(seed)
        shapes = {
            "adapter_weight": (self.adapter_size, feature_size),
            "adapter_bias": (self.adapter_size,),
            "classifier_weight": (num_classes, self.adapter_size),
            "classifier_bias": (num_classes,),
        }
        inputs = {"adapter": feature_size, "classifier": self.adapter_size}
        model = {}
        for name, shape in shapes.items():
            bound = inputs[name.split("_")[0]] ** -0.5
            model[name] = random.uniform(-bound, bound, shape).astype(np.float32)
        return {**model, **_pooled_prototypes([], num_classes, self.adapter_size)}

    def aggregate(
        self,
        contributions: Sequence[Contribution],
        previous: Mapping[str, NDArray[Any]],
        *,
        num_classes: int,
        seed: int,
    ) -> dict[str, NDArray[Any]]:
        """Average the models by their numbers of images, and cluster the prototypes of each class (eq. 4 to 6).

        Averaging changes is averaging models where all began with the same one, and lets a late one count.

        Law: the order of the contributions does not matter.

        Args:
            contributions: at most one a device, each with the changes of the whole model.
            previous: the tensors of the round that closes.
            num_classes: C.
            seed: does not matter: nothing is drawn.

        Returns:
            The model, float32; `clusters` float16 (P, D), P >= 1, the cluster prototypes, and `cluster_labels`
            uint32 (P,), their classes: one of zeros if there is none; `unbiased` float16 (C, D), zeros for a
            class that nobody has; `present` uint8 (C,), 1 for a class that somebody has.

        Raises:
            ProtofleetError: a contribution lacks a change, or has one of another shape.
        """
        del seed
        parts = by_device(contributions)
        weights = [float(part.counts.sum()) for part in parts]
        model = {name: np.array(previous[name], dtype=np.float32) for name in _PARAMETERS}
        for part, weight in zip(parts, weights, strict=True):
            for name in _PARAMETERS:
                change = _change(part, name, model[name].shape)
                model[name] += np.float32(weight / max(sum(weights), 1.0)) * change
        return {**model, **_pooled_prototypes(parts, num_classes, self.adapter_size)}

    def functions(self, *, feature_size: int, num_classes: int, seed: int) -> Functions:
        """Return what devices run; imports torch.

        Args:
            feature_size: L.
            num_classes: C.
            seed: does not matter: round 0 ships the first model.
        """
        from aggregator.algorithms import fpl_step

        del seed
        return fpl_step.functions(self, feature_size=feature_size, num_classes=num_classes)


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
    """Cluster prototypes (eq. 5) and unbiased prototypes (eq. 6) of all classes, as `FPL.aggregate` has them."""
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
    """Return the mean of each cluster of one class's prototypes (eq. 4 and 5).

    Args:
        prototypes: (p, D), p >= 1, of different devices.

    Returns:
        (clusters, D).
    """
    groups = coarsest(prototypes)
    means = [prototypes[groups == group].mean(axis=0) for group in range(groups.max() + 1)]
    return np.stack(means).astype(np.float32)
