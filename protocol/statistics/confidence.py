"""Bins of confidence and of novelty, in which devices count held-out images.

Confidence is the log-odds of the best class: they resolve probabilities near 1, where a head that is too confident has
most of its predictions. Novelty is 1 minus the greatest cosine to a class mean.
"""

import numpy as np
from numpy.typing import NDArray

from protocol.wire.messages import CONFIDENCE_BINS

LOWEST, WIDTH = -4.0, 0.5
"""Log-odds where the first bin begins, and of a bin; the first and the last one have no outer limit."""


def bin_centers() -> NDArray[np.float64]:
    """Return the log-odds in the middle of each bin, (CONFIDENCE_BINS,)."""
    return LOWEST + WIDTH * (np.arange(CONFIDENCE_BINS, dtype=np.float64) + 0.5)


def confidence_bins(probabilities: NDArray[np.floating]) -> NDArray[np.intp]:
    """Return the bin, (n,), of the best class of each row of probabilities, (n, C); of negative ones any."""
    rows = np.clip(probabilities.astype(np.float64), 0, None)
    best = rows.argmax(axis=1)[:, None]
    highest = np.take_along_axis(rows, best, axis=1)[:, 0]
    np.put_along_axis(rows, best, 0, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_odds = np.log(highest) - np.log(rows.sum(axis=1))
    places = np.clip(np.floor((log_odds - LOWEST) / WIDTH), 0, CONFIDENCE_BINS - 1)
    return np.asarray(np.nan_to_num(places), np.intp)


def novelty_bins(novelty: NDArray[np.floating]) -> NDArray[np.intp]:
    """Return the bin, (n,), of each novelty, (n,): bin i from i / CONFIDENCE_BINS, the last one without a limit."""
    places = np.floor(np.asarray(novelty, np.float64) * CONFIDENCE_BINS)
    return np.asarray(np.clip(places, 0, CONFIDENCE_BINS - 1), np.intp)
