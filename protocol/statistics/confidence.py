"""Bins of confidence, in which devices count the predictions of a head: by the log-odds of the best class.

Log-odds resolve confidences near 1, where a head that is too confident has most of its predictions.
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
