"""FedPCL: each device trains a projection of its own by contrast with the prototypes of all devices.

Tan, Long, Ma, Liu, Zhou, Jiang, "Federated learning from pre-trained models: a contrastive learning approach",
NeurIPS 2022.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import (
    Contribution,
    Count,
    Fraction,
    Functions,
    Rate,
    RoundAlgorithm,
    Size,
    by_device,
    class_means,
)


class FedPCL(RoundAlgorithm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[fedpcl]`: how projections are trained.

    The defaults are the best that `python -m research fedpcl` found without a prior. The paper has `tau = 0.07`,
    `learning_rate = 1e-3` and `standardize = false`, a ReLU before the projection is normalized, and losses without the
    image's own class in the denominator.
    """

    name: ClassVar[str] = "fedpcl"
    model: ClassVar[tuple[str, ...]] = ("weight", "bias", "mean", "std")
    moments: ClassVar[tuple[str, ...]] = (
        "weight_first",
        "weight_second",
        "bias_first",
        "bias_second",
        "steps",
    )
    persistent: ClassVar[tuple[str, ...]] = (*model, *moments)
    max_norm: ClassVar[float] = 1.0  # a mean of unit vectors

    projection_size: Size = 256
    """D, the length of a prototype."""
    tau: Rate = 0.2
    """Temperature of the loss."""
    learning_rate: Rate = 1e-4
    """Adam's learning rate."""
    weight_decay: Fraction = 1e-4
    """L2, as part of the gradient."""
    standardize: bool = True
    """Train on features of mean 0, and deviation 1 over all of them, on the device's own images."""
    prior: bool = False
    """Expect classes as often as the device's own images have them, in training and in the head. Best on a device's own
    mixture of classes; a device then hardly recognizes classes of which it has no images."""
    max_sets: Count | None = None
    """Greatest number of devices' prototype sets that are sent, a random sample of them; default: all."""

    def prototype_size(self, feature_size: int) -> int:
        del feature_size
        return self.projection_size

    def epochs_of(self, number: int) -> int:
        """Return 0 for round 0, whose prototypes are those of the common initial projection."""
        return self.epochs if number else 0

    def aggregate(
        self,
        contributions: Sequence[Contribution],
        previous: Mapping[str, NDArray[Any]],
        *,
        num_classes: int,
        seed: int,
    ) -> dict[str, NDArray[Any]]:
        """Return the global prototypes (eq. 6) and the sets of all devices, padded with them (eq. 7).

        Law: the order of the contributions does not matter.

        Returns:
            `prototypes` float16 (C + p, D), the global ones first, zeros for a class that no device has;
            `index` uint32 (m, C), m >= 1, the row of each set's prototype of each class, that of the global one
            if the set lacks the class; `present` uint8 (C,), 1 for a class that some device has.
        """
        del previous
        own = [
            class_means(part.values, part.labels, part.counts, num_classes=num_classes)
            for part in by_device(contributions)
            if len(part.labels)
        ]
        shape = (len(own), num_classes)
        means = np.reshape([values for values, _ in own], (*shape, self.projection_size)).astype(np.float32)
        counts = np.reshape([weights for _, weights in own], shape).astype(np.float64)
        global_means, total = _merged(means, counts)
        if self.max_sets is not None and len(own) > self.max_sets:
            random = np.random.default_rng(seed)
            chosen = np.sort(random.choice(len(own), self.max_sets, replace=False))
            means, counts = means[chosen], counts[chosen]
        owned = counts > 0
        index = np.where(
            owned, num_classes + np.cumsum(owned).reshape(owned.shape) - 1, np.arange(num_classes)
        )
        return {
            "prototypes": np.concatenate([global_means, means[owned]]).astype(np.float16),
            "index": (index if own else np.arange(num_classes)[None]).astype(np.uint32),
            "present": (total > 0).astype(np.uint8),
        }

    def functions(self, *, feature_size: int, num_classes: int, seed: int) -> Functions:
        from aggregator.algorithms import fedpcl_step

        return fedpcl_step.functions(self, feature_size=feature_size, num_classes=num_classes, seed=seed)


def _merged(
    means: NDArray[np.float32], counts: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Merge sets (m, C, D) with counts (m, C) into one, (C, D) and (C,): count-weighted class means (eq. 6).

    The paper also divides by the number of devices that have the class, which would only shrink the prototypes.
    """
    total = counts.sum(axis=0)
    sums = np.einsum("mc,mcd->cd", counts, means)
    return (sums / np.maximum(total, 1)[:, None]).astype(np.float32), total
