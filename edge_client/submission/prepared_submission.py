"""A submission before it has a sequence number: its prototypes (FedTC eq. 1-4), and its encoding."""

import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.data.images import LabeledImage
from edge_client.data.prototype_averaging import batch_prototypes
from edge_client.privacy.differencing_guard import NO_SUBMISSION, LastSubmission, keys_of
from edge_client.privacy.perturbation import MAX_FLOAT16, perturb_prototypes
from edge_client.privacy.policy import FAILED, is_private
from edge_client.storage.stored_values import ClassReport, SubmissionReport
from edge_client.submission.image_features import FoundImages, Workspace, training_feature_keys
from edge_client.training.local_round import LocalModel
from protocol.cli import plain
from protocol.errors import PrivacyRefused, ProtofleetError
from protocol.wire.codec import digest_of, encode, to_tensor, to_unsigned
from protocol.wire.messages import MAX_IMAGES, Privacy, Submission, TaskManifest, Tensor


class NoPrototype(ProtofleetError):
    """No class has enough usable images for a prototype."""


@dataclass(frozen=True)
class PreparedSubmission:
    """A device's contribution: m prototypes float16 (m, L), their class indices (m,), and the images in each (m,).

    In rounds `changes` are uploaded beside the prototypes, `loss` is the mean over the last epoch of training, if there
    was one, and `local_model` stays on the device. Without rounds `image_keys` has the keys of the images behind the
    prototypes by class name. Under differential privacy `privacy` is the cost.
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
        unusable = tuple((plain(str(path)), plain(reason)) for path, reason in self.unusable)
        return SubmissionReport(self.classes, unusable, size_bytes)


def prepare_prototypes(
    workspace: Workspace, task: TaskManifest, found: FoundImages, last: LastSubmission = NO_SUBMISSION
) -> PreparedSubmission:
    """Filter and average all training images, and perturb the prototypes if the task asks for it.

    A class of which fewer than `batch_size` images were added or removed stays as it was uploaded.

    Raises:
        NoPrototype: no class has enough images.
        ProtofleetError: the features exceed float16.
        PrivacyRefused: the task perturbs prototypes, and there is no secret.
    """
    prototypes, labels, counts, reports, image_keys = [], [], [], [], {}
    secret = workspace.secret(task)
    for label, name in enumerate(task.classes):
        members = found.of_class(label)
        if not members:
            continue
        training = found.for_training(label)
        pending = last.waiting(name, training, least=task.batch_size)
        used = last.stays(name, training) if pending else training
        rows = last.rows(label) if used is None else None
        if rows is not None:
            (values, sizes), image_keys[name] = rows, last.images[name]
        else:
            used = training if used is None else used
            pending = len(training) - len(used)
            values, sizes = _class_prototypes(workspace, task, label, used, secret)
            image_keys[name] = keys_of(used)
        prototypes.append(values)
        labels.append(np.full(len(sizes), label, dtype=np.uint32))
        counts.append(sizes)
        held = len(members) - len(training)
        reports.append(ClassReport(name, len(members), held, tuple(map(int, sizes)), pending))
    require_prototype(task, reports, found)
    return PreparedSubmission(
        prototypes=np.concatenate([part for part in prototypes if len(part)]),
        labels=np.concatenate(labels),
        counts=np.concatenate(counts),
        classes=tuple(reports),
        unusable=found.unusable,
        image_keys=image_keys,
    )


def outgoing_prototypes(
    values: NDArray[np.float32], labels: NDArray[np.uint32], *, task: TaskManifest, secret: bytes
) -> NDArray[np.float16]:
    """Return prototypes as they leave the device: float16, perturbed if the task asks for it."""
    how = task.perturbation
    if how is not None and how.on == "prototypes":
        return perturb_prototypes(values, labels, how, secret=secret)
    return values.astype(np.float16)


def require_prototype(task: TaskManifest, reports: Sequence[ClassReport], found: FoundImages) -> None:
    """Check that at least one class has a prototype.

    Raises:
        NoPrototype: none has; the message says how many images are needed.
    """
    if any(report.counts for report in reports):
        return
    if not reports:
        path, reason = found.unusable[0]
        raise NoPrototype(f"none of the {len(found.unusable)} images can be used; first: {path}: {reason}")
    most = max(reports, key=lambda report: report.images)
    # The smallest number of images of which the fraction `alpha`, rounded up, is `min_images`.
    alpha = Fraction(1) if task.program else Fraction(str(task.alpha))
    needed = math.floor((task.min_images - 1) / alpha) + 1
    raise NoPrototype(
        f"no class has enough images for a prototype: {most.name!r} has {most.images}, of which "
        f"{most.held_out} are held out, and {needed} training images are needed: add images"
        + (" or lower --holdout" if most.held_out else "")
    )


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
    # A class that stays as it was uploaded includes images that were deleted since.
    images = sum(max(each.images, each.held_out + sum(each.counts)) for each in prepared.classes)
    omitted = tuple(manifest.classes.index(report.name) for report in prepared.classes if report.left_out)
    return encode(
        Submission(
            task=task,
            sequence=sequence,
            prototypes=to_tensor(prepared.prototypes),
            labels=to_unsigned(prepared.labels),
            counts=to_unsigned(prepared.counts),
            images=min(int(prepared.counts.sum()) if private else images, MAX_IMAGES),
            omitted_classes=() if private else omitted,
            round=round_number,
            tensors=dict(prepared.changes),
            loss=prepared.loss,
            privacy=prepared.privacy,
        )
    )


def _class_prototypes(
    workspace: Workspace, task: TaskManifest, label: int, images: Sequence[LabeledImage], secret: bytes
) -> tuple[NDArray[np.float16], NDArray[np.uint32]]:
    identities = [image.identity for image in images]
    # The shuffle is the same at every start, so that the same images give the same submission. It depends on the
    # secret: with known batches, several submissions could be solved for the features of single images.
    key = hmac.digest(secret, f"{task.seed}/{workspace.settings.device_id}/{label}".encode(), "sha256")
    values, counts = batch_prototypes(
        lambda: workspace.cache.chunks(identities, *training_feature_keys(task)),
        alpha=task.alpha,
        batch_size=task.batch_size,
        min_images=task.min_images,
        rng=np.random.default_rng(list(key)),
    )
    if values.size and not np.abs(values).max() <= MAX_FLOAT16:
        name = task.classes[label]
        raise ProtofleetError(f"features of class {name!r} exceed float16: the backbone cannot be used")
    labels = np.full(len(counts), label, np.uint32)
    return outgoing_prototypes(values, labels, task=task, secret=secret), counts
