"""Hierarchical Gaussian prototypes: each device's classes are Gaussians around those of the fleet, from one upload.

The images of a class on a device are Gaussian about a mean of its own, the devices' means of a class about that of
their group, such as a domain, and the groups' about the fleet's: an empirical Bayes model with the covariance within
classes in common (Efron and Morris, "Data analysis using Stein's estimator and its generalizations", 1975; Friedman,
"Regularized discriminant analysis", 1989).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import (
    ABSENT_LOGIT,
    Contribution,
    Count,
    Function,
    Functions,
    Rate,
    RoundAlgorithm,
    SmallCount,
    by_device,
    class_means,
)
from aggregator.algorithms.clustering import NO_GROUP, group_devices
from aggregator.coordination.bounds import EQUAL_MULTIPLE, median_limits

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = Mapping[str, Tensor]

MAX_DIRECTIONS = 256
"""Directions that devices receive, at most."""

_START = 2**-10
"""Deviation of a direction's values before the first pass: small beside those that come from images."""

_NEGLIGIBLE = 1e-5
"""Share of a sum of squares that can be left by rounding alone, where as much is subtracted."""

_SUPPORT = 4
"""Images beyond one of each class that a device needs for each direction: few images would be known from more."""

_HALF = 0.5
"""Share of the covariance that is replaced by a multiple of the identity."""

_ALIKE = 1e6
"""Images that the fleet's mean counts for if the devices' means do not differ."""


class Hierarchical(RoundAlgorithm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[hierarchical]`: what devices upload, and how they classify. Nothing is trained."""

    name: ClassVar[str] = "hierarchical"
    uploaded: ClassVar[tuple[str, ...]] = ("directions", "deviation")
    power: ClassVar[Literal[1, 2]] = 2

    rounds: Count = 1
    """Number of rounds. Another round makes the head again, from what devices upload then."""
    epochs: SmallCount = 5
    """Power iterations."""
    batch_size: SmallCount = 65535
    """Images whose scatter is computed at once; of a device with more, the last ones of a pass count."""
    directions: Annotated[int, Meta(ge=1, le=64)] = 16
    """Leading directions of the scatter within classes that a device uploads."""
    tau: Rate = 10.0
    """Temperature: log-likelihoods are divided by it."""
    prior: bool = False
    """Expect classes as often as the device's own images have them. Best on a device's own mixture of classes; a device
    then hardly recognizes classes of which it has no images."""

    def prototype_size(self, feature_size: int) -> int:
        return feature_size

    def first_tensors(self, *, feature_size: int, num_classes: int, seed: int) -> dict[str, NDArray[Any]]:
        """Return the directions from which all devices start, random, and the tensors of a fleet without images."""
        random = np.random.default_rng(seed).normal(size=(self.directions, feature_size))
        start = {
            "directions": (random * _START).astype(np.float16),
            "deviation": np.zeros(1, dtype=np.float16),
        }
        return self.aggregate([], start, num_classes=num_classes, seed=seed)

    def aggregate(
        self,
        contributions: Sequence[Contribution],
        previous: Mapping[str, NDArray[Any]],
        *,
        num_classes: int,
        seed: int,
    ) -> dict[str, NDArray[Any]]:
        """Estimate class means of fleet and groups, how far devices' are from them, and the precision within classes.

        The covariance S / 2 + tr(S) / (2 L) I, with S the mean scatter, has the inverse scale (I - basis' basis).

        No device counts for more images of a class than the class's median device: heads of devices without images of
        their own are made of these means alone, and a device may state any number.

        Law: the order of the contributions does not matter.

        Returns:
            `means` float16 (G, C, L), first the fleet's, zeros for a class that no device has, then those of groups of
            devices, drawn to the fleet's; `kappa` float32 (G,), the numbers of images for which they count; `present`
            uint8 (C,), 1 for a class that some device has; `basis` float16 (r, L), r >= 1; `scale` and `variance`
            float32 (1,), the latter of an image about its mean; `directions` and `deviation` as before.
        """
        del seed
        start = {name: previous[name] for name in self.uploaded}
        parts = by_device(contributions)
        size = start["directions"].shape[1]
        labels = np.concatenate([np.zeros(0, np.int64), *(part.labels for part in parts)])
        images = np.concatenate([np.zeros(0, np.int64), *(part.counts for part in parts)])
        values = np.concatenate([np.zeros((0, size), np.float32), *(part.values for part in parts)])
        devices = np.repeat(np.arange(len(parts)), [len(part.labels) for part in parts])
        images = _at_most_median(images, labels)
        means, present = class_means(values, labels, images, num_classes=num_classes)
        factors, variance = _scatter(parts, start)
        basis, scale = _precision(factors, variance)
        offsets = values - means[labels]
        groups = group_devices(offsets, labels, images, devices)
        number = groups.max(initial=NO_GROUP) + 1
        sets = np.where(groups == NO_GROUP, number + np.arange(len(groups)), groups)[devices]
        away, kappa = _of_groups(
            *(offsets, labels, images, sets), shape=(number, *means.shape), variance=variance
        )
        return {
            **start,
            "means": np.concatenate([means[None], means + away]).astype(np.float16),
            "present": (present > 0).astype(np.uint8),
            "basis": basis.astype(np.float16),
            "scale": np.array([scale], np.float32),
            "kappa": np.array([_kappa(offsets, labels, images, variance), *kappa], np.float32),
            "variance": np.array([variance], np.float32),
        }

    def functions(self, *, feature_size: int, num_classes: int, seed: int) -> Functions:
        del seed  # round 0 brings the first directions
        shape = (self.directions, feature_size)
        return Functions(
            init=Function(
                inputs=("feature",),
                apply=lambda tensors: {
                    "directions": tensors["feature"].new_zeros(shape),
                    "deviation": tensors["feature"].new_zeros(1),
                },
            ),
            step=Function(
                inputs=("feature", "labels", "directions"),
                apply=lambda tensors: _iterate(tensors, num_classes),
            ),
            project=Function(
                inputs=("feature",), apply=lambda tensors: {"projection": tensors["feature"].clone()}
            ),
            head=Function(
                inputs=(
                    *("feature", "means", "present", "basis", "scale", "kappa", "variance"),
                    *("local_prototypes", "local_counts"),
                ),
                apply=lambda tensors: _head(self, tensors),
            ),
            dimensions={
                "feature": ("n", None),
                "labels": ("n",),
                "basis": ("rank", None),
                "means": ("groups", None, None),
                "kappa": ("groups",),
            },
        )


def _scatter(
    parts: Sequence[Contribution], start: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[np.float64], float]:
    """Return F (p, L), with F'F the covariance within classes along all devices' directions, and its whole trace."""
    freedom = [float(part.counts.sum()) - len(part.labels) for part in parts]
    shares = [each / max(sum(freedom), 1.0) for each in freedom]
    rows, variance = [], 0.0
    for share, part in zip(shares, parts, strict=True):
        directions, deviation = (
            start[name].astype(np.float64) + part.tensors[name] for name in ("directions", "deviation")
        )
        whole, along = max(float(deviation[0]), 0.0) ** 2, float(np.square(directions).sum())
        # Images vary along their directions at most as much as in all; a false upload may say otherwise.
        rows.append(np.sqrt(share * min(1.0, whole / max(along, 1e-30))) * directions)
        variance += share * whole
    size = start["directions"].shape[1]
    return np.concatenate([np.zeros((1, size)), *rows]), variance


def _precision(factors: NDArray[np.float64], variance: float) -> tuple[NDArray[np.float64], float]:
    """Return basis (r, L) and scale, so that scale (I - basis' basis) is the inverse of the shrunken covariance.

    Variance outside the directions is spread over all of them, as in probabilistic principal component analysis.
    """
    size = factors.shape[1]
    wide = len(factors) > size
    squares, vectors = np.linalg.eigh(factors.T @ factors if wide else factors @ factors.T)
    squares, vectors = squares[::-1][:MAX_DIRECTIONS], vectors[:, ::-1][:, :MAX_DIRECTIONS]
    counted = squares > 1e-9 * max(float(squares[0]), 1e-30)
    squares, vectors = squares[counted], vectors[:, counted]
    directions = vectors.T if wide else vectors.T @ factors / np.sqrt(squares)[:, None]
    along = float(squares.sum())
    whole = max(variance, along)
    floor = (_HALF * whole + (1 - _HALF) * (whole - along)) / size
    if not floor > 0:
        return np.zeros((1, size)), 1.0
    gains = 1 - floor / (floor + (1 - _HALF) * squares)
    return np.sqrt(gains)[:, None] * directions, 1 / floor


def _kappa(
    offsets: NDArray[np.float32], labels: NDArray[np.int64], images: NDArray[np.number], variance: float
) -> float:
    """Return the variance within a device's class relative to that of devices' means, by the method of moments.

    `offsets` (p, L) are devices' means less their class's. Their squares are due to the few images of each (Searle,
    Casella, McCulloch, "Variance components", 1992), and what is more, to the devices.
    """
    weights = images.astype(np.float64)
    squares = float(weights @ np.square(offsets.astype(np.float64)).sum(axis=1))
    totals, freedom = np.bincount(labels, weights), len(labels) - len(np.unique(labels))
    spread = weights.sum() - float((np.bincount(labels, weights**2) / np.maximum(totals, 1)).sum())
    between = (squares - freedom * variance) / spread if spread > 0 else 0.0
    return variance / between if between * _ALIKE > variance else _ALIKE


def _at_most_median(images: NDArray[np.int64], sets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return numbers of images (p,), none greater than the lower median of its set (p,)."""
    limits = median_limits(images, EQUAL_MULTIPLE, sets=sets, fewest=1)
    return np.minimum(images, limits).astype(np.int64)


def _of_groups(
    offsets: NDArray[np.float32],
    labels: NDArray[np.int64],
    images: NDArray[np.int64],
    sets: NDArray[np.int64],
    *,
    shape: tuple[int, ...],
    variance: float,
) -> tuple[NDArray[np.float32], list[float]]:
    """Return groups' class means less the fleet's, of a shape (G, C, L), and for how many images each counts.

    `sets` are the groups of rows, then the devices in none. Groups' means are drawn to the fleet's by as much as sets
    are alike. No device counts for more images of a class than the median one of its group: groups are small.
    """
    number, classes, _ = shape
    if not number:
        return np.zeros(shape, np.float32), []
    names, rows = np.unique(sets * classes + labels, return_inverse=True)
    images = _at_most_median(images, rows)
    means, totals = class_means(offsets, rows, images, num_classes=len(names))
    between = _kappa(means, names % classes, totals, variance)
    grouped = sets < number
    within = _kappa((offsets - means[rows])[grouped], rows[grouped], images[grouped], variance)
    drawn = np.zeros((number * classes, shape[2]), np.float32)
    in_group = names < len(drawn)
    drawn[names[in_group]] = means[in_group] * (totals / (totals + between))[in_group, None]
    return drawn.reshape(shape), [within] * number


def _iterate(tensors: "Tensors", num_classes: int) -> "dict[str, Tensor]":
    """Return the directions after one orthogonal iteration, each as long as its deviation, and the deviation in all.

    Their outer products add up to the leading part of the covariance of images about their class's mean; the loss is
    the share of the variance that they leave.
    """
    import torch

    from aggregator.algorithms.layers import one_hot

    feature = tensors["feature"]
    members = one_hot(tensors["labels"], num_classes).to(feature.dtype)
    images = members.sum(dim=0)
    counts, freedom = images.clamp_min(1), (images - 1).clamp_min(0).sum()
    seen = feature @ _orthonormal(tensors["directions"]).T
    away = seen - members @ (members.T @ seen / counts[:, None])
    scatter = away.T @ feature / freedom.clamp_min(1)
    lengths = (scatter * scatter).sum(dim=1, keepdim=True).sqrt()
    supported = (torch.arange(scatter.shape[0]) + 1) * _SUPPORT <= freedom
    directions = scatter / lengths.clamp_min(1e-12).sqrt() * supported[:, None]
    sums = members.T @ feature
    squares = (feature[:, None] @ feature[:, :, None]).sum()  # without a copy of the features
    within = squares - (sums * sums / counts[:, None]).sum()
    variance = torch.where(within > _NEGLIGIBLE * squares, within / freedom.clamp_min(1), 0.0).reshape(1)
    explained = (directions * directions).sum() / variance.sum().clamp_min(1e-12)
    return {
        "loss": (1 - explained).clamp_min(0),
        "next_directions": directions,
        "next_deviation": variance.sqrt(),
    }


def _orthonormal(rows: "Tensor") -> "Tensor":
    """Return orthonormal rows that span the same space (Gram-Schmidt); zeros in place of dependent ones."""
    import torch

    basis = rows[:0]
    for number in range(rows.shape[0]):
        row = rows[number : number + 1]
        whole = (row * row).sum()
        for _ in range(2):  # once leaves what rounding adds
            row = row - (row @ basis.T) @ basis
        left = (row * row).sum()
        unit = row / left.clamp_min(1e-30).sqrt()
        basis = torch.cat([basis, torch.where(left > _NEGLIGIBLE * whole, unit, torch.zeros_like(unit))])
    return basis


def _head(settings: Hierarchical, tensors: "Tensors") -> "dict[str, Tensor]":
    """Return log-likelihoods of the features in the device's classes, divided by `tau`, with its class prior.

    A class's mean on the device is that of its own images and the one of its group or the fleet, which counts for
    kappa images.
    """
    from aggregator.algorithms.layers import log_prior

    present, basis, own = tensors["present"], tensors["basis"], tensors["local_counts"]
    group = _nearest(tensors)
    shared = group @ tensors["kappa"] * present
    common = (group[:, None, None] * tensors["means"]).sum(dim=0)
    # Numbers are small, and rounding with them, about the center of all classes.
    center = present @ tensors["means"][0] / present.sum().clamp_min(1)
    weighted = own[:, None] * tensors["local_prototypes"] + shared[:, None] * common
    means = weighted / (own + shared).clamp_min(1e-12)[:, None] - center
    feature = tensors["feature"] - center
    along = means @ basis.T
    similarity = feature @ means.T - (feature @ basis.T) @ along.T
    lengths = (means * means).sum(dim=1) - (along * along).sum(dim=1)
    logits = (similarity - lengths / 2) * tensors["scale"] / settings.tau
    if settings.prior:
        logits = logits + log_prior(own)
    logits = logits.where(own + shared > 0, ABSENT_LOGIT)
    return {"logits": logits, "probabilities": logits.softmax(dim=1)}


def _nearest(tensors: "Tensors") -> "Tensor":
    """Return 1 for the group that the device's own means are most likely of, or for the fleet (place 0), else 0, (G,).

    They differ from those of their group by the variance of their few images, and that of devices.
    """
    import torch

    own = tensors["local_counts"]
    squares = (tensors["means"] - tensors["local_prototypes"]).square().sum(dim=2)
    spread = (1 / own.clamp_min(1e-3) + 1 / tensors["kappa"][:, None]) * tensors["variance"].clamp_min(1e-12)
    costs = (torch.where(own > 0, 1.0, 0.0) * (squares / spread + spread.log())).sum(dim=1)
    return (torch.arange(costs.shape[0]) == costs.argmin()).to(costs.dtype)
