"""Evaluations: counts of correct predictions on held-out images."""

import contextlib
from collections.abc import Sequence

from edge_client.config import LocalSettings
from edge_client.data.images import held_out
from edge_client.inference.predictor import Head, evaluate
from edge_client.privacy.policy import is_private
from edge_client.storage.feature_cache import FeatureCache
from edge_client.submission.features import backbone_digests, images_with_features
from protocol.errors import GraphRefused
from protocol.wire.messages import Evaluation, TaskManifest


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
    images = [] if is_private(manifest) else images_with_features(manifest, local, cache)
    members = [
        [image.identity for image in images if image.label == label and held_out(image, local.holdout)]
        for label in range(len(manifest.classes))
    ]
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
