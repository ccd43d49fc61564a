"""Checks of a list of submissions, and the sum of its masks. No I/O.

A sum of few masks, or the difference of two sums, could be a single device's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protocol.errors import BadSignature, ProtofleetError
from protocol.statistics.secure_sums import mask_of, open_seed, submission_context
from protocol.wire.messages import MAX_SUMMED_VALUES, MaskedSubmission, SumRequest
from protocol.wire.signing import is_own_mask

DEFAULT_MIN_DEVICES = 3

Reason = Literal[
    "malformed",
    "too_large",
    "order",
    "too_few",
    "unknown_device",
    "other_key",
    "signature",
    "not_sealed",
    "overlap",
    "no_seal_key",  # the task is over, or the key is of another operator
    "other_task",
]


class Refused(ProtofleetError):
    """A list that is not opened, and why."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Policy:
    """Requirements of the second operator for each list."""

    fleet: str
    min_devices: int = DEFAULT_MIN_DEVICES
    """Submissions in a list, at least."""
    devices: Mapping[str, bytes] | None = None
    """Public key (32 bytes) by device; None admits every device, also one that the aggregator has invented."""


def nothing() -> None:
    """Do nothing."""


def check(request: SumRequest, policy: Policy, *, alive: Callable[[], None] = nothing) -> None:
    """Raise Refused unless a list is in order, large enough, of known devices, and signed by each; calls `alive`."""
    submissions = request.submissions
    if (values := request.values * len(submissions)) > MAX_SUMMED_VALUES:
        raise Refused("too_large", f"expected at most {MAX_SUMMED_VALUES} values in all, got {values}")
    for before, after in pairwise(submissions):
        if before.device >= after.device:
            raise Refused("order", f"expected {after.device} once and before {before.device}: sort by device")
    strictest = max(submissions, key=lambda each: each.mask.min_devices)
    least, who = max(
        (strictest.mask.min_devices, strictest.device), (policy.min_devices, "the second operator")
    )
    if len(submissions) < least:
        text = f"expected at least {least} submissions, as {who} requires, got {len(submissions)}"
        raise Refused("too_few", text)
    for each in submissions:
        alive()
        _check_device(each, policy)
        if not is_own_mask(each.mask, context=_context(request, each, policy.fleet)):
            raise Refused("signature", f"the signature of the mask of {each.device} is invalid")


def _check_device(submission: MaskedSubmission, policy: Policy) -> None:
    if policy.devices is None:
        return
    device = submission.device
    if device not in policy.devices:
        raise Refused("unknown_device", f"{device} is not in the second operator's list of devices")
    if policy.devices[device] != submission.mask.key:
        raise Refused(
            "other_key", f"the key of {device} is not the one in the second operator's list of devices"
        )


def sum_of_masks(
    request: SumRequest, *, fleet: str, seal_key: bytes, alive: Callable[[], None] = nothing
) -> NDArray[np.uint32]:
    """Return the sum of all masks of a list modulo 2^32, uint32 (values,), by the private seal key (32 bytes).

    Raises Refused if a seed does not open. Memory holds one mask at a time.
    """
    total = np.zeros(request.values, np.uint32)
    for each in request.submissions:
        alive()
        try:
            seed = open_seed(each.mask, private_key=seal_key, context=_context(request, each, fleet))
        except BadSignature as error:
            raise Refused(
                "not_sealed", f"the mask of {each.device} is not sealed for this second operator"
            ) from error
        total += mask_of(seed, request.values)
    return total


def _context(request: SumRequest, submission: MaskedSubmission, fleet: str) -> bytes:
    return submission_context(
        fleet=fleet,
        task=request.task,
        device=submission.device,
        sequence=submission.sequence,
        values=request.values,
    )
