"""The device's two pieces of work: a submission out of pictures, and a head taken into use and evaluated."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.backbone import Backbone
from edge_client.feature_cache import FeatureCache
from edge_client.features import Extraction, extract
from edge_client.images import Picture, find_pictures, held_out
from edge_client.predictor import Head, evaluate
from edge_client.prototypes import batch_prototypes
from protocol.codec import digest_of, encode, to_tensor, to_unsigned
from protocol.errors import ConfigError, ProtofleetError
from protocol.messages import Evaluation, Submission, TaskManifest

log = logging.getLogger(__name__)

MAX_FLOAT16 = 65504.0


@dataclass(frozen=True)
class Local:
    """What of the device's own a piece of work runs on.

    Args:
        data: folder of pictures, or a CSV file.
        holdout: share of the pictures that is kept out of the prototypes.
        batch_size: pictures in one run of the backbone.
        workers: threads that decode.
    """

    device_id: str
    data: Path
    holdout: float
    batch_size: int
    workers: int


@dataclass(frozen=True)
class ClassReport:
    """What would leave the device of one class: prototypes, and the pictures behind each."""

    name: str
    pictures: int
    held_out: int
    counts: tuple[int, ...]

    @property
    def left_out(self) -> bool:
        """Whether there are pictures to learn from, but too few to send any prototype."""
        return self.pictures > self.held_out and not self.counts


@dataclass(frozen=True)
class Prepared:
    """A device's contribution before it has a number.

    Args:
        prototypes: float16 (m, L).
        labels: (m,) class indices.
        counts: (m,) pictures in each prototype.
        classes: a report per class that has pictures.
        refused: what could not be used, and why.
    """

    prototypes: NDArray[np.float16]
    labels: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    classes: tuple[ClassReport, ...]
    refused: tuple[tuple[Path, str], ...]

    @property
    def fingerprint(self) -> str:
        """The same for the same prototypes, so that nothing is sent twice."""
        parts = (self.prototypes.tobytes(), self.labels.tobytes(), self.counts.tobytes())
        return digest_of(b"".join(map(digest_of, parts))).hex()


def prepare(
    *,
    task: TaskManifest,
    local: Local,
    backbone: Backbone,
    cache: FeatureCache,
    on_progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> Prepared:
    """Extract, filter and average all of a device's pictures (FedTC eq. 1-4).

    Raises:
        ConfigError: there are no pictures, or folders that are no classes of the task.
        ProtofleetError: no class has enough pictures, or the features do not fit float16.
    """
    pictures = find_pictures(local.data, task.classes)
    extraction = extract(
        pictures,
        backbone,
        cache,
        batch_size=local.batch_size,
        workers=local.workers,
        on_progress=on_progress,
        should_stop=should_stop,
    )
    usable = _usable(pictures, extraction)
    prototypes, labels, counts, reports = [], [], [], []
    for label, name in enumerate(task.classes):
        members = [picture for picture in usable if picture.label == label]
        if not members:
            continue
        kept = [picture for picture in members if not held_out(picture, local.holdout)]
        values, sizes = _class_prototypes(
            kept, task=task, label=label, local=local, backbone=backbone, cache=cache
        )
        if values.size and not np.abs(values).max() <= MAX_FLOAT16:
            raise ProtofleetError(
                f"features of class {name!r} do not fit float16: the backbone cannot be used"
            )
        prototypes.append(values.astype(np.float16))
        labels.append(np.full(len(sizes), label, dtype=np.uint32))
        counts.append(sizes)
        reports.append(ClassReport(name, len(members), len(members) - len(kept), tuple(map(int, sizes))))
    if not any(len(part) for part in prototypes):
        raise ProtofleetError(_nothing_to_send(task, reports, extraction))
    return Prepared(
        prototypes=np.concatenate([part for part in prototypes if len(part)]),
        labels=np.concatenate(labels),
        counts=np.concatenate(counts),
        classes=tuple(reports),
        refused=extraction.refused,
    )


def submission_of(prepared: Prepared, *, task: bytes, manifest: TaskManifest, sequence: int) -> bytes:
    """The bytes of a submission."""
    return encode(
        Submission(
            task=task,
            sequence=sequence,
            prototypes=to_tensor(prepared.prototypes),
            labels=to_unsigned(prepared.labels),
            counts=to_unsigned(prepared.counts),
            pictures=sum(report.pictures for report in prepared.classes),
            left_out=tuple(
                manifest.classes.index(report.name) for report in prepared.classes if report.left_out
            ),
        )
    )


def evaluate_head(
    head: Head,
    *,
    task: bytes,
    manifest: TaskManifest,
    version: int,
    local: Local,
    backbone: Backbone,
    cache: FeatureCache,
) -> Evaluation:
    """Count what a head gets right and wrong of each class among the pictures that were kept out.

    Only pictures whose features are known count: those that could not be read are in neither number. Where
    the pictures cannot be found, none counts: what is wrong with them is not wrong with the head.
    """
    right, wrong = [], []
    pictures = _found(local.data, manifest)
    known = cache.known(backbone.sha256)
    for label in range(len(manifest.classes)):
        members = [
            picture.identity
            for picture in pictures
            if picture.label == label and picture.identity in known and held_out(picture, local.holdout)
        ]
        correct = evaluate(head, cache.chunks(members, backbone.sha256), label=label)
        right.append(correct)
        wrong.append(len(members) - correct)
    return Evaluation(task=task, head_version=version, right=tuple(right), wrong=tuple(wrong))


def _found(data: Path, manifest: TaskManifest) -> Sequence[Picture]:
    try:
        return find_pictures(data, manifest.classes)
    except ConfigError as error:
        log.warning("no picture to evaluate the head on: %s", error)
        return ()


def _usable(pictures: Sequence[Picture], extraction: Extraction) -> list[Picture]:
    refused = {path for path, _ in extraction.refused}
    return [picture for picture in pictures if picture.path not in refused]


def _class_prototypes(
    kept: Sequence[Picture],
    *,
    task: TaskManifest,
    label: int,
    local: Local,
    backbone: Backbone,
    cache: FeatureCache,
) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    identities = [picture.identity for picture in kept]
    # The shuffle is the same at every start, so that the same pictures make the same submission.
    key = f"{task.seed}/{local.device_id}/{label}".encode()
    values, counts = batch_prototypes(
        lambda: cache.chunks(identities, backbone.sha256),
        alpha=task.alpha,
        batch_size=task.batch_size,
        min_images=task.min_images,
        rng=np.random.default_rng(list(digest_of(key))),
    )
    return values.reshape(len(counts), backbone.metadata.feature_size), counts


def _nothing_to_send(task: TaskManifest, reports: Sequence[ClassReport], extraction: Extraction) -> str:
    if not reports:
        path, reason = extraction.refused[0]
        return f"none of the {len(extraction.refused)} pictures can be used; the first is {path}: {reason}"
    most = max(reports, key=lambda report: report.pictures)
    # The fewest of which the share `alpha`, rounded up, is `min_images`.
    needed = math.floor((task.min_images - 1) / Fraction(str(task.alpha))) + 1
    return (
        f"no class has enough pictures to send a prototype: {most.name!r} has {most.pictures}, of which "
        f"{most.held_out} are held out, and {needed} of the rest are needed; add pictures"
        + (" or lower --holdout" if most.held_out else "")
    )


def check_data(data: Path) -> None:
    """Look at the data folder before anything else is done.

    Raises:
        ConfigError: it is not there.
    """
    if not data.exists():
        raise ConfigError(
            f"no pictures at {data}: expected a folder with one sub-folder per class, or a CSV file of path,label; "
            "give it with --data"
        )
