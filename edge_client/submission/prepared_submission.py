"""A submission before it has a sequence number, and its encoding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.data.images import LabeledImage, held_out
from edge_client.privacy.policy import FAILED, is_private
from edge_client.storage.stored_values import ClassReport, SubmissionReport
from edge_client.training.local_round import LocalModel
from protocol.errors import PrivacyRefused, ProtofleetError
from protocol.wire.codec import digest_of, encode, to_tensor, to_unsigned
from protocol.wire.messages import Privacy, Submission, TaskManifest, Tensor


@dataclass(frozen=True)
class FoundImages:
    """A device's images whose features are in the cache, and the unusable files with reasons."""

    usable: tuple[LabeledImage, ...]
    unusable: tuple[tuple[Path, str], ...]

    def of_class(self, label: int) -> list[LabeledImage]:
        """Return the usable images of a class."""
        return [image for image in self.usable if image.label == label]

    def for_training(self, holdout: float, label: int | None = None) -> list[LabeledImage]:
        """Return the usable images that are not held out, of one class or of all."""
        images = self.usable if label is None else self.of_class(label)
        return [image for image in images if not held_out(image, holdout)]


@dataclass(frozen=True)
class PreparedSubmission:
    """A device's contribution.

    Args:
        prototypes: float16 (m, L).
        labels: (m,) class indices.
        counts: (m,) images in each prototype.
        classes: a report per class that has images.
        unusable: files that cannot be used, and why.
        changes: in rounds, tensors uploaded beside the prototypes.
        loss: in rounds, mean over the last epoch of training, if there was one.
        privacy: under differential privacy, the cost.
        image_keys: without rounds, by class name the keys of the images behind the prototypes.
        local_model: in rounds, what stays on the device.
    """

    prototypes: NDArray[np.float16]
    labels: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    classes: tuple[ClassReport, ...]
    unusable: tuple[tuple[Path, str], ...]
    changes: Mapping[str, Tensor] = field(default_factory=dict)
    loss: float | None = None
    privacy: Privacy | None = None
    image_keys: Mapping[str, frozenset[str]] = field(default_factory=dict)
    local_model: LocalModel | None = None

    @property
    def fingerprint(self) -> str:
        """Return a digest that is equal for equal prototypes, labels and counts."""
        parts = (self.prototypes.tobytes(), self.labels.tobytes(), self.counts.tobytes())
        return digest_of(b"".join(map(digest_of, parts))).hex()

    def report(self, size_bytes: int) -> SubmissionReport:
        """Return the report that `edge-client status` shows."""
        unusable = tuple((str(path), reason) for path, reason in self.unusable)
        return SubmissionReport(self.classes, unusable, size_bytes)


def encode_submission(
    prepared: PreparedSubmission, *, task: bytes, manifest: TaskManifest, sequence: int, round_number: int = 0
) -> bytes:
    """Return the encoded submission, for the round of that number if the task has rounds.

    Raises:
        PrivacyRefused: exactly one of the task and the submission has differential privacy.
    """
    private = is_private(manifest)
    if private != (prepared.privacy is not None) or (
        private and (prepared.changes or prepared.loss is not None)
    ):
        raise PrivacyRefused(FAILED)
    images = sum(report.images for report in prepared.classes)
    omitted = tuple(manifest.classes.index(report.name) for report in prepared.classes if report.left_out)
    return encode(
        Submission(
            task=task,
            sequence=sequence,
            prototypes=to_tensor(prepared.prototypes),
            labels=to_unsigned(prepared.labels),
            counts=to_unsigned(prepared.counts),
            images=int(prepared.counts.sum()) if private else images,
            omitted_classes=() if private else omitted,
            round=round_number,
            tensors=dict(prepared.changes),
            loss=prepared.loss,
            privacy=prepared.privacy,
        )
    )


def require_prototype(task: TaskManifest, reports: Sequence[ClassReport], found: FoundImages) -> None:
    """Check that at least one class has a prototype.

    Raises:
        ProtofleetError: none has; the message says how many images are needed.
    """
    if any(report.counts for report in reports):
        return
    if not reports:
        path, reason = found.unusable[0]
        raise ProtofleetError(
            f"none of the {len(found.unusable)} images can be used; first: {path}: {reason}"
        )
    most = max(reports, key=lambda report: report.images)
    # The smallest number of images of which the fraction `alpha`, rounded up, is `min_images`.
    alpha = Fraction(1) if task.program else Fraction(str(task.alpha))
    needed = math.floor((task.min_images - 1) / alpha) + 1
    raise ProtofleetError(
        f"no class has enough images for a prototype: {most.name!r} has {most.images}, of which "
        f"{most.held_out} are held out, and {needed} training images are needed: add images"
        + (" or lower --holdout" if most.held_out else "")
    )
