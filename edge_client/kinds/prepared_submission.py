"""A submission before it has a sequence number: its prototypes (FedTC eq. 1-4), and its encoding."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from edge_client.core.events import BuildSubmission
from edge_client.core.submission_kinds import kind_of
from edge_client.kinds.image_features import (
    FoundImages,
    Workspace,
    prototype_columns,
    training_feature_keys,
)
from edge_client.kinds.image_grouping import Grouping, ReleasedBlock, ReleasedImages
from edge_client.privacy.noise_key import subkey
from edge_client.privacy.perturbation import MAX_FLOAT16, perturb_prototypes
from edge_client.privacy.policy import FAILED
from edge_client.prototypes.principal_prototypes import principal_prototypes
from edge_client.prototypes.prototype_averaging import average
from edge_client.store.job_folder import Shown
from edge_client.store.stored_values import ClassReport, SubmissionForm, SubmissionReport
from edge_client.training.local_round import LocalModel
from protocol.cli import counted, plain
from protocol.errors import PrivacyRefused, ProtofleetError
from protocol.statistics.secure_sums import sealed_mask, sealed_values, submission_context
from protocol.wire.arrays import to_array, to_tensor, to_unsigned
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import (
    MAX_IMAGES,
    Privacy,
    SecondOperator,
    Submission,
    TaskManifest,
    Tensor,
)
from protocol.wire.principal_prototypes import PrincipalPrototypes, joined
from protocol.wire.quantization import submission_fields


@dataclass(frozen=True)
class Mask:
    """The mask of a release: a key of its own, and the device that seals it.

    `signing_key` is the device's private key, and `min_devices` the submissions that it wants in a sum.
    """

    key: bytes = field(repr=False)
    device: str
    signing_key: bytes = field(repr=False)
    min_devices: int = 2


class NoPrototype(ProtofleetError):
    """No class has enough usable images for a prototype."""


@dataclass(frozen=True)
class PreparedSubmission:
    """A device's contribution: m prototypes float16 (m, L), their class indices (m,), and the images in each (m,).

    Without rounds, prototypes are uploaded in one byte a value (`protocol.wire.quantization`). `block` has principal
    prototypes of other images; then m may be 0. Of these, `moved` lie in other classes than they are counted in.
    `dissolved` images are in groups of blocks that were dissolved.

    Of a task with statistics they are class sums int32 (p, D) or groups of images int8 (m, D). `tensors` are uploaded
    beside them: in rounds the changes, with class sums the second moment, and with noise also noisy counts. In rounds
    `loss` is the mean over the last epoch of training, if there was one, and `local_model` stays on the device. Under
    differential privacy `privacy` is the cost.
    """

    prototypes: NDArray[np.float16] | NDArray[np.int32] | NDArray[np.int8]
    labels: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    classes: tuple[ClassReport, ...]
    unusable: tuple[tuple[Path, str], ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    loss: float | None = None
    privacy: Privacy | None = None
    local_model: LocalModel | None = None
    form: SubmissionForm = "prototype"
    warning: str = ""
    """A warning about the upload, for the device's owner; empty if there is none."""
    block: PrincipalPrototypes | None = None
    moved: int = 0
    dissolved: int = 0
    mask: "Mask | None" = None
    """The mask of the values, if the task has a second operator."""

    @property
    def fingerprint(self) -> str:
        """Return a digest that is equal for equal prototypes, labels, counts, tensors and blocks."""
        parts = [self.prototypes.tobytes(), self.labels.tobytes(), self.counts.tobytes()]
        parts += [self.tensors[name].data for name in sorted(self.tensors)]
        if (block := self.block) is not None:
            arrays = (block.means, block.labels, block.counts, block.rows, block.diagonal)
            parts += [array.tobytes() for array in arrays]
        return digest_of(b"".join(map(digest_of, parts))).hex()

    def report(self, size_bytes: int) -> SubmissionReport:
        """Return the report that `edge-client status` shows."""
        unusable = tuple((plain(str(path)), plain(reason)) for path, reason in self.unusable)
        return SubmissionReport(
            *(self.classes, unusable, size_bytes, self.form, self.warning, "", self.privacy is not None),
            directions=0 if self.block is None else len(self.block.rows),
            moved=self.moved,
            dissolved=self.dissolved,
        )

    def shown(self, size_bytes: int) -> Shown:
        """Return what a dry run shows."""
        rows, size = self.prototypes.shape
        tensors = {
            name: (tuple(map(int, tensor.shape)), len(tensor.data)) for name, tensor in self.tensors.items()
        }
        shown = Shown(
            report=self.report(size_bytes),
            rows=rows,
            size=size,
            tensors=tensors,
            size_bytes=size_bytes,
            privacy=self.privacy,
        )
        if (block := self.block) is None:
            return shown
        return replace(shown, block_images=block.images, means=len(block.means), directions=len(block.rows))


def make_prototypes(
    workspace: Workspace, build: BuildSubmission, found: FoundImages, grouping: Grouping
) -> PreparedSubmission:
    """Sum up the groups and blocks of training images, and perturb the prototypes if the task asks for it.

    Raises:
        NoPrototype: no class has enough images.
        ProtofleetError: the features exceed float16.
        PrivacyRefused: the task perturbs prototypes, and there is no secret.
    """
    task, secret = build.manifest, workspace.store.secret
    made = [
        _class_prototypes(workspace, task, label, each, secret) for label, each in enumerate(grouping.classes)
    ]
    sizes = [counts for _, counts in made]
    reports = class_reports(task, found, grouping.classes, sizes)
    block = (
        joined([_summed_up(workspace, task, each) for each in grouping.blocks]) if grouping.blocks else None
    )
    values = [each for each, _ in made if len(each)]
    if block is not None:
        values.append(np.empty((0, block.means.shape[1]), np.float16))
    return PreparedSubmission(
        prototypes=np.concatenate(values),
        labels=np.repeat(np.arange(len(sizes), dtype=np.uint32), list(map(len, sizes))),
        counts=np.concatenate(sizes),
        classes=reports,
        unusable=found.unusable,
        block=block,
        moved=sum(each.moved for each in grouping.blocks),
        dissolved=grouping.dissolved,
    )


def outgoing_prototypes(
    values: NDArray[np.float32], labels: NDArray[np.uint32], *, task: TaskManifest, secret: bytes
) -> NDArray[np.float16]:
    """Return prototypes as they leave the device: float16, perturbed if the task asks for it."""
    how = task.perturbation
    if how is not None and how.on == "prototypes":
        return perturb_prototypes(values, labels, how, secret=secret)
    return values.astype(np.float16)


def class_reports(
    task: TaskManifest,
    found: FoundImages,
    released: Sequence[ReleasedImages],
    counts: Iterable[Iterable[int]] | None = None,
) -> tuple[ClassReport, ...]:
    """Return the report of each class with images.

    `counts` are the images in each row of each class; by default a class has one row of all its released images.

    Raises:
        NoPrototype: no class has a row; the message says how many images are needed.
    """
    if counts is None:
        counts = [[len(each.images)] if each.images else [] for each in released]
    reports = tuple(
        ClassReport(
            name,
            len(members),
            len(members) - len(found.for_training(label)),
            tuple(map(int, sizes)),
            each.waiting,
            each.more_needed,
            each.missing,
            each.in_blocks,
            each.unused,
        )
        for label, (name, each, sizes) in enumerate(zip(task.classes, released, counts, strict=True))
        if (members := found.of_class(label))
    )
    _require_prototype(task, reports, found)
    return reports


def _require_prototype(task: TaskManifest, reports: Sequence[ClassReport], found: FoundImages) -> None:
    if any(report.counts or report.in_blocks for report in reports):
        return
    if not reports:
        path, reason = found.unusable[0]
        raise NoPrototype(f"none of the {len(found.unusable)} images can be used; first: {path}: {reason}")
    missing = sum(report.missing for report in reports)
    if in_blocks := sum(report.unused for report in reports):
        raise NoPrototype(
            f"{counted(in_blocks, 'image')} in blocks that were left out: "
            + (
                f"{counted(missing, 'image')} missing: restore these, or wait a day"
                if missing
                else "the task lacks a class that they were uploaded with, or asks for more images of each: add the "
                "class to the task file, or delete its images here and wait a day, or add new images"
            )
        )
    if missing:
        raise NoPrototype(
            f"every prototype has lost images: {counted(missing, 'image')} missing: restore these, or wait a day and "
            "add new ones"
        )
    most = max(reports, key=lambda report: report.images)
    # The smallest number of images of which the fraction `alpha`, rounded up, is the number after it.
    alpha = Fraction(str(task.alpha)) if kind_of(task).filters_outliers else Fraction(1)
    needed, more = (math.floor((kept - 1) / alpha) + 1 for kept in (task.min_images, most.more_needed))
    if most.images - most.held_out >= needed:
        raise NoPrototype(
            f"no class has enough images for a prototype: those of {most.name!r} are in prototypes that have lost "
            f"images or are too small for this task: add {counted(more, 'image')} to use them again"
        )
    raise NoPrototype(
        f"no class has enough images for a prototype: {most.name!r} has {most.images}, of which "
        f"{most.held_out} are held out, and {needed} training images are needed: add images"
        + (" or lower --holdout" if most.held_out else "")
    )


def encode_submission(
    prepared: PreparedSubmission,
    *,
    task: bytes,
    manifest: TaskManifest,
    sequence: int,
    round_number: int = 0,
) -> bytes:
    """Return the encoded submission, for the round of that number if the task has rounds.

    Raises:
        PrivacyRefused: exactly one of the task and the submission has differential privacy, or the task has a second
            operator, and there is nothing to mask with.
    """
    kind = kind_of(manifest)
    is_private = kind.is_private
    if is_private != (prepared.privacy is not None) or (is_private and prepared.loss is not None):
        raise PrivacyRefused(FAILED)
    if kind.is_quantized:
        fields = submission_fields(manifest, prepared.prototypes, prepared.block)
    else:
        fields = {"prototypes": to_tensor(prepared.prototypes), "tensors": dict(prepared.tensors)}
    operator, labels, counts = manifest.second_operator, prepared.labels, prepared.counts
    if operator is not None:
        fields = _masked(prepared, operator, task=task, manifest=manifest, sequence=sequence)
        labels, counts = labels[:0], counts[:0]
    images = sum(each.images for each in prepared.classes)
    omitted = tuple(manifest.classes.index(report.name) for report in prepared.classes if report.left_out)
    return encode(
        Submission(
            task=task,
            sequence=sequence,
            labels=to_unsigned(labels),
            counts=to_unsigned(counts),
            images=min(int(counts.sum()) if is_private else images, MAX_IMAGES),
            omitted_classes=() if is_private else omitted,
            round=round_number,
            loss=prepared.loss,
            privacy=prepared.privacy,
            **fields,
        )
    )


def _masked(
    prepared: PreparedSubmission,
    operator: SecondOperator,
    *,
    task: bytes,
    manifest: TaskManifest,
    sequence: int,
) -> dict[str, Any]:
    """Return the sealed values of a submission and its mask; the same number of one release has the same mask."""
    if (mask := prepared.mask) is None:
        raise PrivacyRefused(FAILED)
    names = ("counts", "prototypes", "second_moment")
    arrays = {"prototypes": prepared.prototypes} | {
        name: to_array(each) for name, each in prepared.tensors.items()
    }
    parts = [arrays[name] for name in names]
    context = submission_context(
        fleet=manifest.fleet,
        task=task,
        device=mask.device,
        sequence=sequence,
        values=sum(part.size for part in parts),
    )
    seed = subkey(mask.key, context)
    sealed = sealed_mask(
        seed,
        seal_key=operator.seal_key,
        min_devices=max(operator.min_devices, mask.min_devices),
        signing_key=mask.signing_key,
        context=context,
    )
    values = sealed_values(parts, seed, key=operator.aggregator_key, context=context)
    return {
        "prototypes": to_tensor(prepared.prototypes[:0]),
        "mask": sealed,
        "tensors": {"sealed": to_tensor(np.frombuffer(values, np.uint8))},
    }


def _class_prototypes(
    workspace: Workspace, task: TaskManifest, label: int, released: ReleasedImages, secret: bytes
) -> tuple[NDArray[np.float16], NDArray[np.uint32]]:
    values, counts = average(
        lambda: workspace.training_features(task, released.images), np.array(released.prototypes, np.intp)
    )
    _require_float16(task, values, np.full(len(values), label))
    labels = np.full(len(counts), label, np.uint32)
    return outgoing_prototypes(values, labels, task=task, secret=secret), counts


def _summed_up(workspace: Workspace, task: TaskManifest, block: ReleasedBlock) -> PrincipalPrototypes:
    """Return the principal prototypes of a block in the task's layers."""
    size = sum(backbone.metadata.feature_size for backbone in workspace.backbones(task))
    features = workspace.features(block.images, training_feature_keys(task), size)
    features = features[:, prototype_columns(task, size)]
    summed_up = principal_prototypes(features, block.labels, block.coefficients)
    _require_float16(task, summed_up.means, summed_up.labels)
    return summed_up


def _require_float16(task: TaskManifest, values: NDArray[np.float32], labels: NDArray[np.integer]) -> None:
    """Raise ProtofleetError if values (n, L) exceed float16; the error names the class of the first such row."""
    for row in np.flatnonzero(~(np.abs(values).max(axis=1, initial=0) <= MAX_FLOAT16))[:1]:
        name = task.classes[labels[row]]
        raise ProtofleetError(f"features of class {name!r} exceed float16: the backbone cannot be used")
