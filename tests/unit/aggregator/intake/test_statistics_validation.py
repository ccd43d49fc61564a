"""Statistics are accepted only in the task's form, with values that images can have."""

from typing import Any

import msgspec
import numpy as np
import pytest

from aggregator.intake.validation import Expectation, Refused, check_statistics, count_rows, read_message
from protocol.wire.codec import encode, to_tensor, to_unsigned
from protocol.wire.messages import MAX_IMAGES, Submission
from tests.support.messages.statistics import (
    GROUPS_EXPECTATION,
    SINGLE_EXPECTATION,
    groups_of,
    images,
    sums_of,
)

SUMS, ROWS = sums_of(*images(0)), groups_of(*images(0))
SIZE = SINGLE_EXPECTATION.prototype_size


def filled(value: int, rows: int, dtype: str, size: int = SIZE) -> Any:
    return to_tensor(np.full((rows, size), value, dtype))


def integers(*values: int) -> Any:
    return to_unsigned(np.array(values))


def refused(submission: Submission, expectation: Expectation) -> str:
    message = read_message(encode(submission))
    assert isinstance(message, Submission)
    with pytest.raises(Refused) as caught:
        count_rows(message, expectation)
    return caught.value.reason


@pytest.mark.parametrize(("good", "expectation"), [(SUMS, SINGLE_EXPECTATION), (ROWS, GROUPS_EXPECTATION)])
def test_valid_statistics_become_arrays(good: Submission, expectation: Expectation) -> None:
    message = read_message(encode(good))
    assert isinstance(message, Submission)
    rows, labels, counts = check_statistics(message, expectation)
    each = counts if expectation is SINGLE_EXPECTATION else np.ones(len(counts), int)  # images, or groups
    expected = {label: int(each[labels == label].sum()) for label in set(labels.tolist())}
    assert count_rows(message, expectation) == expected
    assert len(rows) == len(labels) == len(counts)
    assert counts.sum() == 60


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"task": bytes(32)}, "unknown_task"),
        ({"round": 1}, "unknown_round"),
        ({"prototypes": filled(1, 3, "f4")}, "dtype"),
        ({"prototypes": filled(1, 3, "i1")}, "dtype"),
        ({"prototypes": filled(1, 3, "i4", SIZE - 1)}, "shape"),
        ({"prototypes": filled(1, 2, "i4")}, "shape"),
        ({"prototypes": filled(127 * 20 + 1, 3, "i4")}, "implausible"),
        ({"prototypes": filled(-(127 * 20) - 1, 3, "i4")}, "implausible"),
        ({"prototypes": filled(-(2**31), 3, "i4")}, "implausible"),
        ({"labels": integers(0, 1, 1)}, "malformed"),
        ({"labels": integers(0, 1, 3)}, "unknown_class"),
        ({"counts": integers(20, 20, 0)}, "malformed"),
        ({"counts": integers(20, 20, MAX_IMAGES + 1)}, "malformed"),
        ({"images": 59}, "implausible"),
        ({"tensors": {}}, "malformed"),
        ({"tensors": {**SUMS.tensors, "more": integers(1)}}, "malformed"),
        ({"tensors": {"second_moment": filled(1, 1, "u1")}}, "shape"),
        ({"tensors": {"second_moment": to_tensor(np.zeros(4, np.float32))}}, "dtype"),
    ],
)
def test_sums_that_no_device_sends_are_refused(fields: dict[str, Any], reason: str) -> None:
    assert refused(msgspec.structs.replace(SUMS, **fields), SINGLE_EXPECTATION) == reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prototypes": filled(-128, 12, "i1")}, "implausible"),
        ({"prototypes": filled(1, 12, "i4")}, "dtype"),
        ({"tensors": SUMS.tensors}, "malformed"),
        ({"counts": integers(*[5] * 11, 1)}, "malformed"),
        ({"counts": integers(*[5] * 11, 4)}, "implausible"),
        ({"counts": integers(*[6] * 12)}, "implausible"),
    ],
)
def test_groups_that_no_device_sends_are_refused(fields: dict[str, Any], reason: str) -> None:
    assert refused(msgspec.structs.replace(ROWS, **fields), GROUPS_EXPECTATION) == reason
