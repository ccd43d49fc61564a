"""Accuracy of features by cross-validation, with intervals that allow for training sets that overlap."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import OneShot
from aggregator.config.schema import Robust
from protocol.errors import ConfigError
from protofleet.simulation import algorithms
from protofleet.simulation.dataset import Dataset
from protofleet.simulation.fleet import Client, pooled
from protofleet.simulation.partitions import Partition
from protofleet.simulation.simulate import deal

NEAREST_MEAN, LOGISTIC = "nearest mean", "logistic"

LEVEL = 0.95
"""Of intervals."""

REGULARIZATION = 0.01
"""C of the logistic regression of standardized features."""


@dataclass(frozen=True)
class Estimate:
    """A mean over the folds of all draws, with its standard error.

    The variance is the one that Nadeau and Bengio ("Inference for the generalization error", Machine Learning 52, 2003,
    section 5.3) correct for training sets that overlap, by 1 / J + test images / training images in place of 1 / J.
    """

    values: NDArray[np.float64]
    """One for each fold of each draw, (J,)."""
    folds: int

    @property
    def mean(self) -> float:
        """Their mean."""
        return float(self.values.mean())

    @property
    def error(self) -> float:
        """The corrected standard error of the mean."""
        factor = 1 / len(self.values) + 1 / (self.folds - 1)
        return float(np.sqrt(factor * self.values.var(ddof=1)))

    @property
    def margin(self) -> float:
        """Half the width of the interval with LEVEL, by Student's t distribution with J - 1 degrees of freedom."""
        from scipy.stats import t

        return float(t.ppf((1 + LEVEL) / 2, len(self.values) - 1) * self.error)

    def minus(self, other: "Estimate") -> "Estimate":
        """Return the difference from an estimate on the same folds."""
        return Estimate(self.values - other.values, self.folds)


@dataclass(frozen=True)
class Evaluation:
    """Results of one classifier."""

    accuracy: Estimate
    up_bytes: float
    """Of a device's upload, mean over devices and folds."""
    found: NDArray[np.int64]
    """Images of the first draw, each held out once, by their class and the class that is found, (C, C)."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Images to evaluate on, and the seed by which the others are dealt out to devices."""

    kept_back: NDArray[np.bool_]
    """True for the images of this fold, (n,)."""
    folds: int
    seed: Sequence[int]


def split(labels: NDArray[np.int64], *, folds: int, draws: int, seed: int) -> list[Split]:
    """Divide images (n,) into folds with equal shares of each class, in each draw anew.

    Raises:
        ConfigError: there is one class, or a class has fewer images than there are folds.
    """
    counts = np.bincount(labels)
    if len(counts) < 2:
        raise ConfigError(
            "expected images of two classes or more, got one: add a folder for each other class"
        )
    if counts.min() < folds:
        raise ConfigError(
            f"expected at least {folds} images of each class, one for each fold, got {counts.min()}: add images, or "
            "lower --folds"
        )
    made = []
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        fold_of = np.empty(len(labels), np.int64)
        for label in range(len(counts)):
            members = rng.permutation(np.flatnonzero(labels == label))
            fold_of[members] = (np.arange(len(members)) + rng.integers(folds)) % folds
        made += [
            Split(kept_back=fold_of == fold, folds=folds, seed=(seed, draw, fold)) for fold in range(folds)
        ]
    return made


def cross_validate(
    data: Dataset,
    splits: Sequence[Split],
    methods: Sequence[str | OneShot],
    *,
    devices: int = 1,
    partition: Partition = Partition("iid"),  # noqa: B008 - frozen
    on_split: Callable[[], None] = lambda: None,
) -> dict[str, Evaluation]:
    """Return the evaluation of each method, by its name: NEAREST_MEAN, LOGISTIC or one-shot algorithms."""
    named = {each if isinstance(each, str) else each.name: each for each in methods}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in named}
    found = {name: np.zeros((len(data.classes),) * 2, np.int64) for name in named}
    for number, each in enumerate(splits):
        rng = np.random.default_rng(each.seed)
        clients = deal(data, partition, kept_back=each.kept_back, devices=devices, rng=rng)
        members = [client for client in clients if len(client.train_labels)]
        truth = data.labels[each.kept_back]
        for name, method in named.items():
            predicted, size = _predicted(method, members)
            results[name].append((float((predicted == truth).mean()), size))
            if number < each.folds:
                np.add.at(found[name], (truth, predicted), 1)
        on_split()
    evaluations = {}
    for name, pairs in results.items():
        accuracies, sizes = np.array(pairs).T
        evaluations[name] = Evaluation(
            Estimate(accuracies, splits[0].folds), float(sizes.mean()), found[name]
        )
    return evaluations


_Predicted = tuple[NDArray[np.int64], float]
"""The classes of the test images, (m,), and the bytes of a device's upload."""


def _predicted(method: str | OneShot, clients: Sequence[Client]) -> _Predicted:
    if isinstance(method, OneShot):
        trained = algorithms.train(method, clients, classes=0, robust=Robust())
        return trained.logits[0].argmax(axis=1), trained.up_bytes
    return {NEAREST_MEAN: _nearest_mean, LOGISTIC: _logistic}[method](clients)


def _nearest_mean(clients: Sequence[Client]) -> _Predicted:
    from sklearn.neighbors import NearestCentroid

    return _in_one_place(NearestCentroid(), clients)


def _logistic(clients: Sequence[Client]) -> _Predicted:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    regression = LogisticRegression(C=REGULARIZATION, max_iter=1000, tol=1e-3)
    return _in_one_place(make_pipeline(StandardScaler(), regression), clients)


def _in_one_place(model: Any, clients: Sequence[Client]) -> _Predicted:
    """Return what a model of scikit-learn predicts that is trained on all features."""
    features, _ = pooled(clients)
    return model.fit(features.train, features.train_labels).predict(features.test), 0.0
