"""Linear discriminant analysis from class means and deviations, with a shrunk covariance: a head in closed form."""

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.fedtc.head import Dense


def discriminant(
    centers: NDArray[np.float32], deviations: NDArray[np.float32], images: NDArray[np.number]
) -> Dense:
    """Return the linear discriminant of classes that share a covariance and are equally likely.

    The covariance S of the features within a class is shrunk to a multiple of the identity by the oracle approximating
    shrinkage of Chen, Wiesel, Eldar and Hero, "Shrinkage algorithms for MMSE covariance estimation" (2010), eq. 23
    without its terms of 2 / L. The logits are those of Gaussian classes, without what all classes share. Without
    deviations, this is the nearest class mean.

    The mean of few images is farther from all features than the class's true mean, which would cost rare classes
    images: its squared length, measured with the inverse of the shrunk covariance, is too large by tr(shrunk^-1 S) /
    images on average. The bias makes up for it (Moran and Murphy, "A closer look at two alternative methods of
    statistical discrimination", 1979). The trace is estimated by leaving one deviation out at a time.

    Args:
        centers: (C, L), the mean of each class.
        deviations: (m, L), of features from their class's center, as widely spread as the features of single images.
        images: (C,), the images in each center; a class without any is never predicted.
    """
    present = images > 0
    means = centers[present].astype(np.float64)
    middle = means.mean(axis=0)
    means -= middle
    rows = deviations.astype(np.float64)
    size, freedom = rows.shape[1], len(rows) - len(means)
    squares = float((rows**2).sum())
    if freedom < 1 or squares == 0:
        # The spread within classes is unknown: as large as that between them.
        shared, weight, freedom = float((means**2).sum()) / max(len(means) - 1, 1) or 1.0, 0.0, 1
    else:
        shrinkage = _shrinkage(rows, freedom)
        shared, weight = shrinkage * squares / freedom / size, (1 - shrinkage) / freedom
    solved = _solve(rows, shared, weight, np.concatenate([means, rows]))
    directions, spread = solved[: len(means)], solved[len(means) :]
    lengths = (spread * rows).sum(axis=1)
    trace = float((lengths / (1 - np.minimum(weight * lengths, 1 - 1e-9))).sum()) / freedom
    constant = -(directions * means).sum(axis=1) / 2 + trace / images[present] / 2
    # The logits of the classes that are present then add up to 0, so that an absent one is never the highest.
    constant -= constant.mean()
    head = Dense(
        np.zeros(centers.shape, dtype=np.float32), np.full(len(centers), ABSENT_LOGIT, dtype=np.float32)
    )
    head.weight[present] = directions
    head.bias[present] = constant - directions @ middle
    return head


def _shrinkage(rows: NDArray[np.float64], freedom: int) -> float:
    """Return the share of the identity in the covariance R^T R / freedom of deviations R (m, L)."""
    gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
    squares, squared_trace = float((gram**2).sum()), float(np.trace(gram)) ** 2
    below = (freedom + 1) * (squares - squared_trace / rows.shape[1])
    return min(1.0, (squares + squared_trace) / below) if below > 0 else 1.0


def _solve(
    rows: NDArray[np.float64], shared: float, weight: float, right: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return right (k, L) times the inverse of (shared I + weight R^T R), by the smaller of two systems."""
    if not weight:
        return right / shared
    if len(rows) >= rows.shape[1]:
        matrix = shared * np.eye(rows.shape[1]) + weight * (rows.T @ rows)
        return np.asarray(np.linalg.solve(matrix, right.T).T)
    inner = np.eye(len(rows)) / weight + rows @ rows.T / shared
    return np.asarray((right - np.linalg.solve(inner, rows @ right.T / shared).T @ rows) / shared)
