"""Regularized discriminant analysis from class means and deviations: heads in closed form."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.fedtc.arrays import blocks
from aggregator.algorithms.fedtc.head import Dense

TINY = 1e-30
"""Keeps a divisor above zero."""


def discriminants(
    centers: NDArray[np.float32],
    deviations: NDArray[np.float32],
    images: NDArray[np.number],
    shares: Sequence[float],
    *,
    common: NDArray[np.bool_] | None = None,
    regressions: bool = False,
) -> Iterator[Dense]:
    """Yield linear discriminants of classes that share a covariance and are equally likely, one for each share.

    With `regressions`, the ridge regression to one-hot labels with the same covariance follows each (`_regression`).

    The covariance S of the features within a class is shrunk to a multiple of the identity by the oracle approximating
    shrinkage of Chen, Wiesel, Eldar and Hero, "Shrinkage algorithms for MMSE covariance estimation" (2010), eq. 23
    without its terms of 2 / L; of what this leaves of S, a share remains (Friedman, "Regularized discriminant
    analysis", 1989). The logits are those of Gaussian classes, without what all classes share. A share of 0 makes the
    nearest class mean, as do missing deviations.

    The mean of few images is farther from all features than the class's true mean, which would cost rare classes
    images: its squared length, measured with the inverse of the shrunk covariance, is too large by tr(shrunk^-1 S) /
    images on average. The bias makes up for it (Moran and Murphy, "A closer look at two alternative methods of
    statistical discrimination", 1979). The trace is estimated by leaving one deviation out at a time, and with the
    least mean squared error: divided by the degrees of freedom plus 2. A true squared length is not negative: otherwise
    a class that one device states few images of, in the middle of the others, would be predicted for every image.

    A class that is not common may be one device's own. Its mean is shrunk towards the middle of the common ones, by the
    share of its squared length that chance explains (James and Stein, "Estimation with quadratic loss", 1961): the bias
    alone would let a mean of few images take whatever lies on its side.

    Args:
        centers: (C, L), the mean of each class.
        deviations: (m, L), of features from their class's center, as widely spread as the features of single images.
        images: (C,), the images in each center; a class without any is never predicted.
        shares: from 0 to 1.
        common: (C,), the classes that several devices have; None if all are. Regressions do not limit the others.
        regressions: yield two heads for each share.
    """
    present = images > 0
    means = centers[present].astype(np.float64)
    is_common = np.ones(len(means), dtype=np.bool_) if common is None else common[present]
    middle = means[is_common].mean(axis=0)
    means -= middle
    size, freedom = deviations.shape[1], len(deviations) - len(means)
    axes, squares = _principal_axes(deviations)
    if known := freedom > 0 and len(axes) > 0:
        variance, remaining = squares.sum() / freedom / size, 1 - _shrinkage(squares, freedom, size)
    else:
        # The spread within classes is unknown: as large as that between them.
        variance, remaining = float((means**2).sum()) / size / max(len(means) - 1, 1) or 1.0, 0.0
    on_axes = means @ axes.T
    remaining_shares = remaining * np.array(shares)
    weights, shared_parts = remaining_shares / max(freedom, 1), (1 - remaining_shares) * variance
    all_variances = shared_parts[:, None] + weights[:, None] * squares
    all_lengths = _squared_lengths(deviations, axes, all_variances)
    for weight, shared, variances, lengths in zip(
        weights, shared_parts, all_variances, all_lengths, strict=True
    ):
        directions = (means - on_axes * (weight * squares / variances) @ axes) / shared
        trace = float((lengths / (1 - np.minimum(weight * lengths, 1 - 1e-9))).sum()) / (freedom + 2) * known
        squared_lengths = (directions * means).sum(axis=1)
        true_lengths = np.maximum(squared_lengths - trace / images[present], 0)
        shrinkage = np.where(is_common, 1.0, true_lengths / np.maximum(squared_lengths, TINY))
        yield head_of_present(directions * shrinkage[:, None], -shrinkage * true_lengths / 2, middle, present)
        if regressions:
            excess, rows = (squared_lengths - true_lengths) / 2, len(deviations) / len(means)
            yield head_of_present(
                *_regression(directions, excess, directions @ means.T * weight * rows), middle, present
            )


def _regression(
    directions: NDArray[np.float64], excess: NDArray[np.float64], products: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the ridge regression's directions (K, L) and constants (K,), but for a factor.

    Of N features with the scatter S within classes, as many of each of the K classes, and class means with the rows M
    about their mean, the regression with the ridge lambda is W' = N/K (I + N/K M A^-1 M')^-1 M A^-1, A = S + lambda I
    (`statistics.ridge.solve`). Lambda is the ridge that makes A a multiple of the shrunk covariance.

    Args:
        directions: (K, L), M times the inverse of the shrunk covariance.
        excess: (K,), half of what the squared length of each mean is too large by, because it is of few images.
        products: (K, K), N/K M A^-1 M'.
    """
    both = np.column_stack([directions, excess])
    both[:] = np.linalg.solve(np.eye(len(products)) + products, both)
    return both[:, :-1], both[:, -1]


def head_of_present(
    directions: NDArray[np.float64],
    constant: NDArray[np.float64],
    middle: NDArray[np.float64],
    present: NDArray[np.bool_],
) -> Dense:
    """Return the layer of the directions (K, L) and constants (K,) of the present classes, from the middle (L,)."""
    # The logits of the classes that are present then add up to 0, so that an absent one is never the highest.
    directions = directions - directions.mean(axis=0)
    constant = constant - constant.mean()
    matrix = np.zeros((len(present), len(middle)), dtype=np.float32)
    bias = np.full(len(present), ABSENT_LOGIT, dtype=np.float32)
    matrix[present] = directions
    bias[present] = constant - directions @ middle
    return Dense(matrix, bias)


def _principal_axes(rows: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return orthonormal axes (r, L) that span rows (m, L), and the sum of squares along each (r,)."""
    if wide := len(rows) < rows.shape[1]:
        few = rows.astype(np.float64)
        squares, vectors = np.linalg.eigh(few @ few.T)
    else:
        products = np.zeros((rows.shape[1], rows.shape[1]))
        for block in blocks(len(rows)):
            part = rows[block].astype(np.float64)
            products += part.T @ part
        squares, vectors = np.linalg.eigh(products)
    real = squares > squares.max(initial=0) * 1e-10
    squares, vectors = squares[real], vectors[:, real]
    return (vectors.T @ few / np.sqrt(squares)[:, None] if wide else vectors.T), squares


def _squared_lengths(
    rows: NDArray[np.float32], axes: NDArray[np.float64], variances: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the squared length of each of m rows on axes (r, L), for each of S variances (S, r) of these: (S, m)."""
    lengths = np.empty((len(variances), len(rows)))
    for block in blocks(len(rows)):
        squared = (rows[block].astype(np.float64) @ axes.T) ** 2
        lengths[:, block] = (squared @ (1 / variances).T).T
    return lengths


def _shrinkage(squares: NDArray[np.float64], freedom: int, size: int) -> float:
    """Return the share of the identity in a covariance with eigenvalues `squares` / freedom and zeros."""
    quartics, squared_trace = float((squares**2).sum()), float(squares.sum()) ** 2
    below = (freedom + 1) * (quartics - squared_trace / size)
    return min(1.0, (quartics + squared_trace) / below) if below > 0 else 1.0
