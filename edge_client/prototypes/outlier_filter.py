"""The outlier filter of one class's features: those closest to the class mean are kept (FedTC eq. 1-3)."""

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ProtofleetError

Chunks = Callable[[], Iterable[NDArray[np.float32]]]

# Rows are summed in blocks of this size, so that not even the last bit of a score, which may decide between two
# images, depends on how the caller cuts its features into chunks.
BLOCK_ROWS = 256


def closest_features(chunks: Chunks, *, alpha: float) -> NDArray[np.bool_]:
    """Mark the share `alpha` of the features, rounded up, whose cosine to the class mean is highest, (n,).

    Raises:
        ProtofleetError: a feature is not finite.
    """
    total, features = _sum_features(chunks)
    return _closest(_score(chunks, total / max(features, 1)), math.ceil(Fraction(str(alpha)) * features))


def blocks(chunks: Chunks) -> Iterator[NDArray[np.float64]]:
    """Cut chunks of any size into blocks of BLOCK_ROWS features and a last one with the remainder."""
    rest: NDArray[np.float32] | None = None
    for chunk in chunks():
        rows = chunk if rest is None else np.concatenate([rest, chunk])
        full = len(rows) - len(rows) % BLOCK_ROWS
        for start in range(0, full, BLOCK_ROWS):
            yield rows[start : start + BLOCK_ROWS].astype(np.float64)
        rest = rows[full:]
    if rest is not None:
        yield rest.astype(np.float64)


def _sum_features(chunks: Chunks) -> tuple[NDArray[np.float64], int]:
    """Return the sum of the features, (L,), and how many there are: together the class mean (eq. 1)."""
    total: NDArray[np.float64] = np.zeros(0)
    features = 0
    for block in blocks(chunks):
        total = block.sum(axis=0) + (total if features else 0.0)
        features += len(block)
    if not np.isfinite(total).all():
        raise ProtofleetError("features must be finite; omit the images whose features are not")
    return total, features


def _score(chunks: Chunks, mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosine of every feature to the class mean (eq. 2), (n,); 0 where either has no direction."""
    scores = [np.zeros(0)]
    for block in blocks(chunks):
        lengths = np.linalg.norm(block, axis=1) * np.linalg.norm(mean)
        along = (block * mean).sum(axis=1)
        scores.append(np.divide(along, lengths, out=np.zeros(len(block)), where=lengths > 0))
    return np.concatenate(scores)


def _closest(scores: NDArray[np.float64], keep: int) -> NDArray[np.bool_]:
    """Mark the `keep` highest scores (eq. 3), the earlier first among equals."""
    kept = np.zeros(len(scores), dtype=np.bool_)
    kept[np.argsort(-scores, kind="stable")[:keep]] = True
    return kept
