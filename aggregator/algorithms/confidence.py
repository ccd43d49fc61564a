"""The calibration of a head by its correct predictions in bins of confidence. Pure.

A map of the best class's log-odds, not decreasing, by isotonic regression (Zadrozny and Elkan, "Transforming classifier
scores into accurate multiclass probability estimates", KDD 2002), or by a temperature where few images were counted.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.statistics.confidence import bin_centers

ISOTONIC_FROM = 100
"""Images from which isotonic regression is used instead of a temperature."""

MIN_LEAD = 1e-3
"""Least lead of the best logit over the second one that is left; one that has less is not changed."""

MAX_LEAD = 5_000.0
"""Lead from which a logit is not changed: the other classes are absent, with ABSENT_LOGIT."""

EXPONENTS = -3.0, 3.0
"""Bounds of the logarithm of the temperature's inverse."""


@dataclass(frozen=True)
class ConfidenceMap:
    """A piecewise linear function of log-odds, constant beyond its first and its last point.

    Attributes:
        inputs: log-odds, ascending, (K,), K >= 2.
        outputs: log-odds, not descending, (K,).
    """

    inputs: NDArray[np.float32]
    outputs: NDArray[np.float32]

    def mapped(self, log_odds: NDArray[np.floating]) -> NDArray[np.float64]:
        return np.asarray(np.interp(log_odds, self.inputs, self.outputs))


def fit_map(correct: NDArray[np.float64], images: NDArray[np.float64], *, classes: int) -> ConfidenceMap:
    """Return the map for the correct predictions and all in each bin, (CONFIDENCE_BINS,), of a head of C classes.

    `images` are not all zero; fractions of them are allowed.
    """
    centers, used = bin_centers(), images > 0
    if images.sum() < ISOTONIC_FROM:
        outputs = _with_temperature(centers, correct, images, classes)
        return ConfidenceMap(centers.astype(np.float32), outputs.astype(np.float32))
    from scipy.optimize import isotonic_regression

    accuracy = isotonic_regression(correct[used] / images[used], weights=images[used]).x
    margin = 0.5 / images.sum()  # no image makes an answer certain
    accuracy = np.clip(accuracy, margin, 1 - margin)
    inputs, outputs = centers[used], np.log(accuracy / (1 - accuracy))
    if len(inputs) == 1:
        inputs, outputs = inputs + np.array([0.0, 1.0]), np.repeat(outputs, 2)
    return ConfidenceMap(inputs.astype(np.float32), outputs.astype(np.float32))


def _with_temperature(
    log_odds: NDArray[np.float64],
    correct: NDArray[np.float64],
    images: NDArray[np.float64],
    classes: int,
) -> NDArray[np.float64]:
    """Return log-odds at the temperature at which the counts are most likely, where the other classes are alike.

    As if one more prediction were incorrect, of the mean confidence (Platt 1999), as in FedTC's calibration.
    """
    from scipy.optimize import minimize_scalar

    chance = -np.log(max(classes - 1, 1))
    missed = images - correct + images / images.sum()

    def cost(exponent: float) -> float:
        values = np.exp(exponent) * (log_odds - chance) + chance
        return float((correct * np.logaddexp(0, -values) + missed * np.logaddexp(0, values)).sum())

    solution = minimize_scalar(cost, bounds=EXPONENTS, method="bounded")
    return np.asarray(np.exp(solution.x) * (log_odds - chance) + chance, np.float64)


def calibrated(logits: NDArray[np.float32], confidence: ConfidenceMap) -> NDArray[np.float32]:
    """Return logits (n, C), C >= 2, whose softmax has the best class's probability by the map.

    Only the best logit of a row changes, so that the other classes share the rest in their proportions. It stays the
    best, by MIN_LEAD.
    """
    rows = np.asarray(logits, np.float64)
    best = rows.argmax(axis=1)[:, None]
    others = rows.copy()
    np.put_along_axis(others, best, -np.inf, axis=1)
    first, second = np.take_along_axis(rows, best, axis=1), others.max(axis=1, keepdims=True)
    rest = np.log(np.exp(others - second).sum(axis=1, keepdims=True))
    lead = first - second
    mapped = second + np.maximum(confidence.mapped(lead - rest) + rest, MIN_LEAD)
    # A large logit has no float32 that is a little larger.
    is_best = mapped.astype(np.float32) > second.astype(np.float32)
    is_mapped = (lead > MIN_LEAD) & (lead < MAX_LEAD) & is_best
    np.put_along_axis(rows, best, np.where(is_mapped, mapped, first), axis=1)
    return rows.astype(np.float32)
