"""Heads in closed form of the sums of all devices' rows: AFL, FedCGS and GH-LDA.

AFL: He et al., "AFL: A single-round analytic approach for federated learning with pre-trained models", CVPR 2025.
FedCGS: Guan, Zhou, Gu, "Capture global feature statistics for one-shot federated learning", AAAI 2025.
GH-LDA: Turazza, Picone, Mamei, "The Gaussian-Head OFL family: one-shot federated learning from client global
statistics", ICLR 2026.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.graphs.head_export import mapped
from protocol.wire.codec import encode
from protofleet.simulation.fleet import Features
from protofleet.simulation.statistics import ROWS_PER_RUN, sums_submission

Array = NDArray[np.float64]
Head = tuple[Array, Array]
"""Weights (D, C) and biases (C,)."""

ALMOST_NONE = 1e-9
"""In place of no ridge: rows have nearly the mean 0, so that one direction is nearly without values."""


def rows_of(features: Features) -> Features:
    """Return the rows of `statistics` in place of features, of training and test images."""
    feature_map = FeatureMap(features.train.shape[1], 0, 0, normalized=features.normalized)
    train, test = (
        np.concatenate(
            [mapped(feature_map, part[at : at + ROWS_PER_RUN]) for at in range(0, len(part), ROWS_PER_RUN)]
        )
        for part in (features.train, features.test)
    )
    return replace(features, train=train, test=test)


@dataclass(frozen=True)
class Sums:
    """The server's sums over all devices."""

    square: Array
    """Of the products of values, (D, D)."""
    of_classes: Array
    """Of the rows of each class, (D, C)."""
    counts: Array
    """Images of each class, (C,)."""


def sums_of(rows: NDArray[np.floating], labels: NDArray[np.int64]) -> Sums:
    """Return the sums of rows (n, D)."""
    of_class = np.eye(int(labels.max()) + 1, dtype=rows.dtype)[labels]
    square, of_classes = ((rows.T @ each).astype(np.float64) for each in (rows, of_class))
    return Sums(square, of_classes, np.bincount(labels).astype(np.float64))


def ridge(square: Array, of_classes: Array, strength: float) -> Array:
    """Return the weights (D, C) of the regression to one-hot labels."""
    from scipy.linalg import solve

    return np.asarray(solve(square + strength * np.eye(len(square)), of_classes, assume_a="pos"), np.float64)


def afl(sums: Sums, strength: float) -> Head:
    """Return the regression without an intercept, whose ridge is relative to the mean square of the rows' values."""
    weight = ridge(sums.square, sums.of_classes, strength * _scale(sums.square))
    return weight, np.zeros(len(sums.counts))


def fedcgs(sums: Sums, strength: float) -> Head:
    """Return the Gaussian head of the covariance about the mean of all images, with a ridge relative to its mean."""
    number, total = sums.counts.sum(), sums.of_classes.sum(axis=1)
    covariance = (sums.square - np.outer(total, total) / number) / (number - 1)
    return _gaussian(sums, covariance, strength * _scale(covariance))


def gh_lda(sums: Sums, strength: float) -> Head:
    """Return the discriminant of the covariance within classes, shrunk towards a multiple of the identity."""
    means, number = _means(sums), sums.counts.sum()
    within = (sums.square - (means * sums.counts) @ means.T) / (number - len(sums.counts))
    return _gaussian(sums, (1 - strength) * within, strength * _scale(within))


def accuracy_of(rows: Features, head: Head) -> float:
    """Return the share of test images with the greatest score for their class."""
    weight, bias = head
    return float(((rows.test @ weight + bias).argmax(axis=1) == rows.test_labels).mean())


def sums_bytes(rows: Features, owners: NDArray[np.int64]) -> float:
    """Return the bytes of all devices' sums of single images, packed and encoded as `statistics` does."""
    total = 0
    for client in np.unique(owners):
        mine = owners == client
        labels = rows.train_labels[mine]
        of_class = {
            int(label): rows.train[mine][labels == label].astype(np.int8) for label in np.unique(labels)
        }
        total += len(encode(sums_submission(of_class, task=bytes(32), images=len(labels))))
    return float(total)


def _scale(square: Array) -> float:
    return float(np.trace(square)) / len(square)


def _means(sums: Sums) -> Array:
    return sums.of_classes / sums.counts


def _gaussian(sums: Sums, covariance: Array, strength: float) -> Head:
    """Return the head of Gaussians with one covariance, by Bayes' rule with the classes' shares of the images."""
    means = _means(sums)
    weight = ridge(covariance, means, strength)
    return weight, np.log(sums.counts / sums.counts.sum()) - 0.5 * (means * weight).sum(axis=0)


HEADS: Mapping[str, tuple[Callable[[Sums, float], Head], float]] = MappingProxyType(
    {"AFL": (afl, ALMOST_NONE), "FedCGS": (fedcgs, ALMOST_NONE), "GH-LDA": (gh_lda, 0.05)}
)
"""A method's head, and the strength of its ridge or shrinkage as published."""
