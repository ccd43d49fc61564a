"""Validation of masked submissions: their values are opened with the aggregator's key, and stay masked. Pure."""

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from aggregator.intake.validation import Expectation, Refused, check_envelope
from protocol.errors import BadSignature
from protocol.statistics.noisy_sums import released_values
from protocol.statistics.secure_sums import open_values, submission_context
from protocol.wire.messages import MaskedSubmission, SealedMask, Submission
from protocol.wire.signing import is_own_mask


def number_of_values(expectation: Expectation) -> int:
    """Return how many values a submission has: counts, class sums and second moment together."""
    shape = {"classes": len(expectation.manifest.classes), "size": expectation.prototype_size}
    return sum(released_values(**shape).values())


def opened_values(
    submission: Submission, expectation: Expectation, *, device: str, private_key: bytes
) -> NDArray[np.uint32]:
    """Return a submission's masked values, uint32 (values,), by the aggregator's private key (32 bytes).

    Raises:
        Refused: another task, no mask, anything beside the sealed values, or values that do not open.
    """
    check_envelope(submission, expectation)
    if submission.mask is UNSET or submission.tensors.keys() != {"sealed"}:
        raise Refused("malformed", "expected values that are masked for a second operator and sealed")
    visible = (submission.prototypes, submission.labels, submission.counts)
    if any(part.data for part in visible) or submission.images:
        raise Refused("malformed", "expected nothing beside the sealed values")
    try:
        values = open_values(
            submission.tensors["sealed"].data,
            private_key=private_key,
            context=_context(submission, expectation, device),
        )
    except BadSignature as error:
        text = "the values are not sealed for this aggregator, device and number"
        raise Refused("malformed", text) from error
    if len(values) != (expected := number_of_values(expectation)):
        raise Refused("shape", f"expected {expected} masked values, got {len(values)}")
    return values


def checked_mask(
    submission: Submission, expectation: Expectation, *, device: str, key: bytes | None
) -> MaskedSubmission:
    """Return what a second operator needs of a submission, whose mask is signed with the device's public key.

    Raises:
        Refused: the second operator would refuse the mask, and with it the list that it is in.
    """
    mask, context = submission.mask, _context(submission, expectation, device)
    if not isinstance(mask, SealedMask) or mask.key != key or not is_own_mask(mask, context=context):
        raise Refused("signature", "the mask is not signed with the device's key for this submission")
    return MaskedSubmission(device=device, sequence=submission.sequence, mask=mask)


def _context(submission: Submission, expectation: Expectation, device: str) -> bytes:
    return submission_context(
        fleet=expectation.manifest.fleet,
        task=expectation.task,
        device=device,
        sequence=submission.sequence,
        values=number_of_values(expectation),
    )
