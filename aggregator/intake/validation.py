"""Validation of uploads: bytes to a checked submission, or the reason for refusing it. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from protocol.errors import MalformedMessage, ProtofleetError, VersionMismatch
from protocol.statistics.integer_rows import MAX_VALUE, triangle_size
from protocol.wire.arrays import to_array
from protocol.wire.codec import decode, message_kind
from protocol.wire.messages import (
    MAX_IMAGES,
    Evaluation,
    Reason,
    SealedMask,
    Submission,
    TaskManifest,
    Tensor,
)
from protocol.wire.principal_prototypes import (
    IMAGES_PER_ROW,
    MIN_BLOCK_IMAGES,
    MIN_GROUP_IMAGES,
    PrincipalPrototypes,
)
from protocol.wire.quantization import LIMITS, RANGE, dequantize, dequantized_block, exact_range

FLOAT16_SLACK = 1.01
"""Factor by which rounding to float16 may lengthen a prototype."""

MAX_DEVIATION = float(np.finfo(np.float16).max)
"""Distance of an image's value from the mean of its class, at most: prototypes are in float16."""


class Refused(ProtofleetError):
    """A device's message is refused; with `superseded`, `sequence` is that of the submission that counts."""

    def __init__(self, reason: Reason, detail: str, *, sequence: int = 0) -> None:
        super().__init__(detail)
        self.reason: Reason = reason
        self.detail = detail
        self.sequence = sequence

    def __reduce__(self) -> tuple[type, tuple[Reason, str], dict[str, object]]:
        return type(self), (self.reason, self.detail), self.__dict__


@dataclass(frozen=True)
class Expectation:
    """The shape and limits of a submission to the current task."""

    task: bytes
    """The digest of its manifest."""
    manifest: TaskManifest
    prototype_size: int
    """L, or with a program or statistics D."""
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of each uploaded tensor, if the task has a program."""
    max_norm: float = math.inf
    """Greatest length of a prototype, where the algorithm bounds it."""


@dataclass(frozen=True)
class Prototypes:
    """A checked submission: m prototypes."""

    values: NDArray[np.float32]
    """(m, L); with a program (m, D)."""
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]
    """Images averaged in each prototype."""
    tensors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """The program's uploaded tensors by name."""
    block: PrincipalPrototypes | None = None
    """Of images that are in no other prototype; then m may be 0."""

    @property
    def every(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The class and the images of each mean, including the means of a block."""
        if self.block is None:
            return self.labels, self.counts
        labels, counts = (self.labels, self.block.labels), (self.counts, self.block.counts)
        return np.concatenate(labels), np.concatenate(counts)


def read_message(payload: bytes) -> Submission | Evaluation:
    """Decode a device's submission or evaluation; raises Refused if it is malformed or of another version."""
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
    """Return a submission's prototypes and tensors, once all of it but the round's number is valid.

    Raises:
        Refused: another task, a wrong shape or dtype, values that are not finite, unknown classes, too few images,
            implausible values, with a program several prototypes of one class, or not exactly its tensors.
    """
    check_envelope(submission, expectation)
    prototypes, labels, counts = _check_prototypes(submission, expectation)
    tensors = _check_tensors(submission.tensors, expectation)
    block = None
    if expectation.manifest.program is None:
        limits = tensors.pop(RANGE)
        values, block = dequantize(prototypes, limits), _check_block(submission, limits, expectation)
    else:
        values = prototypes.astype(np.float32)
    return Prototypes(
        values,
        labels.astype(np.int64),
        counts.astype(np.int64),
        tensors={name: values.astype(np.float32) for name, values in tensors.items()},
        block=block,
    )


def _check_block(
    submission: Submission, limits: NDArray[np.floating], expectation: Expectation
) -> PrincipalPrototypes | None:
    """Return a submission's principal prototypes, if it has any."""
    encoded, manifest = submission.block, expectation.manifest
    if encoded is UNSET:
        return None
    least = max(MIN_GROUP_IMAGES, manifest.min_images, manifest.batch_size)
    try:
        block = dequantized_block(encoded, limits, classes=len(manifest.classes), least=least)
    except MalformedMessage as error:
        raise Refused("malformed", str(error)) from error
    images = block.images
    if images < MIN_BLOCK_IMAGES or IMAGES_PER_ROW * len(block.rows) > images:
        raise Refused(
            "malformed",
            f"expected at least {MIN_BLOCK_IMAGES} images in a block and {IMAGES_PER_ROW} for each of its rows, "
            f"got {images} and {len(block.rows)} rows",
        )
    averaged = images + int(to_array(submission.counts).sum(dtype=np.int64))
    if averaged > submission.images:
        raise Refused("implausible", f"{averaged} images in prototypes of {submission.images} that were read")
    if int(block.counts.max()) > MAX_IMAGES:
        raise Refused("malformed", f"expected at most {MAX_IMAGES} images in a mean of a block")
    squares = (block.rows.astype(np.float64) ** 2).sum(axis=0) + block.diagonal
    if not np.isfinite(squares).all():
        raise Refused("not_finite", "a row or the diagonal of a block is not finite")
    if squares.max() > images * MAX_DEVIATION**2:
        raise Refused(
            "implausible",
            f"expected values of at most {MAX_DEVIATION:.0f} in a block, got a mean square of "
            f"{squares.max() / images:.3g}",
        )
    return block


def count_rows(submission: Submission, expectation: Expectation) -> dict[int, int]:
    """Check a submission like `check_submission`, without copies of its prototypes.

    Returns:
        The prototypes of each class that has any; of class sums, and where blocks are accepted, the images in them.
    """
    weights = None
    if expectation.manifest.statistics is not None:
        _, labels, counts = check_statistics(submission, expectation)
        weights = counts if expectation.manifest.batch_size == 1 else None
    else:
        check_envelope(submission, expectation)
        _, labels, counts = _check_prototypes(submission, expectation)
        tensors = _check_tensors(submission.tensors, expectation)
        if expectation.manifest.accepts_blocks:
            block, weights = _check_block(submission, tensors[RANGE], expectation), counts
            if block is not None:
                labels, weights = (
                    np.concatenate(pair) for pair in ((labels, block.labels), (counts, block.counts))
                )
    numbers = np.bincount(labels, weights)
    return {int(label): int(numbers[label]) for label in np.flatnonzero(numbers)}


def check_statistics(
    submission: Submission, expectation: Expectation
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return class sums int32 or rows int8 (m, D), labels (m,) and counts (m,), once they are valid.

    A second moment is not decoded: a short one takes long to decode, so only trainings do, whose number is limited.

    Raises:
        Refused: as `check_submission`, or several sums of one class, values that no images have, or another form than
            the task's.
    """
    check_envelope(submission, expectation)
    has_sums = expectation.manifest.batch_size == 1
    if expectation.manifest.differential_privacy is not None:
        sums = check_noisy_sums(submission, expectation)
        return sums.sums, np.arange(len(sums.counts)), to_array(submission.counts)
    rows, labels, counts = _check_rows(submission, expectation, dtype="i4" if has_sums else "i1")
    if has_sums and len(np.unique(labels)) < len(labels):
        raise Refused("malformed", "expected one sum of each class at most, got several")
    most = MAX_VALUE * counts.astype(np.int64) if has_sums else MAX_VALUE
    if (rows.max(axis=1) > most).any() or (rows.min(axis=1) < -most).any():
        raise Refused("implausible", f"expected values of at most {MAX_VALUE} for each image")
    _check_images(labels, counts, submission.images, expectation.manifest)
    names, wanted = sorted(submission.tensors), ["second_moment"] if has_sums else []
    if names != wanted:
        got = ", ".join(names)[:120] or "none"
        raise Refused("malformed", f"expected the tensors {', '.join(wanted) or 'none'}, got {got}")
    if has_sums:
        _array(submission.tensors["second_moment"], "second_moment", dtypes="u1", ndim=1)
    return rows, labels, counts


@dataclass(frozen=True, kw_only=True)
class NoisySums:
    """A checked submission under differential privacy, int32: any values can be those of images with noise."""

    counts: NDArray[Any]
    """Images of each class in units of 1/64, (C,)."""
    sums: NDArray[Any]
    """Sums of the rows of each class in units of 1/64, (C, D)."""
    second_moment: NDArray[Any]
    """The upper triangle of the sum of all rows' products, by rows, (D (D + 1) / 2,)."""


def check_noisy_sums(submission: Submission, expectation: Expectation) -> NoisySums:
    """Return the sums of a submission under differential privacy; raises Refused unless their shapes fit."""
    check_envelope(submission, expectation)
    if isinstance(submission.mask, SealedMask):
        raise Refused("malformed", "expected no mask for a second operator")
    sums, labels, _ = _check_rows(submission, expectation, dtype="i4")
    classes = len(expectation.manifest.classes)
    if labels.tolist() != list(range(classes)):
        raise Refused("malformed", "expected a sum of each class, in the order of the classes")
    shapes = {"counts": (classes,), "second_moment": (triangle_size(sums.shape[1]),)}
    if submission.tensors.keys() != shapes.keys():
        got = ", ".join(sorted(submission.tensors))[:120] or "none"
        raise Refused("malformed", f"expected the tensors {', '.join(shapes)}, got {got}")
    tensors = {name: _array(submission.tensors[name], name, dtypes="i4", ndim=1) for name in shapes}
    for name, values in tensors.items():
        if values.shape != shapes[name]:
            raise Refused("shape", f"expected {name} of shape {shapes[name]}, got {values.shape}")
    return NoisySums(sums=sums, **tensors)


def check_envelope(submission: Submission, expectation: Expectation) -> None:
    """Refuse a submission to another task, or one whose cost is missing or too high."""
    if submission.task not in {expectation.task, *(expectation.manifest.continues or ())}:
        expected, got = (task.hex()[:12] for task in (expectation.task, submission.task))
        raise Refused("unknown_task", f"expected task {expected}, got {got}")
    if submission.block is not UNSET and not expectation.manifest.accepts_blocks:
        raise Refused("malformed", "expected no block: the task takes no principal prototypes")
    if submission.round and expectation.manifest.program is None:
        raise Refused(
            "unknown_round", f"the task has no rounds, got a submission for round {submission.round}"
        )
    private, cost = expectation.manifest.differential_privacy, submission.privacy
    if private is not None and cost is None:
        raise Refused("malformed", "expected what the submission costs in privacy, got none")
    if private is not None and cost is not None and cost.total_epsilon > private.max_epsilon:
        limit, spent = private.max_epsilon, cost.total_epsilon  # a device spends no more
        raise Refused("malformed", f"expected a total epsilon of at most {limit:g}, got {spent:g}")


def _check_prototypes(
    submission: Submission, expectation: Expectation
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return prototypes, labels and counts as they arrived."""
    manifest = expectation.manifest
    in_rounds = manifest.program is not None
    prototypes, labels, counts = _check_rows(submission, expectation, dtype="f2" if in_rounds else "u1")
    if in_rounds and len(np.unique(labels)) < len(labels):
        raise Refused("malformed", "expected one prototype of each class at most, got several")
    if in_rounds and not _all_finite(prototypes):
        raise Refused("not_finite", "a prototype holds NaN or infinity")
    _check_images(labels, counts, submission.images, manifest)
    _check_norms(prototypes, expectation)
    return prototypes, labels, counts


def _check_rows(
    submission: Submission, expectation: Expectation, *, dtype: str
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return prototypes, labels and counts, whose shapes fit, of known classes and enough images."""
    manifest = expectation.manifest
    prototypes = _array(submission.prototypes, "prototypes", dtypes=dtype, ndim=2)
    labels = _array(submission.labels, "labels", dtypes="u", ndim=1)
    counts = _array(submission.counts, "counts", dtypes="u", ndim=1)
    rows, size = prototypes.shape
    fits = size == expectation.prototype_size and len(labels) == len(counts) == rows
    if not fits or not (rows or submission.block is not UNSET):
        raise Refused(
            "shape",
            f"expected (m, {expectation.prototype_size}) prototypes with m labels and counts, "
            f"got {prototypes.shape}, {labels.shape}, {counts.shape}",
        )
    classes = len(manifest.classes)
    if int(labels.max(initial=0)) >= classes:
        raise Refused("unknown_class", f"expected labels below {classes}, got {int(labels.max())}")
    in_rounds = manifest.program is not None
    least = manifest.min_images if in_rounds else min(manifest.min_images, manifest.batch_size)
    if rows and (int(counts.min()) < least or int(counts.max()) > MAX_IMAGES):
        raise Refused(
            "malformed",
            f"expected {least} to {MAX_IMAGES} images in every prototype, "
            f"got {int(counts.min())} to {int(counts.max())}",
        )
    return prototypes, labels, counts


def _check_images(labels: NDArray[Any], counts: NDArray[Any], images: int, manifest: TaskManifest) -> None:
    """Refuse images that no device can have averaged that follows the task."""
    averaged = int(counts.sum(dtype=np.int64))
    if averaged > images:
        raise Refused("implausible", f"{averaged} images in prototypes of {images} that were read")
    if manifest.program is not None:
        return
    # A class's images are in full batches (FedTC eq. 4), or in larger ones of an earlier task, which are never split.
    batch = manifest.batch_size
    several = np.bincount(labels)[labels] > 1
    if (fewest := int(counts[several].min(initial=batch))) < batch:
        raise Refused(
            "implausible",
            f"expected at least {batch} images in each prototype of a class with several, got {fewest}",
        )


def _check_norms(prototypes: NDArray[Any], expectation: Expectation) -> None:
    """Refuse prototypes that are longer than the algorithm can make them."""
    if expectation.max_norm < math.inf and expectation.manifest.perturbation is None:
        norm = float(np.linalg.norm(prototypes.astype(np.float32), axis=1).max())
        if norm > expectation.max_norm * FLOAT16_SLACK:
            raise Refused(
                "implausible", f"expected prototypes no longer than {expectation.max_norm:g}, got {norm:.3g}"
            )


def _all_finite(values: NDArray[Any]) -> bool:
    """Return True if float16 values hold neither NaN nor infinity, without a temporary array.

    NaN and infinity are the bit patterns from infinity on, among the positive numbers and among the negative.
    """
    infinity = np.float16(np.inf)
    bits = values.reshape(-1)
    return bool(
        bits.view(np.int16).max(initial=0) < infinity.view(np.int16)
        and bits.view(np.uint16).max(initial=0) < (-infinity).view(np.uint16)
    )


def _check_tensors(
    tensors: Mapping[str, Tensor], expectation: Expectation
) -> dict[str, NDArray[np.floating]]:
    """Return exactly the tensors of the task's program; without one, the range of the features."""
    in_rounds = expectation.manifest.program is not None
    shapes = expectation.tensors if in_rounds else {RANGE: (2, expectation.prototype_size)}
    kinds = dict.fromkeys(shapes, "f2")
    # Devices of a version without blocks send an exact range to any task.
    if is_coarse := expectation.manifest.accepts_blocks and LIMITS in tensors:
        shapes, kinds = {**shapes, LIMITS: (2,)}, {RANGE: "u1", LIMITS: "f2"}
    if tensors.keys() != shapes.keys():
        expected, got = (", ".join(sorted(names)) or "none" for names in (shapes, tensors))
        raise Refused("malformed", f"expected the tensors {expected}, got {got[:120]}")
    checked: dict[str, NDArray[Any]] = {}
    for name, shape in shapes.items():
        values = _array(tensors[name], name, dtypes=kinds[name], ndim=len(shape))
        if values.shape != shape:
            raise Refused("shape", f"expected {name} of shape {shape}, got {values.shape}")
        if kinds[name] == "f2" and not _all_finite(values):
            raise Refused("not_finite", f"{name} holds NaN or infinity")
        checked[name] = values
    if is_coarse:
        if (ends := checked.pop(LIMITS))[0] > ends[1]:
            raise Refused("malformed", "expected limits from low to high, got them from high to low")
        checked[RANGE] = exact_range(checked[RANGE], ends)
    if not in_rounds and (checked[RANGE][0] > checked[RANGE][1]).any():
        raise Refused("malformed", "expected a range from low to high, got one from high to low")
    return checked


def _array(tensor: Tensor, name: str, *, dtypes: str, ndim: int) -> NDArray[Any]:
    if not tensor.dtype.startswith(dtypes):
        raise Refused("dtype", f"expected {name} of kind {dtypes!r}, got {tensor.dtype}")
    if len(tensor.shape) != ndim:
        raise Refused("shape", f"expected {name} of {ndim} dimensions, got shape {tensor.shape}")
    try:
        return to_array(tensor)
    except MalformedMessage as error:
        raise Refused("shape", f"{name}: {error}") from error
