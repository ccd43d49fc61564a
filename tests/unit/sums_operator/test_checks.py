"""The second operator opens a list only as a whole, of enough devices that it knows and that have signed."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from protocol.wire.messages import SumRequest
from protocol.wire.signing import public_key
from sums_operator.checks import Policy, Refused, check, sum_of_masks
from tests.support.messages.sums import FLEET, NAMES, masked_submission, signing_key, sum_of, sum_request

PRIVATE = bytes([1]) * 32
SEAL_KEY = X25519PrivateKey.from_private_bytes(PRIVATE).public_key().public_bytes_raw()
KNOWN = {name: public_key(signing_key(name)) for name in NAMES[:4]}
POLICY = Policy(FLEET, devices=KNOWN)
GOOD = sum_request(NAMES[:4], seal_key=SEAL_KEY)


def changed(position: int, **fields: object) -> SumRequest:
    """Return the list with other fields in one submission."""
    submissions = list(GOOD.submissions)
    submissions[position] = msgspec.structs.replace(submissions[position], **fields)
    return msgspec.structs.replace(GOOD, submissions=tuple(submissions))


def listed(*positions: int) -> SumRequest:
    return msgspec.structs.replace(GOOD, submissions=tuple(GOOD.submissions[each] for each in positions))


def strict(required: int, **fields: int) -> SumRequest:
    """Return the list with a device that requires more of them; fields of its mask are changed afterwards."""
    mask = masked_submission("shed-3", seal_key=SEAL_KEY, min_devices=required).mask
    return changed(2, mask=msgspec.structs.replace(mask, **fields))


def test_list_is_summed() -> None:
    check(GOOD, POLICY)
    masks = sum_of_masks(GOOD, fleet=FLEET, seal_key=PRIVATE)
    np.testing.assert_array_equal(masks, sum_of(NAMES[:4]))
    check(strict(4), POLICY)


@pytest.mark.parametrize(
    ("request_", "policy", "reason", "problem"),
    [
        (listed(0, 1, 1, 2), POLICY, "order", "expected shed-2 once and before shed-2"),
        (listed(0, 2, 1), POLICY, "order", "expected shed-2 once and before shed-3"),
        (listed(0, 1), POLICY, "too_few", "at least 3 submissions, as the second operator requires, got 2"),
        (GOOD, replace(POLICY, min_devices=5), "too_few", "at least 5 submissions, as the second operator"),
        (strict(5), POLICY, "too_few", "at least 5 submissions, as shed-3 requires, got 4"),
        (sum_request(NAMES[:5], seal_key=SEAL_KEY), POLICY, "unknown_device", "shed-5 is not in"),
        (GOOD, replace(POLICY, devices={**KNOWN, "shed-2": bytes(32)}), "other_key", "the key of shed-2 is"),
        (strict(5, min_devices=2), POLICY, "signature", "the mask of shed-3 is invalid"),
        (changed(1, sequence=2), POLICY, "signature", "the mask of shed-2 is invalid"),
        (changed(1, mask=GOOD.submissions[0].mask), replace(POLICY, devices=None), "signature", "shed-2"),
        (msgspec.structs.replace(GOOD, task=bytes(32)), POLICY, "signature", "the mask of shed-1 is invalid"),
        (GOOD, replace(POLICY, fleet="other"), "signature", "the mask of shed-1 is invalid"),
        (msgspec.structs.replace(GOOD, values=41), POLICY, "signature", "the mask of shed-1 is invalid"),
        (msgspec.structs.replace(GOOD, values=2**34 + 1), POLICY, "too_large", "at most 68719476736 values"),
    ],
)
def test_list_is_refused(request_: SumRequest, policy: Policy, reason: str, problem: str) -> None:
    """The refusal names the device."""
    with pytest.raises(Refused, match=problem) as refused:
        check(request_, policy)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "other", [{"seal_key": public_key(PRIVATE)}, {"task": bytes(32)}, {"fleet": "other"}]
)
def test_seed_for_another_operator_or_submission_is_refused(other: dict[str, bytes | str]) -> None:
    mask = masked_submission("shed-2", **{"seal_key": SEAL_KEY, **other}).mask  # type: ignore[arg-type]
    with pytest.raises(Refused, match="shed-2 is not sealed for this second operator") as refused:
        sum_of_masks(changed(1, mask=mask), fleet=FLEET, seal_key=PRIVATE)
    assert refused.value.reason == "not_sealed"


def test_every_device_counts_without_a_list_of_them() -> None:
    check(sum_request(["invented", *NAMES[:2]], seal_key=SEAL_KEY), Policy(FLEET))
