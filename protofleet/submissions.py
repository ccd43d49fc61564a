"""Submissions as bytes, for a transport of one's own: the device's message, and the aggregator's checks."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aggregator.intake.validation import (
    Expectation,
    Prototypes,
    Refused,
    check_submission,
    read_message,
)
from protocol.errors import ConfigError
from protocol.wire.arrays import to_unsigned
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import MAX_IMAGES, BlobRef, Submission, TaskManifest
from protocol.wire.quantization import submission_fields
from protofleet.prototypes import check_prototypes


def encode_submission(prototypes: Prototypes, *, classes: Sequence[str]) -> bytes:
    """Return a device's prototypes as the bytes of its submission: one byte a value.

    They are neither signed nor encrypted. That is the transport's job, and so is which of a device's submissions is the
    newest.

    Args:
        prototypes: what `device_prototypes` or `batch_prototypes` returned.
        classes: the C class names, in the order of the labels.

    Raises:
        ConfigError: there are no prototypes, or a receiver would refuse them: a label is no class, a value is beyond
            float16, a count is too small for a block.
    """
    check_prototypes(prototypes)
    _, counts = prototypes.every
    if not len(counts):
        raise ConfigError("expected prototypes to submit, got none: give the device more images")
    if (images := int(counts.sum())) > MAX_IMAGES:
        raise ConfigError(f"expected at most {MAX_IMAGES} images in prototypes, got {images}")
    expectation = _expectation(classes, prototypes.values.shape[1], batch_size=1, min_images=1)
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        submission = prototypes_submission(prototypes, expectation, images=images)
    try:
        check_submission(submission, expectation)
    except Refused as error:
        raise ConfigError(f"these prototypes cannot be submitted: {error}") from error
    return encode(submission)


def decode_submission(
    data: bytes, *, classes: Sequence[str], feature_size: int, batch_size: int = 5, min_images: int = 2
) -> Prototypes:
    """Return the prototypes in the bytes of a submission, once the aggregator's checks have passed.

    The bytes may come from an attacker. A forged submission that passes is limited by `train_head`, as at the
    aggregator.

    Args:
        data: what `encode_submission` returned on a device, in any size that the transport lets through.
        classes: the C class names, the same in the same order as there.
        feature_size: L, the length of a feature.
        batch_size: images in a prototype, at least, of a class that has several.
        min_images: images in a prototype, at least, if there are fewer than `batch_size`.

    Raises:
        ProtofleetError: the bytes are no valid submission of these classes; `reason` is the aggregator's code for it.
        ConfigError: there are no classes, or two of one name.
    """
    try:
        return decoded(
            data, _expectation(classes, feature_size, batch_size=batch_size, min_images=min_images)
        )
    except Refused as error:
        if error.reason != "unknown_task":
            raise
        text = f"expected a submission of the classes {', '.join(classes)}, in this order, got one of others"
        raise Refused(error.reason, text) from error


def _expectation(
    classes: Sequence[str], feature_size: int, *, batch_size: int, min_images: int
) -> Expectation:
    """Return the checks of a submission, whose task is the digest of the class names."""
    if isinstance(classes, str) or not classes or len(set(classes)) < len(classes):
        raise ConfigError(f"expected the names of different classes, got {classes!r}")
    named = task_manifest("fedtc", classes, alpha=1.0, batch_size=1, min_images=1, seed=0, prototypes="auto")
    checked = msgspec.structs.replace(named, batch_size=batch_size, min_images=min_images)
    return Expectation(digest_of(encode(named)), checked, feature_size)


def decoded(payload: bytes, expectation: Expectation) -> Prototypes:
    """Return the checked prototypes of an encoded submission; raises Refused if it is not valid."""
    message = read_message(payload)
    if not isinstance(message, Submission):
        raise Refused("malformed", "expected a submission, got an evaluation")
    return check_submission(message, expectation)


def prototypes_submission(prototypes: Prototypes, expectation: Expectation, *, images: int) -> Submission:
    """Return the submission of a device that has read `images` images to a task of prototypes."""
    values = prototypes.values.astype(np.float16)
    return submission_of(
        prototypes.labels,
        prototypes.counts,
        task=expectation.task,
        images=images,
        **submission_fields(expectation.manifest, values, prototypes.block),
    )


def submission_of(
    labels: NDArray[np.integer], counts: NDArray[np.integer], *, task: bytes, images: int, **fields: Any
) -> Submission:
    """Return a device's submission, with the values of its prototypes as `fields`."""
    return Submission(
        task=task,
        sequence=1,
        labels=to_unsigned(labels),
        counts=to_unsigned(counts),
        images=images,
        **fields,
    )


def task_manifest(algorithm: str, classes: Sequence[str], **settings: Any) -> TaskManifest:
    """Return the manifest of a task whose features are given."""
    return TaskManifest(
        fleet="simulation",
        algorithm=algorithm,
        classes=tuple(classes),
        backbones=(BlobRef(digest=bytes(32), size_bytes=1, name="features are given"),),
        **settings,
    )
