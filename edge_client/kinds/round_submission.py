"""The device's part in rounds: training with checkpoints, and the local model that stays on the device."""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from edge_client.core.events import BuildSubmission
from edge_client.core.state import UploadItem
from edge_client.images.images import LabeledImage
from edge_client.kinds.image_features import FoundImages, Workspace, training_feature_keys
from edge_client.kinds.image_grouping import Grouping
from edge_client.kinds.prepared_submission import PreparedSubmission, class_reports, outgoing_prototypes
from edge_client.store.disk_space import require_space
from edge_client.store.job_folder import CHECKPOINTS
from edge_client.store.job_state import JobState
from edge_client.store.stored_values import (
    StoredInitialModel,
    StoredLocalModel,
    SubmissionSequence,
)
from edge_client.training import local_round
from edge_client.training.local_round import LocalModel
from edge_client.training.trainer import Checkpoint, TrainingHooks, TrainingSet
from protocol.errors import GraphRefused, StateError
from protocol.log import event
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import BlobRef, Submission, TaskManifest

log = logging.getLogger(__name__)


def existing_submission(workspace: Workspace, build: BuildSubmission) -> UploadItem | None:
    """Return the round's submission if it was built before, renumbered if its sequence must exceed `above`."""
    store, opened = workspace.store, build.round
    last = store.last
    if opened is None or workspace.dry_run or last is None:
        return None
    if (last.task, last.about) != (build.task, str(opened.number)):
        return None
    if not build.above:
        return last
    if (payload := store.last_submission()) is None:
        return None  # damaged on disk
    message = decode(payload, Submission, max_bytes=len(payload))
    store.set(SubmissionSequence(store.number))
    renumbered = encode(msgspec.structs.replace(message, sequence=store.number))
    return store.leave("submission", renumbered, task=build.task, about=last.about)


def make_round(
    workspace: Workspace, build: BuildSubmission, found: FoundImages, grouping: Grouping
) -> PreparedSubmission:
    """Train on the images of whole groups; an interrupted training continues at its checkpoint.

    Raises:
        GraphRefused: a graph or the round's tensors cannot be used.
        Diverged: the training reached NaN or infinity; the local model is unchanged.
        NoPrototype: no class has enough images.
    """
    task, manifest, opened, released = build.task, build.manifest, build.round, grouping.classes
    store = workspace.store
    if opened is None:
        raise GraphRefused("the task has rounds, and none is open")
    images = sorted(
        (image for of_class in released for image in of_class.images), key=lambda image: image.relative
    )
    reports = class_reports(manifest, found, released)
    names = "\0".join(f"{image.label} {image.identity}" for image in images)
    images_digest = digest_of(names.encode(errors="surrogateescape")).hex()
    about = (task.hex(), opened.number, opened.tensors.digest.hex(), images_digest)

    file = store.folder / CHECKPOINTS / digest_of(msgspec.json.encode(about)).hex()

    def on_checkpoint(checkpoint: Checkpoint) -> None:
        if not workspace.dry_run:
            packed = local_round.pack_checkpoint(checkpoint, about)
            require_space(store.folder, len(packed), what="a checkpoint of the training")
            _replace_others(file, packed)
            workspace.culprits.stored()

    progress = workspace.progress(f"training, round {opened.number}")
    with contextlib.closing(progress):
        result = local_round.train_round(
            manifest,
            opened,
            data=_training_set(workspace, manifest, images),
            last=_local_model(store, task),
            resumed=_checkpoint(file, about),
            blobs=store.blobs,
            device_id=workspace.settings.device_id,
            hooks=TrainingHooks(on_checkpoint=on_checkpoint, on_progress=progress.update),
        )
    values = result.prototypes.astype(np.float32)
    return PreparedSubmission(
        prototypes=outgoing_prototypes(values, result.labels, task=manifest, secret=store.secret),
        labels=result.labels,
        counts=result.counts,
        classes=reports,
        unusable=found.unusable,
        tensors=result.changes,
        loss=result.loss,
        local_model=result.local_model,
    )


def put_model(store: JobState, task: bytes, model: LocalModel | None) -> StoredLocalModel:
    """Put a round's local model on disk, and return the fact to store with the round's submission.

    Raises:
        StateError: the disk fails, or has too little space.
    """
    return StoredLocalModel(task, _put_model(store, model) if model else b"")


def local_model_digest(store: JobState, task: bytes) -> bytes:
    """Return the digest of the task's local model; empty if there is none or it is lost."""
    return store.get(StoredLocalModel).digest if _local_model(store, task) else b""


def store_initial_model(
    workspace: Workspace, manifest: TaskManifest, tensors: BlobRef, found: FoundImages
) -> bytes:
    """Store the model to which a device that trained in no round binds a head; returns its digest."""
    images, store = found.for_training(), workspace.store
    data = _training_set(workspace, manifest, images) if images else None
    model = local_round.initial_model(manifest, tensors, data=data, blobs=store.blobs)
    digest = _put_model(store, model)
    store.set(StoredInitialModel(digest))
    return digest


def _put_model(store: JobState, model: LocalModel) -> bytes:
    packed = local_round.pack(model)
    require_space(store.blobs.folder, len(packed), what="the local model")
    return store.blobs.put(packed)


def _local_model(store: JobState, task: bytes) -> LocalModel | None:
    stored = store.get(StoredLocalModel)
    if not stored.digest or stored.task != task:
        return None
    try:
        return local_round.unpack(store.blobs.read(stored.digest))
    except StateError as error:
        text = "local model lost, training starts from the initial model"
        event(log, logging.WARNING, text, error=error)
        store.set(StoredLocalModel())
        return None


def _training_set(
    workspace: Workspace, manifest: TaskManifest, images: Sequence[LabeledImage]
) -> TrainingSet:
    size = local_round.feature_size(manifest, workspace.store.blobs)
    features = workspace.features(images, training_feature_keys(manifest), size)
    return TrainingSet(features, np.array([image.label for image in images], np.int64))


def _replace_others(file: Path, packed: bytes) -> None:
    """Write a checkpoint in place of all other ones."""
    with state_errors(file.parent):
        file.parent.mkdir(exist_ok=True)
        others = [each for each in file.parent.iterdir() if each != file]
    write_atomically(file, packed)
    for each in others:
        each.unlink(missing_ok=True)


def _checkpoint(file: Path, about: Sequence[str | int]) -> Checkpoint | None:
    if not file.exists():
        return None
    with state_errors(file):
        data = file.read_bytes()
    try:
        checkpoint = local_round.unpack_checkpoint(data, about)
    except StateError as error:
        event(log, logging.WARNING, "checkpoint lost, training restarts", file=file, error=error)
        return None
    if checkpoint is not None:
        event(log, logging.INFO, "training resumed", step=checkpoint.steps)
    return checkpoint
