"""What a device may hand in, pure: bytes to a checked submission or evaluation, or the reason why not."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.codec import decode, message_kind, to_array
from protocol.errors import MalformedMessage, ProtofleetError, VersionMismatch
from protocol.messages import Evaluation, Reason, Submission, TaskManifest

MAX_PICTURES_IN_PROTOTYPE = 10**9


class Refused(ProtofleetError):
    """Something from a device that is not taken, with the reason for the program and for a person."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason: Reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Expectation:
    """What the current task makes of a message: its identity, contents and the backbone's feature size L."""

    task: bytes
    manifest: TaskManifest
    feature_size: int


@dataclass(frozen=True)
class Prototypes:
    """A checked submission: float32 (m, L) prototypes, int64 (m,) labels and (m,) counts of pictures."""

    values: NDArray[np.float32]
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]


def read_message(payload: bytes) -> Submission | Evaluation:
    """The submission or evaluation in a device's payload.

    Raises:
        Refused: malformed, of another version, or of a kind that devices do not hand in.
    """
    try:
        kind = message_kind(payload)
        if kind == "submission":
            return decode(payload, Submission, max_bytes=len(payload))
        if kind == "evaluation":
            return decode(payload, Evaluation, max_bytes=len(payload))
    except VersionMismatch as error:
        raise Refused("version", str(error)) from error
    except MalformedMessage as error:
        raise Refused("malformed", str(error)) from error
    raise Refused("malformed", f"expected a submission or an evaluation, got {kind[:40]!r}")


def check_submission(submission: Submission, expectation: Expectation) -> Prototypes:
    """A submission's prototypes, once everything about them is right.

    Raises:
        Refused: another task's, a wrong shape or dtype, values that are not finite, unknown classes, or
            prototypes that average fewer pictures than the task allows.
    """
    if submission.task != expectation.task:
        raise Refused(
            "unknown_task",
            f"expected task {expectation.task.hex()[:12]}, got {submission.task.hex()[:12]}",
        )
    prototypes = _array(submission.prototypes, "prototypes", dtypes="f", ndim=2)
    labels = _array(submission.labels, "labels", dtypes="u", ndim=1)
    counts = _array(submission.counts, "counts", dtypes="u", ndim=1)
    rows, size = prototypes.shape
    if rows == 0 or size != expectation.feature_size or len(labels) != rows or len(counts) != rows:
        raise Refused(
            "shape",
            f"expected (m, {expectation.feature_size}) prototypes with m labels and counts, "
            f"got {prototypes.shape}, {labels.shape}, {counts.shape}",
        )
    if not np.isfinite(prototypes).all():
        raise Refused("not_finite", "a prototype holds NaN or infinity")
    classes = len(expectation.manifest.classes)
    if int(labels.max()) >= classes:
        raise Refused("unknown_class", f"expected labels below {classes}, got {int(labels.max())}")
    least = min(expectation.manifest.min_images, expectation.manifest.batch_size)
    if int(counts.min()) < least or int(counts.max()) > MAX_PICTURES_IN_PROTOTYPE:
        raise Refused(
            "malformed",
            f"expected at least {least} pictures in every prototype, got {int(counts.min())} to {int(counts.max())}",
        )
    return Prototypes(prototypes.astype(np.float32), labels.astype(np.int64), counts.astype(np.int64))


def check_evaluation(evaluation: Evaluation, expectation: Expectation, *, newest_head: int) -> None:
    """Check an evaluation against the task.

    Raises:
        Refused: another task's, a head that was never made, or a wrong number of classes.
    """
    if evaluation.task != expectation.task:
        raise Refused("unknown_task", "the evaluation is of another task")
    if evaluation.head_version > newest_head:
        raise Refused("unknown_head", f"there is no head {evaluation.head_version}, only up to {newest_head}")
    classes = len(expectation.manifest.classes)
    if len(evaluation.right) != classes or len(evaluation.wrong) != classes:
        raise Refused("shape", f"expected {classes} counts of right and of wrong")


def _array(tensor: Any, name: str, *, dtypes: str, ndim: int) -> NDArray[Any]:
    if tensor.dtype[0] not in dtypes:
        raise Refused("dtype", f"expected {name} of kind {dtypes!r}, got {tensor.dtype}")
    if len(tensor.shape) != ndim:
        raise Refused("shape", f"expected {name} of {ndim} dimensions, got shape {tensor.shape}")
    try:
        return to_array(tensor)
    except MalformedMessage as error:
        raise Refused("shape", f"{name}: {error}") from error
