"""Ridge regression to one-hot labels from sums: the same head as from all rows, whichever device has them.

"AFL: A single-round analytic approach for federated learning with pre-trained models" (He et al. 2024,
arXiv 2405.16240) and "Accurate and efficient federated learning with closed-form classifiers" (Fani et al.,
ICML 2024, Fed3R) add such sums; "RanPAC" (McDonnell et al., NeurIPS 2023) puts random ReLU features beside them. Ours
is the regression of a fleet in which all classes have as many images: theirs rarely predicts rare classes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.fedtc.block_head import temperature_of
from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.statistics.moments import (
    ROUNDING,
    Moments,
    class_means,
    squares_of,
    within_scatter,
)
from protocol.errors import ProtofleetError

STRENGTHS = tuple(10.0 ** (quarter / 4) for quarter in range(-16, 9))
"""Ridges to choose from, relative to the mean variance of a row's values within a class."""

MAX_FREEDOM = 1 / 3
"""Degrees of freedom, relative to the rows, that a ridge may leave: cross-validation prefers too many of few rows."""

LEAST_EXPLAINED = 0.5
"""Share of the labels' variance below which the discriminant is better, by images that no device had.

It is 0.36 to 0.44 on CIFAR-10, where the discriminant gains 1.1 points, and 0.60 to 0.73 on PACS and Fashion-MNIST,
where it gains -0.9 to 0.0.
"""

TEMPERATURE = 0.12
"""Divisor of the regression's values that makes them logits.

The sums do not determine it: on validation images of Fashion-MNIST the best was 0.116 with 5,000 images and 0.130 with
500.
"""


@dataclass(frozen=True, kw_only=True)
class Ridge:
    """A head's last layer and the figures of its regression.

    Attributes:
        layer: rows (n, D) to logits (n, C).
        temperature: that its logits are divided by.
        strength: the chosen ridge, one of STRENGTHS.
        error: the mean squared error of one-hot labels that cross-validation expects, finite.
        degrees_of_freedom: the number of parameters, per class, that the ridge leaves.
    """

    layer: Dense
    temperature: float
    strength: float
    error: float
    degrees_of_freedom: float


APART = 2.0
"""Deviations that separate the images of a common class from where another class is predicted for them."""


def solve(total: Moments, *, common: NDArray[np.bool_] | None = None) -> Ridge:
    """Return the regression that generalized cross-validation finds best.

    With the scatter S of N rows within classes, A = S + lambda I, class means m_c and their mean m:

        W = A^-1 M' (I + N/C M A^-1 M')^-1 N/C,  b = 1/C - m' W,  where M has the rows m_c - m

    is the ridge regression of a fleet with N/C rows of each of C classes. Lambda is the one of STRENGTHS, times
    tr(S) / D, with the least N RSS / (N - df - 1)^2 (Golub, Heath and Wahba 1979) for the rows as they are, of those
    with df <= N MAX_FREEDOM; the strongest if there is none. RSS and the degrees of freedom df follow from the sums.

    Where cross-validation expects it to explain less than LEAST_EXPLAINED of the labels' variance, classes overlap, and
    the linear discriminant of the same scatter takes its place: N A^-1 M', with thresholds half-way between the means.

    All classes count alike, however few images they have. So that one device with classes of its own does not take the
    images of others for them, the bias of a class that is not `common` (C,) is lowered until the mean of each common
    class is APART deviations on its own side. With None, all classes are common.

    Raises:
        ProtofleetError: there are no rows, or their sums are not those of any rows.
    """
    present = total.class_counts > 0
    if not present.any():
        raise ProtofleetError("there are no images to make a head of")
    spectrum = _Spectrum(total)
    most = MAX_FREEDOM * total.rows
    few = (strength for strength in STRENGTHS if spectrum.degrees_of_freedom(strength) <= most)
    chosen = min(few, key=spectrum.expected_error, default=STRENGTHS[-1])
    solution = spectrum.discriminant if spectrum.overlap(chosen) else spectrum.balanced
    directions, constants, temperature = solution(chosen)
    weight = np.zeros((len(present), total.size))
    weight[present] = directions.T
    bias = np.full(len(present), ABSENT_LOGIT)
    offsets = constants - spectrum.middle @ directions
    if common is not None:
        offsets -= spectrum.excess(directions, constants, common[present])
    bias[present] = offsets / temperature
    return Ridge(
        layer=Dense((weight / temperature).astype(np.float32), bias.astype(np.float32)),
        temperature=temperature,
        strength=chosen,
        error=spectrum.expected_error(chosen),
        degrees_of_freedom=spectrum.degrees_of_freedom(chosen),
    )


class _Spectrum:
    """The scatter within classes by its eigenvectors, from which every ridge's regression follows."""

    def __init__(self, total: Moments) -> None:
        from scipy.linalg import eigh

        present = total.class_counts > 0
        images = max(int(total.counts.sum()), 1)
        self._rows = total.rows
        counts = total.class_counts[present].astype(np.float64)
        self._share = counts / counts.sum()
        """Of the images, each class's (K,)."""
        means = class_means(total)[present]
        self.middle = means.mean(axis=0)
        """The mean of the class means (D,)."""
        scatter = within_scatter(total) / images * total.rows
        # Without any scatter, one as large as that between the means.
        self._mean_square = (
            float(np.trace(scatter)) or float(np.square(means - self.middle).sum())
        ) / total.size
        squares, axes = eigh(scatter, overwrite_a=True, check_finite=False, driver="evd")
        # Each device's are checked to ROUNDING, and add up; this has its own rounding as well.
        if squares[0] < -10 * ROUNDING * squares_of(total) / images * total.rows:
            raise ProtofleetError(
                "the sums are not those of any features: the scatter within classes is negative"
            )
        self._squares = np.maximum(squares, 0.0)
        self._axes = axes
        self._means = (means - self.middle) @ axes
        """The means' deviations from their mean, along the axes (K, D)."""

    def balanced(self, strength: float) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Return the regression's directions (D, K), constants (K,) and temperature."""
        classes = len(self._means)
        even = np.full(classes, self._rows / classes)
        directions = self._axes @ self._regression(self._means, even, strength)
        return directions, np.full(classes, 1 / classes), TEMPERATURE

    def discriminant(self, strength: float) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Return the discriminant's directions (D, K), constants (K,) and temperature."""
        inverse = 1 / (self._squares + self._ridge(strength))
        along = self._rows * (self._means * inverse).T
        scores = self._means @ along
        # The mean of few images is too long (`fedtc.discriminant`).
        excess = float(self._squares @ inverse) / (self._share * self._rows)
        constants = -np.maximum(np.diag(scores) - excess, 0) / 2
        return self._axes @ along, constants, temperature_of(scores + constants)

    def overlap(self, strength: float) -> bool:
        """Return True if the regression explains less than LEAST_EXPLAINED of the labels' variance; two classes never.

        Of two classes, both heads are the same.
        """
        variance = 1 - float((self._share**2).sum())
        return len(self._means) > 2 and self.expected_error(strength) > (1 - LEAST_EXPLAINED) * variance

    def excess(
        self, directions: NDArray[np.float64], constants: NDArray[np.float64], common: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Return how far to lower the scores of classes that are not common (K,), for directions (D, K)."""
        excess = np.zeros(len(common))
        if np.count_nonzero(common) > 1 and not common.all():
            along = self._axes.T @ directions
            scores = self._means @ along + constants
            products = (along * self._squares[:, None]).T @ along / self._rows
            squares = np.diag(products)
            deviations = np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0.0))
            gains = scores - np.diag(scores)[:, None] + APART * deviations
            excess[~common] = np.maximum(gains[common][:, ~common].max(axis=0), 0.0)
        return excess

    def expected_error(self, strength: float) -> float:
        """Return the generalized cross-validation of the regression on the rows as they are."""
        means, rows = self._centered(), self._share * self._rows
        weights = self._regression(means, rows, strength)
        fitted = means @ weights
        labels = self._rows * (1 - float((self._share**2).sum()))
        explained = float((fitted * rows[:, None]).trace())
        squares = float((weights**2 * self._squares[:, None]).sum() + (rows[:, None] * fitted**2).sum())
        residual = max(labels - 2 * explained + squares, 0.0)
        freedom = max(self._rows - self.degrees_of_freedom(strength) - 1, ROUNDING)
        return self._rows * residual / freedom**2

    def degrees_of_freedom(self, strength: float) -> float:
        """Return tr((G + lambda)^-1 G), with the scatter G of the rows about their mean."""
        ridge, means, rows = self._ridge(strength), self._centered(), self._share * self._rows
        inverse = 1 / (self._squares + ridge)
        # Woodbury: the K means change the trace of the inverse by a matrix of their size.
        inner = np.diag(1 / rows) + (means * inverse) @ means.T
        change = np.trace(np.linalg.solve(inner, (means * inverse**2) @ means.T))
        return float(len(inverse) - ridge * (inverse.sum() - change))

    def _centered(self) -> NDArray[np.float64]:
        """Return the means' deviations from the mean of all rows, along the axes (K, D)."""
        return np.asarray(self._means - self._share @ self._means)

    def _ridge(self, strength: float) -> float:
        return strength * (self._mean_square or 1.0)

    def _regression(
        self, means: NDArray[np.float64], rows: NDArray[np.float64], strength: float
    ) -> NDArray[np.float64]:
        """Return the directions (D, K) for class means (K, D) of that many rows each (K,), along the axes."""
        divided = (means / (self._squares + self._ridge(strength))).T
        inner = np.eye(len(rows)) + rows[:, None] * (means @ divided)
        return np.asarray(divided @ np.linalg.solve(inner, np.diag(rows)))
