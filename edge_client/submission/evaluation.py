"""Evaluations: counts of correct predictions on held-out images."""

import contextlib
import logging
from collections.abc import Sequence

from edge_client.config import LocalSettings
from edge_client.data.images import find_images, held_out
from edge_client.inference import Head, evaluate
from edge_client.privacy.policy import is_private
from edge_client.storage.feature_cache import FeatureCache
from edge_client.submission.features import backbone_digests
from protocol.errors import ConfigError, GraphRefused
from protocol.log import event
from protocol.wire.messages import Evaluation, TaskManifest

log = logging.getLogger(__name__)


def evaluate_head(
    head: Head,
    *,
    task: bytes,
    manifest: TaskManifest,
    version: int,
    local: LocalSettings,
    cache: FeatureCache,
    previous: Head | None = None,
) -> Evaluation:
    """Count correct and incorrect predictions per class on the held-out images.

    Only images whose features are cached count. If the data folder does not match the task, none counts: that is no
    fault of the head. Under differential privacy none counts, because even a failure on an image is private.

    Args:
        head: the head to evaluate.
        task: the task's digest.
        manifest: the task.
        version: the head's version.
        local: the device's settings.
        cache: has the features of the images.
        previous: the head in use before, evaluated on the same images.

    Raises:
        GraphRefused: the head fails on these images.
    """
    members = _held_out_images(manifest, local, cache)
    correct = _correct(head, members, manifest, cache)
    previous_correct: tuple[int, ...] = ()
    if previous is not None:
        with contextlib.suppress(GraphRefused):
            previous_correct = _correct(previous, members, manifest, cache)
    return Evaluation(
        task=task,
        head_version=version,
        correct=correct,
        incorrect=tuple(len(of_class) - count for of_class, count in zip(members, correct, strict=True)),
        previous_correct=previous_correct,
    )


def _correct(
    head: Head, members: Sequence[Sequence[str]], manifest: TaskManifest, cache: FeatureCache
) -> tuple[int, ...]:
    chunks = [cache.chunks(of_class, *backbone_digests(manifest)) for of_class in members]
    return tuple(evaluate(head, of_class, label=label) for label, of_class in enumerate(chunks))


def _held_out_images(manifest: TaskManifest, local: LocalSettings, cache: FeatureCache) -> list[list[str]]:
    """Return the identities of the images to evaluate on, by class."""
    members: list[list[str]] = [[] for _ in manifest.classes]
    if is_private(manifest):
        return members
    try:
        images = find_images(local.data, manifest.classes)
    except ConfigError as error:
        event(log, logging.WARNING, "no image to evaluate the head on", error=error)
        return members
    known = set.intersection(*(cache.known(backbone) for backbone in backbone_digests(manifest)))
    for image in images:
        if image.identity in known and held_out(image, local.holdout):
            members[image.label].append(image.identity)
    return members
