"""Evaluations with counts in bins of confidence, and the probabilities that they are about."""

import msgspec
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.wire.messages import CONFIDENCE_BINS, Evaluation
from tests.support.messages.submissions import TASK, evaluation


def _counts(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [min(pair) for pair in pairs], [max(pair) for pair in pairs]


COUNTS: st.SearchStrategy[tuple[list[int], list[int]]] = (
    st.lists(
        st.just((0, 0)) | st.tuples(st.integers(0, 200), st.integers(0, 200)),
        min_size=CONFIDENCE_BINS,
        max_size=CONFIDENCE_BINS,
    )
    .map(_counts)
    .filter(lambda counts: any(counts[1]))
)
"""Correct predictions and all in each bin, not all zero."""


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(odds / odds.sum(axis=1, keepdims=True), np.float32)


def binned(correct: int, images: int, /, *, place: int = 20, **fields: object) -> Evaluation:
    """Return an evaluation with so many correct predictions of all, of one class in one bin."""
    in_bin = [
        tuple(count * (each == place) for each in range(CONFIDENCE_BINS)) for count in (correct, images)
    ]
    made = msgspec.structs.replace(
        evaluation(task=TASK),
        correct=(correct, 0, 0),
        incorrect=(images - correct, 0, 0),
        confidence_correct=in_bin[0],
        confidence_images=in_bin[1],
    )
    return msgspec.structs.replace(made, **fields)
