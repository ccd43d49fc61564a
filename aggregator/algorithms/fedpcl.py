"""FedPCL: each device learns a projection of its own, drawn to the prototypes of all the others.

Tan, Long, Ma, Liu, Zhou, Jiang, "Federated learning from pre-trained models: a contrastive learning approach",
NeurIPS 2022.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage

from aggregator.algorithms.program import Contribution, Functions, by_device, class_means

_Rate = Annotated[float, Meta(gt=0, le=10)]
_Count = Annotated[int, Meta(ge=1, le=100_000)]


_PARAMETERS = ("weight", "bias")
_MOMENTS = tuple(f"{name}_{moment}" for name in _PARAMETERS for moment in ("first", "second"))
_KEPT = (*_PARAMETERS, "mean", "std", *_MOMENTS, "steps")


class FedPCL(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[fedpcl]`: how projections are learned.

    The defaults are what `python -m benchmarks fedpcl` found best. The paper's are `tau = 0.07`,
    `learning_rate = 1e-3`, `loss = "contrastive"`, `relu = true`, `standardize = false` and `prior = false`.
    """

    rounds: _Count = 40
    epochs: Annotated[int, Meta(ge=1, le=65535)] = 1
    batch_size: Annotated[int, Meta(ge=1, le=65535)] = 32
    projection_size: Annotated[int, Meta(ge=1, le=4096)] = 256
    """D."""
    tau: _Rate = 0.2
    """Temperature."""
    learning_rate: _Rate = 1e-4
    """Of Adam."""
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 1e-4
    """L2, as part of the gradient."""
    variant: Literal["both", "global", "local"] = "both"
    """Which terms of eq. 8 count: contrast with the global prototypes, with every device's set, or with both."""
    loss: Literal["contrastive", "cross_entropy"] = "cross_entropy"
    """Eq. 9 and 10 leave the sample's own class out of the denominator; `cross_entropy` leaves it in."""
    standardize: bool = True
    """Learn on features that have mean 0, and deviation 1 over all of them, on the device's own images."""
    relu: bool = False
    """Put a ReLU before the projection's normalization."""
    prior: bool = True
    """Expect classes as often as the device's own images have them, in training and in the head."""
    max_sets: _Count | None = None
    """Devices' sets of prototypes that are sent out; all of them if None."""
    sets: Literal["sample", "cluster"] = "sample"
    """Where there are more: draw among them, or send the means of clusters of them."""

    @property
    def name(self) -> str:
        """What the task file calls it."""
        return "fedpcl"

    @property
    def persistent(self) -> tuple[str, ...]:
        """State that a device keeps from round to round: all but how often it has each class, which may change."""
        return _KEPT

    @property
    def uploaded(self) -> tuple[str, ...]:
        """State whose change is uploaded: none, prototypes are all that leaves a device."""
        return ()

    @property
    def max_norm(self) -> float:
        """Of a prototype: means of unit vectors are no longer than these."""
        return 1.0

    def epochs_of(self, number: int) -> int:
        """Passes in a round: none in round 0, whose prototypes are those of the common first projection."""
        return self.epochs if number else 0

    def first_tensors(self, *, feature_size: int, num_classes: int, seed: int) -> dict[str, NDArray[Any]]:
        """Return the tensors of round 0: no class has a prototype yet.

        Args:
            feature_size: L; does not matter here.
            num_classes: C.
            seed: does not matter here.
        """
        del feature_size, seed
        return self.aggregate([], {}, num_classes=num_classes, seed=0)

    def aggregate(
        self,
        contributions: Sequence[Contribution],
        previous: Mapping[str, NDArray[Any]],
        *,
        num_classes: int,
        seed: int,
    ) -> dict[str, NDArray[Any]]:
        """Pool prototypes: the global ones (eq. 6), and the sets of all devices, padded with them (eq. 7).

        Law: the order of the contributions does not matter.

        Args:
            contributions: at most one a device.
            previous: does not matter here: prototypes are made anew in every round.
            num_classes: C.
            seed: of the draw, where there are more sets than `max_sets`.

        Returns:
            `prototypes` float16 (C + p, D), the global ones first, zeros for a class that nobody has;
            `index` uint32 (m, C), m >= 1, the row of each set's prototype of each class, that of the global one
            where the set lacks the class; `present` uint8 (C,), 1 for a class that somebody has.
        """
        del previous
        own = [
            class_means(part.values, part.labels, part.counts, num_classes=num_classes)
            for part in by_device(contributions)
            if len(part.labels)
        ]
        means = np.zeros((len(own), num_classes, self.projection_size), dtype=np.float32)
        counts = np.zeros((len(own), num_classes))
        for number, (values, weights) in enumerate(own):
            means[number], counts[number] = values, weights
        everybody, total = _merged(means, counts)
        if self.max_sets is not None and len(own) > self.max_sets:
            means, counts = self._capped(np.where(counts[..., None] > 0, means, everybody), counts, seed)
        owned = counts > 0
        index = np.where(
            owned, num_classes + np.cumsum(owned).reshape(owned.shape) - 1, np.arange(num_classes)
        )
        return {
            "prototypes": np.concatenate([everybody, means[owned]]).astype(np.float16),
            "index": (index if own else np.arange(num_classes)[None]).astype(np.uint32),
            "present": (total > 0).astype(np.uint8),
        }

    def functions(self, *, feature_size: int, num_classes: int, seed: int) -> Functions:
        """Return what devices run; imports torch.

        Args:
            feature_size: L.
            num_classes: C.
            seed: of the first projection, the same on every device.
        """
        from aggregator.algorithms import fedpcl_step

        return fedpcl_step.functions(self, feature_size=feature_size, num_classes=num_classes, seed=seed)

    def _capped(
        self, padded: NDArray[np.float32], counts: NDArray[np.float64], seed: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """At most `max_sets` sets for the (m, C, D) and (m, C) given: some of them, or means of like ones."""
        if self.sets == "sample":
            chosen = np.sort(np.random.default_rng(seed).choice(len(padded), self.max_sets, replace=False))
            return padded[chosen], counts[chosen]
        tree = linkage(padded.reshape(len(padded), -1), method="ward")
        group = fcluster(tree, self.max_sets, criterion="maxclust")
        merged = [_merged(padded[group == number], counts[group == number]) for number in np.unique(group)]
        return np.stack([values for values, _ in merged]), np.stack([weights for _, weights in merged])


def _merged(
    means: NDArray[np.float32], counts: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Sets (m, C, D) with counts (m, C) as one, (C, D) and (C,): the count-weighted mean of each class (eq. 6).

    The paper divides by the number of a class's owners as well, which would only shrink the prototypes.
    """
    total = counts.sum(axis=0)
    sums = np.einsum("mc,mcd->cd", counts, means)
    return (sums / np.maximum(total, 1)[:, None]).astype(np.float32), total
