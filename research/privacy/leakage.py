"""Membership of single images in prototypes, inferred by an attacker with images of the same kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protocol.wire.quantization import dequantize, quantize
from protofleet.prototypes import average_class

CANDIDATES = 100
"""Images of a class among which the attacker searches the one in a prototype."""
LUMINANCE = np.array([0.299, 0.587, 0.114], dtype=np.float32)
LEAST_VARIANCE = 0.01
"""Relative to the mean; a direction in which public features hardly vary would count for too much."""


@dataclass(frozen=True)
class Release:
    """Prototypes (m, L) as a server receives them, and what it does not receive: which images are in which."""

    values: NDArray[np.float32]
    """Rounded as on the wire."""
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]
    noise: NDArray[np.float64]
    """Deviation of the noise added to each prototype's values, which the attacker knows."""
    members: tuple[NDArray[np.intp], ...]
    """The rows of each prototype's images, among all."""

    @classmethod
    def without_noise(
        cls, values: NDArray[np.float32], labels: NDArray[np.int64], members: Sequence[NDArray[np.intp]]
    ) -> Self:
        """Return a release of averages of these images."""
        counts = np.array([len(images) for images in members])
        return cls(rounded(values), labels, counts, noise=np.zeros(len(counts)), members=tuple(members))


@dataclass(frozen=True)
class Knowledge:
    """Distribution of features around the mean of their class, estimated from public features."""

    centers: NDArray[np.float32]
    axes: NDArray[np.float32]
    """A column for each principal axis within classes, (L, L)."""
    variances: NDArray[np.float32]
    """Along the axes, (L,); none is near zero."""

    def along(self, features: NDArray[np.float32], labels: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return deviations (n, L) from the centers of classes (n,), along the axes."""
        return ((features - self.centers[labels]) @ self.axes).astype(np.float32)

    def denoise(self, release: Release) -> NDArray[np.float32]:
        """Return the best linear estimate (m, L) of prototypes before noise was added."""
        spread = self.variances / release.counts[:, None]
        kept = self.along(release.values, release.labels) * (spread / (spread + release.noise[:, None] ** 2))
        return (self.centers[release.labels] + kept @ self.axes.T).astype(np.float32)


@dataclass(frozen=True)
class Linkage:
    """Success in inferring which images are in a prototype."""

    auc: float
    """Probability that an image in a prototype scores higher than a non-member of its class; chance is 0.5."""
    top_1: float
    """Share of the prototypes whose member scores highest among CANDIDATES."""


Score: TypeAlias = Callable[[int, NDArray[np.intp]], NDArray[np.float64]]
"""From the number of a prototype and the rows of images (n,) to how likely these are in it, (n,)."""


def release_prototypes(
    features: NDArray[np.float32], labels: NDArray[np.int64], rows: NDArray[np.intp], *, batch: int, seed: int
) -> Release:
    """Average the device's rows of the features (n, L) by its own function, without outlier filtering.

    A prototype has `batch` images, B; a class has at least that many.
    """
    values, classes, members = [], [], []
    for label in np.unique(labels[rows]):
        own = rows[labels[rows] == label]
        averages, shares = (
            average_class(part, batch=batch, rng=np.random.default_rng([seed, int(label)]))[0]
            for part in (features[own], np.eye(len(own), dtype=np.float32))
        )
        values.append(averages)
        classes += [label] * len(averages)
        members += [own[share > 0] for share in shares]
    return Release.without_noise(np.concatenate(values), np.array(classes), members)


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a device's prototypes (m, L) as the aggregator receives them."""
    return dequantize(*quantize(values.astype(np.float16)))


def study(features: NDArray[np.float32], labels: NDArray[np.int64]) -> Knowledge:
    """Estimate class means and the pooled covariance within classes from public features (n, L)."""
    classes = int(labels.max()) + 1
    centers = np.stack([features[labels == label].mean(axis=0) for label in range(classes)])
    deviations = features - centers[labels]
    variances, axes = np.linalg.eigh(deviations.T @ deviations / len(deviations))
    floor = LEAST_VARIANCE * variances.mean()
    return Knowledge(centers, axes.astype(np.float32), (variances.clip(0) + floor).astype(np.float32))


def by_cosine(release: Release, features: NDArray[np.float32]) -> Score:
    """Score an image by the cosine of its feature to the prototype, which needs no knowledge."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True).clip(1e-12)

    def score(prototype: int, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        direction = release.values[prototype] / max(float(np.linalg.norm(release.values[prototype])), 1e-12)
        cosines: NDArray[np.float64] = (unit[rows] @ direction).astype(np.float64)
        return cosines

    return score


def by_likelihood(
    release: Release,
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    knowledge: Knowledge,
) -> Score:
    """Score by the log of the ratio of likelihoods, Gaussian, that an image is in a prototype and that it is not.

    With n images in it, one of them f, a prototype lies around mu + (f - mu) / n instead of mu, with
    covariance S / n and noise: up to a constant, (f - mu)' C^-1 (P - mu) / n - (f - mu)' C^-1 (f - mu) / (2 n^2).
    """
    images = knowledge.along(features, labels)
    prototypes = knowledge.along(release.values, release.labels)

    def score(prototype: int, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        count = release.counts[prototype]
        precision = 1 / (knowledge.variances / count + release.noise[prototype] ** 2)
        shift = images[rows] / count
        ratios: NDArray[np.float64] = (shift * precision) @ prototypes[prototype] - (
            (shift**2) @ precision
        ) / 2
        return ratios

    return score


def link(
    score: Score, release: Release, non_members: Mapping[int, NDArray[np.intp]], *, rng: np.random.Generator
) -> Linkage:
    """Measure how well a score distinguishes the images in each prototype from non-members of the same class.

    The AUC compares as many non-members as members, the other figure CANDIDATES - 1.
    """
    from sklearn.metrics import roc_auc_score

    scores: list[NDArray[np.float64]] = []
    truths: list[NDArray[np.bool_]] = []
    found = 0
    for prototype, members in enumerate(release.members):
        others = rng.permutation(non_members[int(release.labels[prototype])])
        inside, outside = score(prototype, members), score(prototype, others)
        found += bool(inside[rng.integers(len(inside))] > outside[: CANDIDATES - 1].max())
        outside = outside[: len(inside)]
        scores += [inside, outside]
        truths += [np.ones(len(inside), bool), np.zeros(len(outside), bool)]
    auc = float(roc_auc_score(np.concatenate(truths), np.concatenate(scores)))
    return Linkage(auc, found / len(release.members))


def best_ssim(image: NDArray[np.float32], images: NDArray[np.float32]) -> float:
    """Return the highest structural similarity (Wang et al. 2004, 7x7 windows) of one image to any of several.

    Values are from 0 to 1; colors are compared by their luminance.
    """
    from skimage.metrics import structural_similarity

    gray = _gray(image)
    return max(float(structural_similarity(gray, _gray(each), data_range=1.0)) for each in images)


def _gray(image: NDArray[np.float32]) -> NDArray[np.float32]:
    return image if image.ndim == 2 else image @ LUMINANCE
