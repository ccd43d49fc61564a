"""Evaluates heads on the device's held-out images."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from edge_client.core.submission_kinds import kind_of
from edge_client.heads.class_prior import MAX_VALUES, adjusted, choose, label_shares
from edge_client.heads.head import Head
from edge_client.kinds.image_features import Workspace, backbone_digests
from protocol.errors import ConfigError
from protocol.log import event
from protocol.statistics.balanced_accuracy import balanced_accuracy
from protocol.statistics.confidence import confidence_bins, novelty_bins
from protocol.wire.messages import CONFIDENCE_BINS, MAX_CONFUSED, Confused, Evaluation, TaskManifest

log = logging.getLogger(__name__)


def evaluate_head(
    workspace: Workspace,
    head: Head,
    *,
    task: bytes,
    manifest: TaskManifest,
    version: int,
    members: Sequence[Sequence[str]],
    labels: Mapping[str, int],
) -> Evaluation:
    """Count correct and incorrect predictions per class on `members`, the held-out images by class.

    `labels` are the device's labeled images of each class, for the prior.

    Raises:
        GraphRefused: the head fails on these images.
    """
    totals = [len(of_class) for of_class in members]
    has_prior = not head.is_personal and 0 < sum(totals) * len(totals) <= MAX_VALUES
    found: list[NDArray[np.float32]] | None = [] if has_prior else None
    bins = np.zeros((3, CONFIDENCE_BINS), np.int64)
    answers = count_answers(workspace, head, manifest, members=members, found=found, bins=bins)
    correct = correct_answers(answers)
    incorrect = (total - count for total, count in zip(totals, correct, strict=True))
    has_bins = not kind_of(manifest).in_rounds and any(totals)
    return Evaluation(
        task=task,
        head_version=version,
        correct=correct,
        incorrect=tuple(incorrect),
        correct_with_prior=_with_prior(found, totals, label_shares(manifest.classes, labels))
        if found
        else UNSET,
        confidence_correct=tuple(bins[0].tolist()) if has_bins else UNSET,
        confidence_images=tuple(bins[1].tolist()) if has_bins else UNSET,
        novelty_images=tuple(bins[2].tolist()) if has_bins and head.has_novelty else UNSET,
        confused=_confused(answers) if any(totals) else UNSET,
    )


def _confused(answers: Sequence[Counter[int]]) -> tuple[Confused, ...]:
    """Return the pairs of classes that were confused most often."""
    pairs = Counter(
        {
            (label, predicted): images
            for label, counts in enumerate(answers)
            for predicted, images in counts.items()
            if predicted != label
        }
    )
    return tuple(Confused(*pair, images) for pair, images in pairs.most_common(MAX_CONFUSED))


def _with_prior(
    found: Sequence[NDArray[np.float32]], totals: Sequence[int], labels: NDArray[np.float64] | None
) -> int:
    """Return the correct predictions with the prior `auto`, by the head's probabilities, class by class."""
    rows, truth = np.concatenate(found), np.repeat(np.arange(len(totals)), totals)
    shares = choose("auto", rows, labels).shares
    best = (rows if shares is None else adjusted(rows, shares)).argmax(axis=1)
    return int((best == truth).sum())


def count_answers(
    workspace: Workspace,
    head: Head,
    manifest: TaskManifest,
    *,
    members: Sequence[Sequence[str]],
    found: list[NDArray[np.float32]] | None = None,
    bins: NDArray[np.int64] | None = None,
) -> list[Counter[int]]:
    """Return the images that a head puts into each class, by their own class; the rest is as in `evaluate_head`.

    The probabilities are appended to `found`, class by class, and predictions counted in `bins`, as by `evaluate`.
    """
    keys = backbone_digests(manifest)
    return [
        evaluate(head, workspace.cache.chunks(of_class, *keys), label=label, found=found, bins=bins)
        for label, of_class in enumerate(members)
    ]


def correct_answers(answers: Sequence[Counter[int]]) -> tuple[int, ...]:
    """Return the correct predictions per class."""
    return tuple(counts[label] for label, counts in enumerate(answers))


def evaluate(
    head: Head,
    chunks: Iterable[NDArray[np.float32]],
    *,
    label: int,
    found: list[NDArray[np.float32]] | None = None,
    bins: NDArray[np.int64] | None = None,
) -> Counter[int]:
    """Return how many of these features, all of class `label`, the head puts into each class.

    The probabilities are appended to `found`. The rows of `bins`, (3, CONFIDENCE_BINS), are increased: the correct
    predictions and all in each bin of confidence, and all in each bin of novelty, if the head has it.

    Raises:
        GraphRefused: it fails on them.
    """
    answers: Counter[int] = Counter()
    for chunk in chunks:
        probabilities, novelty = head.run(chunk)
        best = probabilities.argmax(axis=1)
        is_correct = best == label
        answers.update(best.tolist())
        if bins is not None:
            places = confidence_bins(probabilities)
            for row, chosen in zip(bins[:2], (places[is_correct], places), strict=True):
                np.add.at(row, chosen, 1)
            if novelty is not None:
                np.add.at(bins[2], novelty_bins(novelty), 1)
        if found is not None:
            found.append(probabilities)
    return answers


def balanced(evaluation: Evaluation, head: Head, manifest: TaskManifest) -> float | None:
    """Return a personal model's accuracy over all classes that the fleet knows; None if the model is the fleet's.

    No other device can evaluate it: classes of which this one has no held-out images count as not recognized.
    """
    if manifest.program is None or not manifest.program.persistent:
        return None
    return balanced_accuracy(evaluation.correct, evaluation.incorrect, head.known_classes)


def held_out_images(workspace: Workspace, manifest: TaskManifest) -> list[list[str]]:
    """Return the identities of the images to evaluate on, by class: held-out ones whose features are cached.

    If the data folder does not match the task, there are none: that is no fault of a head. Under differential privacy,
    and with `--max-epsilon`, there are none, because even a failure on an image is private.
    """
    members: list[list[str]] = [[] for _ in manifest.classes]
    if workspace.is_bounded(manifest):
        return members
    try:
        images = workspace.find_images(manifest).images
    except ConfigError as error:
        event(log, logging.WARNING, "no image to evaluate the head on", error=error)
        return members
    known, kept = workspace.cache.known(*backbone_digests(manifest)), workspace.held_out(images)
    for image in images:
        if image.identity in known and image.relative in kept:
            members[image.label].append(image.identity)
    return members
