"""The device's pieces of work: images found, a submission made of them, and a head evaluated on some of them."""

import contextlib
import hmac
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.config import LocalSettings
from edge_client.data.extraction import Alter, Extraction, extract
from edge_client.data.images import LabeledImage, find_images, held_out
from edge_client.data.prototypes import batch_prototypes
from edge_client.inference.predictor import Head, evaluate
from edge_client.privacy.differencing_guard import NO_SUBMISSION, LastSubmission, keys_of
from edge_client.privacy.perturbation import MAX_FLOAT16, cache_tag, perturb_image, perturb_prototypes
from edge_client.privacy.policy import FAILED, is_private
from edge_client.runtime.backbone import Backbone
from edge_client.storage.facts import ClassReport
from edge_client.storage.feature_cache import FeatureCache
from edge_client.training.local_round import RoundResult
from protocol.errors import ConfigError, GraphRefused, PrivacyRefused, ProtofleetError
from protocol.preprocessing import Preprocessing
from protocol.wire.codec import digest_of, encode, to_tensor, to_unsigned
from protocol.wire.messages import Evaluation, Privacy, Submission, TaskManifest, Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundImages:
    """A device's images whose features are in the cache, and what could not be used and why."""

    usable: tuple[LabeledImage, ...]
    refused: tuple[tuple[Path, str], ...]

    def of_class(self, label: int) -> list[LabeledImage]:
        """The usable ones of a class."""
        return [image for image in self.usable if image.label == label]


@dataclass(frozen=True)
class PreparedSubmission:
    """A device's contribution before it has a number.

    Args:
        prototypes: float16 (m, L).
        labels: (m,) class indices.
        counts: (m,) images in each prototype.
        classes: a report per class that has images.
        refused: what could not be used, and why.
        changes: with a program, what is uploaded beside prototypes.
        loss: with a program, mean over the last epoch of training, if there was one.
        privacy: with differential privacy, what it cost.
        images: without rounds, of each class by name the keys of the images behind its prototypes.
    """

    prototypes: NDArray[np.float16]
    labels: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    classes: tuple[ClassReport, ...]
    refused: tuple[tuple[Path, str], ...]
    changes: Mapping[str, Tensor] = field(default_factory=dict)
    loss: float | None = None
    privacy: Privacy | None = None
    images: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """The same for the same prototypes, so that nothing is sent twice."""
        parts = (self.prototypes.tobytes(), self.labels.tobytes(), self.counts.tobytes())
        return digest_of(b"".join(map(digest_of, parts))).hex()


def prepare(
    *,
    task: TaskManifest,
    local: LocalSettings,
    found: FoundImages,
    cache: FeatureCache,
    secret: bytes = b"",
    standing: LastSubmission = NO_SUBMISSION,
) -> PreparedSubmission:
    """Filter and average all of a device's images (FedTC eq. 1-4), and perturb what comes of it if so wanted.

    A class of which fewer than `batch_size` images have come or gone stays as it was uploaded.

    Args:
        task: the task.
        local: the device's own.
        found: its images.
        cache: has their features.
        secret: the device's, 32 bytes: the shuffle and the noise hang on it.
        standing: what was uploaded last.

    Raises:
        ProtofleetError: no class has enough images, or the features do not fit float16.
        PrivacyRefused: the task wants prototypes perturbed, and `secret` has not 32 bytes.
    """
    prototypes, labels, counts, reports, behind = [], [], [], [], {}
    for label, name in enumerate(task.classes):
        members = found.of_class(label)
        if not members:
            continue
        kept = [image for image in members if not held_out(image, local.holdout)]
        waiting = standing.waiting(name, kept, least=task.batch_size)
        used = standing.stays(name, kept) if waiting else kept
        rows = standing.rows(label) if used is None else None
        if rows is not None:
            (values, sizes), behind[name] = rows, standing.images[name]
        else:
            used = kept if used is None else used
            waiting = len(kept) - len(used)
            values, sizes = _class_prototypes(used, task, label, local=local, cache=cache, secret=secret)
            behind[name] = keys_of(used)
        prototypes.append(values)
        labels.append(np.full(len(sizes), label, dtype=np.uint32))
        counts.append(sizes)
        report = ClassReport(name, len(members), len(members) - len(kept), tuple(map(int, sizes)), waiting)
        reports.append(report)
    if not any(len(part) for part in prototypes):
        raise ProtofleetError(_nothing_to_send(task, reports, found))
    return PreparedSubmission(
        prototypes=np.concatenate([part for part in prototypes if len(part)]),
        labels=np.concatenate(labels),
        counts=np.concatenate(counts),
        classes=tuple(reports),
        refused=found.refused,
        images=behind,
    )


def prepare_round(
    *,
    task: TaskManifest,
    local: LocalSettings,
    found: FoundImages,
    take_part: Callable[[Sequence[LabeledImage]], RoundResult],
    secret: bytes = b"",
) -> tuple[PreparedSubmission, RoundResult]:
    """Take part in a round with all of a device's images but those held out.

    Args:
        task: the task.
        local: the device's own.
        found: its images.
        take_part: makes a contribution of the images to learn from.
        secret: the device's, where prototypes are to be perturbed.

    Raises:
        ProtofleetError: no class has enough images, or taking part fails.
    """
    kept = [image for image in found.usable if not held_out(image, local.holdout)]
    reports = []
    for label, name in enumerate(task.classes):
        images = len(found.of_class(label))
        size = sum(image.label == label for image in kept)
        if images:
            counts = (size,) if size >= task.min_images else ()
            reports.append(ClassReport(name, images, images - size, counts))
    if not any(report.counts for report in reports):
        raise ProtofleetError(_nothing_to_send(task, reports, found))
    made = take_part(kept)
    return (
        PreparedSubmission(
            prototypes=_leaving(made.prototypes.astype(np.float32), made.labels, task=task, secret=secret),
            labels=made.labels,
            counts=made.counts,
            classes=tuple(reports),
            refused=found.refused,
            changes=made.changes,
            loss=made.loss,
        ),
        made,
    )


def find(
    *,
    task: TaskManifest,
    local: LocalSettings,
    cache: FeatureCache,
    open_backbone: Callable[[str], Backbone],
    on_progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
    secret: bytes = b"",
) -> FoundImages:
    """Find a device's images, and have the features of all of them in the cache.

    Where the task wants images perturbed, those to learn from are, and those held out are not.

    Raises:
        ConfigError: there are no images, or folders that are no classes of the task.
        Interrupted: `should_stop` said so.
        PrivacyRefused: the task wants images perturbed, and `secret` has not 32 bytes.
    """
    images = find_images(local.data, task.classes, may_be_none=is_private(task))
    cache.prune((image.identity for image in images), *{*digests(task), *learning_keys(task)})

    def extraction_of(part: Sequence[LabeledImage], done: int, alter: tuple[str, Alter] | None) -> Extraction:
        return extract(
            part,
            digests(task),
            cache,
            open_backbone=open_backbone,
            batch_size=local.batch_size,
            workers=local.workers,
            on_progress=lambda now, _: on_progress(done + now, len(images) * len(task.backbones)),
            should_stop=should_stop,
            alter=alter,
        )

    if (alter := _alteration(task, secret)) is None:
        refused = extraction_of(images, 0, None).refused
    else:
        kept_out = [image for image in images if held_out(image, local.holdout)]
        learned_from = [image for image in images if not held_out(image, local.holdout)]
        parts = (
            extraction_of(kept_out, 0, None),
            extraction_of(learned_from, len(kept_out) * len(task.backbones), alter),
        )
        refused = tuple(sorted(entry for part in parts for entry in part.refused))
    useless = {path for path, _ in refused}
    return FoundImages(tuple(image for image in images if image.path not in useless), refused)


def digests(task: TaskManifest) -> list[str]:
    """Hex digests of a task's backbones, under which the cache has the features of images as they are."""
    return [blob.digest.hex() for blob in task.backbones]


def learning_keys(task: TaskManifest) -> list[str]:
    """Under what the cache has the features of the images to learn from, which may be perturbed."""
    how = task.perturbation
    return [digest + (cache_tag(how) if how and how.on == "images" else "") for digest in digests(task)]


def _alteration(task: TaskManifest, secret: bytes) -> tuple[str, Alter] | None:
    """What happens to the images to learn from, and the tag of their features; None if nothing does."""
    how = task.perturbation
    if how is None or how.on != "images":
        return None

    def alter(image: LabeledImage, wanted: Preprocessing, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return perturb_image(pixels, how, identity=image.identity, wanted=wanted, secret=secret)

    return cache_tag(how), alter


def _leaving(
    values: NDArray[np.float32], labels: NDArray[np.uint32], *, task: TaskManifest, secret: bytes
) -> NDArray[np.float16]:
    """Prototypes as they leave the device."""
    how = task.perturbation
    if how is not None and how.on == "prototypes":
        return perturb_prototypes(values, labels, how, secret=secret)
    return values.astype(np.float16)


def submission_of(
    prepared: PreparedSubmission, *, task: bytes, manifest: TaskManifest, sequence: int, number: int = 0
) -> bytes:
    """The bytes of a submission, for the round of that number where there are rounds.

    Raises:
        PrivacyRefused: the task asks for differential privacy, and this is not what came of it.
    """
    private = is_private(manifest)
    if private != (prepared.privacy is not None) or (
        private and (prepared.changes or prepared.loss is not None)
    ):
        raise PrivacyRefused(FAILED)
    exact = sum(report.images for report in prepared.classes)
    left_out = tuple(manifest.classes.index(report.name) for report in prepared.classes if report.left_out)
    return encode(
        Submission(
            task=task,
            sequence=sequence,
            prototypes=to_tensor(prepared.prototypes),
            labels=to_unsigned(prepared.labels),
            counts=to_unsigned(prepared.counts),
            images=int(prepared.counts.sum()) if private else exact,
            omitted_classes=() if private else left_out,
            round=number,
            tensors=dict(prepared.changes),
            loss=prepared.loss,
            privacy=prepared.privacy,
        )
    )


def evaluate_head(
    head: Head,
    *,
    task: bytes,
    manifest: TaskManifest,
    version: int,
    local: LocalSettings,
    cache: FeatureCache,
    before: Head | None = None,
) -> Evaluation:
    """Count what a head gets right and wrong of each class among the images that were kept out.

    Only images whose features are known count: those that could not be read are in neither number. Where
    the images cannot be found, none counts: what is wrong with them is not wrong with the head. `before` is
    the head that was in use, and counted on the same images. With differential privacy there are no images to
    evaluate on: whether a head fails on one of them is not for the aggregator to know either.

    Raises:
        GraphRefused: the head fails on them.
    """
    images = [] if is_private(manifest) else known_images(manifest, local, cache)
    members = [
        [image.identity for image in images if image.label == label and held_out(image, local.holdout)]
        for label in range(len(manifest.classes))
    ]

    def right(head: Head) -> tuple[int, ...]:
        chunks = [cache.chunks(of_class, *digests(manifest)) for of_class in members]
        return tuple(evaluate(head, of_class, label=label) for label, of_class in enumerate(chunks))

    correct = right(head)
    earlier: tuple[int, ...] = ()
    if before is not None:
        with contextlib.suppress(GraphRefused):
            earlier = right(before)
    return Evaluation(
        task=task,
        head_version=version,
        correct=correct,
        incorrect=tuple(len(of_class) - count for of_class, count in zip(members, correct, strict=True)),
        previous_correct=earlier,
    )


def known_images(manifest: TaskManifest, local: LocalSettings, cache: FeatureCache) -> list[LabeledImage]:
    """The device's images whose features are there; none where the images cannot be found."""
    try:
        images = find_images(local.data, manifest.classes)
    except ConfigError as error:
        log.warning("no image to evaluate the head on: %s", error)
        return []
    known = set.intersection(*(cache.known(backbone) for backbone in digests(manifest)))
    return [image for image in images if image.identity in known]


def _class_prototypes(
    kept: Sequence[LabeledImage],
    task: TaskManifest,
    label: int,
    *,
    local: LocalSettings,
    cache: FeatureCache,
    secret: bytes,
) -> tuple[NDArray[np.float16], NDArray[np.uint32]]:
    identities = [image.identity for image in kept]
    # The shuffle is the same at every start, so that the same images make the same submission. Nobody else can
    # tell it: who knew which images are in which prototype could solve several submissions for the features.
    about = f"{task.seed}/{local.device_id}/{label}".encode()
    key = hmac.digest(secret, about, "sha256")
    values, counts = batch_prototypes(
        lambda: cache.chunks(identities, *learning_keys(task)),
        alpha=task.alpha,
        batch_size=task.batch_size,
        min_images=task.min_images,
        rng=np.random.default_rng(list(key)),
    )
    if values.size and not np.abs(values).max() <= MAX_FLOAT16:
        name = task.classes[label]
        raise ProtofleetError(f"features of class {name!r} do not fit float16: the backbone cannot be used")
    return _leaving(values, np.full(len(counts), label, np.uint32), task=task, secret=secret), counts


def _nothing_to_send(task: TaskManifest, reports: Sequence[ClassReport], found: FoundImages) -> str:
    if not reports:
        path, reason = found.refused[0]
        return f"none of the {len(found.refused)} images can be used; the first is {path}: {reason}"
    most = max(reports, key=lambda report: report.images)
    # The fewest of which the share `alpha`, rounded up, is `min_images`.
    alpha = Fraction(1) if task.program else Fraction(str(task.alpha))
    needed = math.floor((task.min_images - 1) / alpha) + 1
    return (
        f"no class has enough images to send a prototype: {most.name!r} has {most.images}, of which "
        f"{most.held_out} are held out, and {needed} of the rest are needed; add images"
        + (" or lower --holdout" if most.held_out else "")
    )


def check_data(data: Path) -> None:
    """Look at the data folder before anything else is done.

    Raises:
        ConfigError: it is not there.
    """
    if not data.exists():
        raise ConfigError(
            f"no images at {data}: expected a folder with one sub-folder per class, or a CSV file of path,label; "
            "give it with --data"
        )
