"""Prototypes of a task without rounds: filtered averages of batches (FedTC eq. 1-4)."""

import hmac
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_client.config import LocalSettings
from edge_client.data.images import LabeledImage
from edge_client.data.prototype_averaging import batch_prototypes
from edge_client.privacy.differencing_guard import NO_SUBMISSION, LastSubmission, keys_of
from edge_client.privacy.perturbation import MAX_FLOAT16, perturb_prototypes
from edge_client.storage.feature_cache import FeatureCache
from edge_client.storage.stored_values import ClassReport
from edge_client.submission.features import training_feature_keys
from edge_client.submission.prepared_submission import FoundImages, PreparedSubmission, require_prototype
from protocol.errors import ProtofleetError
from protocol.wire.messages import TaskManifest


def prepare_prototypes(
    *,
    task: TaskManifest,
    local: LocalSettings,
    found: FoundImages,
    cache: FeatureCache,
    secret: bytes = b"",
    last: LastSubmission = NO_SUBMISSION,
) -> PreparedSubmission:
    """Filter and average all training images, and perturb the prototypes if the task asks for it.

    A class of which fewer than `batch_size` images were added or removed stays as it was uploaded.

    Args:
        task: the task.
        local: the device's settings.
        found: the device's images.
        cache: has their features.
        secret: the device's, 32 bytes: seeds the shuffle and the noise.
        last: the last submission.

    Raises:
        ProtofleetError: no class has enough images, or the features exceed float16.
        PrivacyRefused: the task perturbs prototypes, and `secret` is not 32 bytes.
    """
    prototypes, labels, counts, reports, image_keys = [], [], [], [], {}
    for label, name in enumerate(task.classes):
        members = found.of_class(label)
        if not members:
            continue
        training = found.for_training(local.holdout, label)
        pending = last.waiting(name, training, least=task.batch_size)
        used = last.stays(name, training) if pending else training
        rows = last.rows(label) if used is None else None
        if rows is not None:
            (values, sizes), image_keys[name] = rows, last.images[name]
        else:
            used = training if used is None else used
            pending = len(training) - len(used)
            values, sizes = _class_prototypes(used, task, label, local=local, cache=cache, secret=secret)
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


def _class_prototypes(
    images: Sequence[LabeledImage],
    task: TaskManifest,
    label: int,
    *,
    local: LocalSettings,
    cache: FeatureCache,
    secret: bytes,
) -> tuple[NDArray[np.float16], NDArray[np.uint32]]:
    identities = [image.identity for image in images]
    # The shuffle is the same at every start, so that the same images give the same submission. It depends on the
    # secret: with known batches, several submissions could be solved for the features of single images.
    key = hmac.digest(secret, f"{task.seed}/{local.device_id}/{label}".encode(), "sha256")
    values, counts = batch_prototypes(
        lambda: cache.chunks(identities, *training_feature_keys(task)),
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
