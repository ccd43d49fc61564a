"""Uploads are accepted only if everything in them is valid, and refused with a reason otherwise."""

import re
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from aggregator.intake.evaluation_validation import check_evaluation
from aggregator.intake.validation import (
    Expectation,
    Refused,
    check_noisy_sums,
    check_statistics,
    check_submission,
    count_rows,
    read_message,
)
from protocol.wire.arrays import to_tensor, to_unsigned
from protocol.wire.codec import encode
from protocol.wire.messages import (
    MAX_IMAGES,
    Block,
    Confused,
    DifferentialPrivacy,
    Evaluation,
    Perturbation,
    Presence,
    Privacy,
    Submission,
    Tensor,
)
from tests.support.messages.evaluations import binned
from tests.support.messages.statistics import (
    GROUPS_EXPECTATION,
    SINGLE_EXPECTATION,
    groups_of,
    images,
    sums_of,
)
from tests.support.messages.submissions import (
    BLOCK,
    BLOCKS_EXPECTATION,
    EXPECTATION,
    FEATURE_SIZE,
    MANIFEST,
    ROUNDS_EXPECTATION,
    block_submission,
    evaluation,
    round_submission,
    submission,
    values_of,
)

GOOD = submission()
GOOD_IN_ROUNDS = round_submission()


def _changed(**fields: Any) -> Submission:
    return msgspec.structs.replace(GOOD, **fields)


def _range(tensor: Tensor, **others: Tensor) -> Submission:
    return _changed(tensors={"range": tensor, **others})


def _limits(low: float, high: float) -> Submission:
    return _range(to_tensor(np.array([[low] * 16, [high] * 16], "f2")))


def _in_rounds(**fields: Any) -> Submission:
    return msgspec.structs.replace(GOOD_IN_ROUNDS, **fields)


def _tensors(**changes: Tensor) -> Submission:
    return _in_rounds(tensors={**GOOD_IN_ROUNDS.tensors, **changes})


def _full(values: float, *shape: int, dtype: str = "f2") -> Tensor:
    return to_tensor(np.full(shape, values, dtype=dtype))


def _integers(*values: int) -> Tensor:
    return to_unsigned(np.array(values, dtype=np.int64))


def _refused(spoilt: Submission, expectation: Expectation = EXPECTATION) -> Refused:
    """Return why a submission is refused, by its intake as in a training."""
    message = read_message(encode(spoilt))
    assert isinstance(message, Submission)
    with pytest.raises(Refused) as caught:
        check_submission(message, expectation)
    with pytest.raises(Refused) as at_intake:
        count_rows(message, expectation)
    assert (at_intake.value.reason, at_intake.value.detail) == (caught.value.reason, caught.value.detail)
    return caught.value


def test_valid_submission_becomes_arrays() -> None:
    message = read_message(encode(GOOD))
    assert isinstance(message, Submission)
    taken = check_submission(message, EXPECTATION)
    arrays = (taken.values, taken.labels, taken.counts)
    assert [str(array.dtype) for array in arrays] == ["float32", "int64", "int64"]
    assert taken.values.shape == (4, FEATURE_SIZE)
    np.testing.assert_array_equal(taken.values, values_of(GOOD))
    assert taken.labels.tolist() == [0, 0, 1, 2]
    assert taken.counts.tolist() == [5, 5, 5, 5]


def test_valid_round_submission_becomes_arrays() -> None:
    """Its tensors are returned as float32; any round is valid, and so is no training loss."""
    taken = check_submission(GOOD_IN_ROUNDS, ROUNDS_EXPECTATION)
    assert taken.values.shape == (2, 4)
    assert {name: (str(array.dtype), array.shape) for name, array in taken.tensors.items()} == {
        "weight": ("float32", (4, 16)),
        "bias": ("float32", (4,)),
    }
    check_submission(_in_rounds(loss=None, round=7), ROUNDS_EXPECTATION)


NAN, INFINITY = float("nan"), float("inf")


def _spent(total: float) -> Privacy:
    return Privacy(epsilon=1.0, total_epsilon=total, delta=1e-5, releases=1)


_NONE = {"labels": _integers(), "counts": _integers()}
REFUSED: dict[str, tuple[Submission, str, str]] = {
    "other task": (_changed(task=bytes(32)), "unknown_task", "expected task .*, got 000000000000"),
    "wide prototypes": (_changed(prototypes=_full(0, 4, 16, dtype="u2")), "dtype", "kind 'u1', got u2"),
    "float16": (_changed(prototypes=_full(0, 4, 16)), "dtype", "kind 'u1', got f2"),
    "float labels": (_changed(labels=_full(0, 4)), "dtype", "labels of kind 'u', got f2"),
    "float counts": (_changed(counts=_full(5, 4)), "dtype", "counts of kind 'u', got f2"),
    "flat prototypes": (_changed(prototypes=_integers(*[0] * 64)), "shape", "of 2 dimensions"),
    "labels in a table": (_changed(labels=_full(0, 4, 1, dtype="u1")), "shape", "of 1 dimensions"),
    "other feature size": (submission(feature_size=17), "shape", r"expected \(m, 16\) .* got \(4, 17\)"),
    "missing label": (_changed(labels=_integers(0, 0, 0)), "shape", r"\(3,\)"),
    "extra count": (_changed(counts=_integers(5, 5, 5, 5, 5)), "shape", r"\(5,\)"),
    "no prototype": (_changed(**_NONE, prototypes=_full(0, 0, 16, dtype="u1")), "shape", r"\(0, 16\)"),
    "missing bytes": (_changed(prototypes=Tensor("u1", (4, 16), bytes(63))), "shape", "expected 64 bytes"),
    "extra bytes": (_changed(labels=Tensor("u1", (4,), bytes(5))), "shape", "labels: expected 4 bytes"),
    "huge": (_changed(prototypes=Tensor("u1", (2**31 - 1, 2**31 - 1), b"")), "shape", "expected 461168"),
    "no range": (_changed(tensors={}), "malformed", "expected the tensors range, got none"),
    "NaN": (_range(_full(NAN, 2, 16)), "not_finite", "range holds NaN or infinity"),
    "infinity": (_limits(0.0, INFINITY), "not_finite", "range holds"),
    "float32 range": (_range(_full(3e38, 2, 16, dtype="f4")), "dtype", "range of kind 'f2', got f4"),
    "short range": (_range(_full(0, 2, 15)), "shape", r"range of shape \(2, 16\), got \(2, 15\)"),
    "range without high": (_range(_full(0, 1, 16)), "shape", r"got \(1, 16\)"),
    "range bytes": (_range(Tensor("f2", (2, 16), bytes(2))), "shape", "range: expected 64 bytes"),
    "reversed range": (_limits(1.0, 0.5), "malformed", "from low to high"),
    "unknown class": (submission(labels=(0, 3)), "unknown_class", "labels below 3, got 3"),
    "single image": (_changed(counts=_integers(5, 5, 1, 5)), "malformed", "expected 2 to 10000000 images"),
    "no image": (_changed(counts=_integers(5, 5, 0, 5)), "malformed", "got 0 to 5"),
    "huge count": (_changed(counts=_integers(5, 5, 5, 2**32 - 1)), "malformed", "to 4294967295"),
    "images not read": (_changed(images=19), "implausible", "20 images in prototypes of 19"),
    "more prototypes than images give": (
        _changed(counts=_integers(5, 4, 5, 5)),
        "implausible",
        "at least 5 images in each prototype of a class with several, got 4",
    ),
    "round": (_changed(round=1), "unknown_round", "no rounds, got a submission for round 1"),
    "tensors": (_range(_full(0, 2, 16), bias=_full(0, 4)), "malformed", "tensors range, got bias, range"),
}
REFUSED_IN_ROUNDS: dict[str, tuple[Submission, str, str]] = {
    "feature": (_in_rounds(prototypes=_full(0, 2, 16)), "shape", r"expected \(m, 4\) .* got \(2, 16\)"),
    "float32": (
        _in_rounds(prototypes=_full(1e30, 2, 4, dtype="f4")),
        "dtype",
        "prototypes of kind 'f2', got f4",
    ),
    "two of a class": (
        _in_rounds(labels=_integers(1, 1)),
        "malformed",
        "one prototype of each class at most",
    ),
    "NaN": (_in_rounds(prototypes=_full(NAN, 2, 4)), "not_finite", "a prototype holds NaN"),
    "block": (
        _in_rounds(block=block_submission().block),
        "malformed",
        "takes no principal prototypes",
    ),
    "no tensors": (_in_rounds(tensors={}), "malformed", "tensors bias, weight, got none"),
    "missing tensor": (_in_rounds(tensors={"bias": _full(0, 4)}), "malformed", "got bias"),
    "extra tensor": (_tensors(momentum=_full(0, 4)), "malformed", "got bias, momentum, weight"),
    "other shape": (_tensors(bias=_full(0, 5)), "shape", r"bias of shape \(4,\), got \(5,\)"),
    "transposed tensor": (_tensors(weight=_full(0, 16, 4)), "shape", r"\(4, 16\), got \(16, 4\)"),
    "integer tensor": (_tensors(bias=_integers(0, 0, 0, 0)), "dtype", "bias of kind 'f2', got u1"),
    "NaN tensor": (_tensors(bias=_full(NAN, 4)), "not_finite", "bias holds NaN"),
}


def _block(**changes: Tensor) -> Submission:
    """Return a submission of a block alone, with some of its tensors replaced."""
    made = block_submission()
    assert isinstance(made.block, Block)
    return msgspec.structs.replace(made, block=msgspec.structs.replace(made.block, **changes))


def _coarse(**changes: Tensor) -> Submission:
    """Return a submission of a block alone, with some of its other tensors replaced."""
    made = block_submission()
    return msgspec.structs.replace(made, tensors={**made.tensors, **changes})


_SCALES = np.ones(4, np.float32)
REFUSED_BLOCKS = {
    "limits reversed": (_coarse(limits=to_tensor(np.array([1, 0], "f2"))), "malformed", "from high to low"),
    "limit NaN": (_coarse(limits=to_tensor(np.array([0, NAN], "f2"))), "not_finite", "limits holds NaN"),
    "three limits": (_coarse(limits=_full(0, 3)), "shape", r"limits of shape \(2,\)"),
    "exact range with limits": (_coarse(range=_full(0, 2, FEATURE_SIZE)), "dtype", "range of kind 'u1'"),
    "range reversed": (
        _coarse(range=to_tensor(np.array([[1] * FEATURE_SIZE, [0] * FEATURE_SIZE], "u1"))),
        "malformed",
        "from high to low",
    ),
    "limits for batches": (
        _changed(tensors={**GOOD.tensors, "limits": _full(0, 2)}),
        "malformed",
        "tensors range, got limits, range",
    ),
    "block for batches": (
        _changed(block=block_submission().block),
        "malformed",
        "takes no principal prototypes",
    ),
    "unknown class in a block": (_block(labels=_integers(0, 3)), "malformed", "labels below 3"),
    "group in a block": (_block(counts=_integers(4, 56)), "malformed", "counts of at least 5"),
    "small block": (_block(counts=_integers(5, 44)), "malformed", "at least 50 images"),
    "rows of few images": (
        _block(rows=_full(1, 7, FEATURE_SIZE, dtype="i1"), scales=to_tensor(np.ones(8, "f4"))),
        "malformed",
        "10 for each",
    ),
    "more images than read": (
        _block(counts=_integers(20, 41)),
        "implausible",
        "61 images in prototypes of 60",
    ),
    "scale NaN": (_block(scales=to_tensor(_SCALES * np.float32(NAN))), "malformed", "finite scales"),
    "infinite row": (_block(scales=to_tensor(_SCALES * np.float32(3e38))), "not_finite", "not finite"),
    "long row": (_block(scales=to_tensor(_SCALES * np.float32(1e6))), "implausible", "at most 65504"),
}
CASES = {
    **{
        name: (*case, EXPECTATION if "batches" in name else BLOCKS_EXPECTATION)
        for name, case in REFUSED_BLOCKS.items()
    },
    **{name: (*case, EXPECTATION) for name, case in REFUSED.items()},
    **{f"{name} in rounds": (*case, ROUNDS_EXPECTATION) for name, case in REFUSED_IN_ROUNDS.items()},
}


@pytest.mark.parametrize(("spoilt", "reason", "detail", "expectation"), CASES.values(), ids=CASES.keys())
def test_invalid_submission_is_refused(
    spoilt: Submission, reason: str, detail: str, expectation: Expectation
) -> None:
    """The reason is for programs; the detail has the expected and the actual value."""
    refused = _refused(spoilt, expectation)
    assert refused.reason == reason
    assert re.search(detail, refused.detail)


def test_valid_block_becomes_arrays() -> None:
    """Beside no other prototypes; counted are its images."""
    message = read_message(encode(_block()))
    assert isinstance(message, Submission)
    taken = check_submission(message, BLOCKS_EXPECTATION)
    assert taken.block is not None
    for name in ("means", "labels", "counts", "rows", "diagonal"):
        np.testing.assert_allclose(getattr(taken.block, name), getattr(BLOCK, name), atol=0.1, err_msg=name)
    assert not len(taken.values)
    assert count_rows(message, BLOCKS_EXPECTATION) == {0: 20, 2: 40}


def test_prototype_beyond_the_maximum_norm_is_implausible() -> None:
    """Where the algorithm bounds the norm; rounding is allowed, and noise that the task asks for."""
    bounded = replace(ROUNDS_EXPECTATION, max_norm=1.0)
    longest = np.eye(4, dtype=np.float16)[:2] * np.float16(1.005)
    check_submission(_in_rounds(prototypes=to_tensor(longest)), bounded)
    long = _in_rounds(prototypes=to_tensor(longest * np.float16(2)))
    refused = _refused(long, bounded)
    assert refused.reason == "implausible"
    assert refused.detail == "expected prototypes no longer than 1, got 2.01"
    noise = Perturbation(on="prototypes", noise="gaussian", scale=1.0)
    noisy = msgspec.structs.replace(bounded.manifest, perturbation=noise)
    check_submission(long, replace(bounded, manifest=noisy))


@given(st.data())
def test_one_non_finite_value_refuses_a_submission(data: st.DataObject) -> None:
    """In the range of a feature, or in a prototype of a round."""
    values = np.zeros((2, FEATURE_SIZE), dtype=np.float16)
    place = data.draw(st.tuples(st.integers(0, 1), st.integers(0, FEATURE_SIZE - 1)))
    values[place] = data.draw(st.sampled_from([NAN, INFINITY, -INFINITY]))
    assert _refused(_range(to_tensor(values))).reason == "not_finite"
    in_rounds = replace(ROUNDS_EXPECTATION, prototype_size=FEATURE_SIZE)
    assert _refused(_in_rounds(prototypes=to_tensor(values)), in_rounds).reason == "not_finite"


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "malformed"),
        (b"\x00", "malformed"),
        (b"not msgpack at all", "malformed"),
        (encode(Presence(state="online", epoch=1)), "malformed"),
        (encode(GOOD)[:-1], "malformed"),
        (encode(GOOD) + b"\x00", "malformed"),
        (encode(_changed(v=2)), "version"),
        (encode(msgspec.structs.replace(evaluation(), v=0)), "version"),
        *((encode(_in_rounds(loss=loss)), "malformed") for loss in (NAN, INFINITY, 1.7e308, -1.7e308)),
        (encode(_in_rounds(images=10**9)), "malformed"),
        (encode(_in_rounds(images=2**63)), "malformed"),
        (encode(msgspec.structs.replace(evaluation(), correct=(10**12, 0, 0))), "malformed"),
        (encode(binned(9, 10, confidence_images=(10,))), "malformed"),
        (encode(_changed(privacy=_spent(INFINITY))), "malformed"),
    ],
)
def test_malformed_payload_is_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        read_message(payload)
    assert caught.value.reason == reason
    assert caught.value.detail == str(caught.value) != ""


def test_submission_to_a_continued_task_is_accepted() -> None:
    earlier = _changed(task=bytes(32))
    continuing = msgspec.structs.replace(MANIFEST, continues=(b"1" * 32, bytes(32)))
    check_submission(earlier, replace(EXPECTATION, manifest=continuing))


def test_valid_evaluation_is_accepted() -> None:
    message = read_message(encode(evaluation(head_version=2)))
    assert isinstance(message, Evaluation)
    check_evaluation(message, EXPECTATION, newest_head=2)
    check_evaluation(message, EXPECTATION, newest_head=3)
    check_evaluation(msgspec.structs.replace(message, correct_with_prior=10), EXPECTATION, newest_head=2)
    check_evaluation(binned(9, 10, novelty_images=(10, *[0] * 31)), EXPECTATION, newest_head=2)
    check_evaluation(binned(9, 10, confused=(Confused(0, 2, 1),)), EXPECTATION, newest_head=2)


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (evaluation(task=bytes(32)), "unknown_task"),
        (evaluation(head_version=3), "unknown_head"),
        (msgspec.structs.replace(evaluation(), correct=(1, 2)), "shape"),
        (msgspec.structs.replace(evaluation(), incorrect=(1, 2, 3, 4)), "shape"),
        (msgspec.structs.replace(evaluation(), previous_correct=(1, 2)), "shape"),
        (msgspec.structs.replace(evaluation(), previous_correct=(9, 2, 0)), "malformed"),
        (msgspec.structs.replace(evaluation(), correct_with_prior=11), "malformed"),
        (binned(9, 10, confidence_correct=UNSET), "malformed"),
        (binned(9, 10, correct=(8, 0, 0), incorrect=(2, 0, 0)), "malformed"),
        (binned(9, 10, incorrect=(2, 0, 0)), "malformed"),
        (binned(9, 10, confidence_correct=(9, *[0] * 31)), "malformed"),
        (binned(9, 10, novelty_images=(11, *[0] * 31)), "malformed"),
        (binned(9, 10, confused=(Confused(0, 2, 2),)), "malformed"),
        (binned(9, 10, confused=(Confused(0, 1, 1), Confused(0, 2, 1))), "malformed"),
        (binned(9, 10, confused=(Confused(0, 0, 1),)), "malformed"),
        (binned(9, 10, confused=(Confused(0, 3, 1),)), "malformed"),
    ],
)
def test_invalid_evaluation_is_refused(spoilt: Evaluation, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        check_evaluation(spoilt, EXPECTATION, newest_head=2)
    assert caught.value.reason == reason


PRIVATE_TASK = {
    "differential_privacy": DifferentialPrivacy(noise_multiplier=1.0, delta=1e-5, max_epsilon=8.0)
}
PRIVATE = replace(
    EXPECTATION,
    manifest=msgspec.structs.replace(EXPECTATION.manifest, **PRIVATE_TASK),
)


def test_private_task_refuses_a_submission_without_cost() -> None:
    """A device without differential privacy uploads prototypes without noise."""
    refused = _refused(GOOD, PRIVATE)
    assert (refused.reason, "costs in privacy" in refused.detail) == ("malformed", True)


def test_more_epsilon_than_a_device_may_spend_is_refused() -> None:
    """It would be the fleet's greatest one for ever."""
    cost = Privacy(epsilon=1.0, total_epsilon=8.5, delta=1e-5, releases=1)
    refused = _refused(_changed(privacy=cost), PRIVATE)
    assert (refused.reason, refused.detail) == (
        "malformed",
        "expected a total epsilon of at most 8, got 8.5",
    )


SUMS, ROWS = sums_of(*images(0)), groups_of(*images(0))
SIZE = SINGLE_EXPECTATION.prototype_size


def filled(value: int, rows: int, dtype: str, size: int = SIZE) -> Any:
    return to_tensor(np.full((rows, size), value, dtype))


def _refused_statistics(submission: Submission, expectation: Expectation) -> str:
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
        ({"labels": _integers(0, 1, 1)}, "malformed"),
        ({"labels": _integers(0, 1, 3)}, "unknown_class"),
        ({"counts": _integers(20, 20, 0)}, "malformed"),
        ({"counts": _integers(20, 20, MAX_IMAGES + 1)}, "malformed"),
        ({"images": 59}, "implausible"),
        ({"tensors": {}}, "malformed"),
        ({"tensors": {**SUMS.tensors, "more": _integers(1)}}, "malformed"),
        ({"tensors": {"second_moment": filled(1, 1, "u1")}}, "shape"),
        ({"tensors": {"second_moment": to_tensor(np.zeros(4, np.float32))}}, "dtype"),
    ],
)
def test_sums_that_no_device_sends_are_refused(fields: dict[str, Any], reason: str) -> None:
    assert _refused_statistics(msgspec.structs.replace(SUMS, **fields), SINGLE_EXPECTATION) == reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prototypes": filled(-128, 12, "i1")}, "implausible"),
        ({"prototypes": filled(1, 12, "i4")}, "dtype"),
        ({"tensors": SUMS.tensors}, "malformed"),
        ({"counts": _integers(*[5] * 11, 1)}, "malformed"),
        ({"counts": _integers(*[5] * 11, 4)}, "implausible"),
        ({"counts": _integers(*[6] * 12)}, "implausible"),
    ],
)
def test_groups_that_no_device_sends_are_refused(fields: dict[str, Any], reason: str) -> None:
    assert _refused_statistics(msgspec.structs.replace(ROWS, **fields), GROUPS_EXPECTATION) == reason


CLASSES = len(SINGLE_EXPECTATION.manifest.classes)
SPENT = Privacy(epsilon=1.0, total_epsilon=2.0, delta=1e-5, releases=2)
NOISY_EXPECTATION = replace(
    SINGLE_EXPECTATION, manifest=msgspec.structs.replace(SINGLE_EXPECTATION.manifest, **PRIVATE_TASK)
)
NOISY = msgspec.structs.replace(
    SUMS,
    prototypes=filled(-(2**31), CLASSES, "i4"),
    labels=to_tensor(np.arange(CLASSES, dtype=np.uint8)),
    counts=to_tensor(np.ones(CLASSES, np.uint8)),
    images=CLASSES,
    privacy=SPENT,
    tensors={
        "counts": to_tensor(np.full(CLASSES, -9, np.int32)),
        "second_moment": to_tensor(np.full(SIZE * (SIZE + 1) // 2, 2**31 - 1, np.int32)),
    },
)


def test_noisy_sums_may_have_any_values() -> None:
    taken = check_noisy_sums(NOISY, NOISY_EXPECTATION)
    assert (taken.sums.min(), taken.counts.max()) == (-(2**31), -9)
    assert count_rows(NOISY, NOISY_EXPECTATION) == dict.fromkeys(range(CLASSES), 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy": None}, "malformed"),
        ({"prototypes": filled(0, CLASSES, "i1")}, "dtype"),
        ({"prototypes": filled(0, CLASSES, "i4", SIZE + 1)}, "shape"),
        ({"labels": to_tensor(np.zeros(CLASSES, np.uint8))}, "malformed"),
        ({"tensors": {"counts": NOISY.tensors["counts"]}}, "malformed"),
        ({"tensors": {**NOISY.tensors, "counts": to_tensor(np.zeros(CLASSES, np.uint8))}}, "dtype"),
        ({"tensors": {**NOISY.tensors, "second_moment": to_tensor(np.zeros(3, np.int32))}}, "shape"),
    ],
)
def test_noisy_sums_of_another_form_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused) as caught:
        count_rows(msgspec.structs.replace(NOISY, **changes), NOISY_EXPECTATION)
    assert caught.value.reason == reason
