"""Uploads, from bytes to arrays: what is accepted is valid, and all else is refused."""

import math
from collections import Counter

import numpy as np

from aggregator.intake.evaluation_validation import check_evaluation
from aggregator.intake.validation import (
    Expectation,
    Prototypes,
    Refused,
    check_submission,
    count_rows,
    read_message,
)
from protocol.wire.codec import encode
from protocol.wire.messages import MAX_IMAGES, Submission
from tests.fuzz.mutations import of_message
from tests.fuzz.target import Target
from tests.support.messages.submissions import (
    BLOCKS_EXPECTATION,
    EXPECTATION,
    ROUNDS_EXPECTATION,
    SHAPES,
    block_submission,
    evaluation,
    round_submission,
    submission,
)

FOUR = (2, 3, 1, 2)
DEEP_EXPECTATION = Expectation(
    ROUNDS_EXPECTATION.task,
    ROUNDS_EXPECTATION.manifest,
    ROUNDS_EXPECTATION.prototype_size,
    {**SHAPES, "kernel": FOUR},
)
"""A program that uploads a tensor with the most dimensions allowed."""


def upload(data: bytes) -> None:
    """Check a payload: it is a submission or evaluation that the task can use, or is refused."""
    try:
        message = read_message(data)
    except Refused:
        return
    if not isinstance(message, Submission):
        try:
            check_evaluation(message, EXPECTATION, newest_head=3)
        except Refused:
            return
        assert len(message.correct) == len(message.incorrect) == 3
        return
    for expectation in (EXPECTATION, BLOCKS_EXPECTATION, ROUNDS_EXPECTATION, DEEP_EXPECTATION):
        _check(message, expectation)


def _reason_of_labels(message: Submission, expectation: Expectation) -> str:
    """Return why `count_rows` refuses a submission; empty if it does not."""
    try:
        count_rows(message, expectation)
    except Refused as refused:
        return refused.reason
    return ""


def _check(message: Submission, expectation: Expectation) -> None:
    try:
        accepted = check_submission(message, expectation)
    except Refused as refused:
        if _reason_of_labels(message, expectation) != refused.reason:
            raise AssertionError("count_rows gives another reason") from refused
        return
    rows = len(accepted.values)
    assert accepted.values.shape == (rows, expectation.prototype_size)
    assert rows > 0 or accepted.block is not None
    assert accepted.labels.shape == accepted.counts.shape == (rows,)
    labels, counts = accepted.every
    assert labels.min() >= 0
    assert labels.max() < len(expectation.manifest.classes)
    assert counts.min() >= 2
    assert counts.max() <= MAX_IMAGES
    _check_block(accepted)
    assert {name: array.shape for name, array in accepted.tensors.items()} == expectation.tensors
    assert np.abs(accepted.values).max(initial=0) < 65520, "no more than float16 holds"
    assert all(np.isfinite(array).all() for array in accepted.tensors.values())
    assert message.loss is None or math.isfinite(message.loss)
    if not expectation.manifest.accepts_blocks:
        assert count_rows(message, expectation) == Counter(accepted.labels.tolist())
    else:
        assert sum(count_rows(message, expectation).values()) == counts.sum()


def _check_block(accepted: Prototypes) -> None:
    """Check principal prototypes: they can be those of images."""
    if (block := accepted.block) is None:
        return
    size = accepted.values.shape[1]
    assert block.means.shape == (len(block.labels), size)
    assert (block.rows.shape[1:], block.diagonal.shape) == ((size,), (size,))
    assert 10 * len(block.rows) <= block.images
    assert all(np.isfinite(array).all() for array in (block.means, block.rows, block.diagonal))
    assert ((block.rows.astype(float) ** 2).sum(axis=0) + block.diagonal).max() <= block.images * 65504.0**2


UPLOADED = Target(
    "uploaded",
    upload,
    lambda: map(
        encode,
        (
            submission(),
            block_submission(),
            round_submission(),
            round_submission(shapes={**SHAPES, "kernel": FOUR}),
            evaluation(),
        ),
    ),
    of_message(),
    share=15,
)
