"""The device's part in rounds: training with checkpoints, and the local model that stays on the device."""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from edge_client.agent.events import BuildSubmission
from edge_client.agent.state import UploadItem
from edge_client.data.images import LabeledImage
from edge_client.storage.disk_space import require_space
from edge_client.storage.job_folder import CHECKPOINTS
from edge_client.storage.stored_values import (
    StoredInitialModel,
    StoredLocalModel,
    SubmissionSequence,
)
from edge_client.submission.image_features import FoundImages, Workspace, training_feature_keys
from edge_client.submission.image_grouping import Grouping
from edge_client.submission.prepared_submission import PreparedSubmission, class_reports, outgoing_prototypes
from edge_client.training import local_round
from edge_client.training.local_round import LocalModel
from edge_client.training.trainer import Checkpoint, TrainingHooks, TrainingSet
from protocol.errors import GraphRefused, StateError
from protocol.log import event
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import BlobRef, RoundManifest, Submission, TaskManifest

log = logging.getLogger(__name__)


def make_round(
    workspace: Workspace, build: BuildSubmission, found: FoundImages, grouping: Grouping
) -> PreparedSubmission:
    """Train the round that is open; see `RoundTraining.train`."""
    return RoundTraining(workspace).train(build, found, grouping)


class RoundTraining:
    """Trains rounds on the device, each of them once across restarts."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._store = workspace.store

    def existing_submission(self, task: bytes, manifest: RoundManifest, *, above: int) -> UploadItem | None:
        """Return the round's submission if it was built before, renumbered if its sequence must exceed `above`."""
        outbox, last = self._store.outbox, self._store.outbox.newest_submission()
        if self._workspace.dry_run or last is None or (last.task, last.about) != (task, str(manifest.number)):
            return None
        if not above:
            return last
        if (payload := outbox.payload(last)) is None:
            return None  # damaged on disk
        message = decode(payload, Submission, max_bytes=len(payload))
        sequence = self._store.next_number(SubmissionSequence, above=above)
        renumbered = encode(msgspec.structs.replace(message, sequence=sequence))
        return outbox.keep("submission", renumbered, task=task, about=last.about)

    def train(self, build: BuildSubmission, found: FoundImages, grouping: Grouping) -> PreparedSubmission:
        """Train on the images of whole groups; an interrupted training continues at its checkpoint.

        Raises:
            GraphRefused: a graph or the round's tensors cannot be used.
            Diverged: the training reached NaN or infinity; the local model is unchanged.
            NoPrototype: no class has enough images.
        """
        task, manifest, opened, released = build.task, build.manifest, build.round, grouping.classes
        if opened is None:
            raise GraphRefused("the task has rounds, and none is open")
        images = sorted(
            (image for of_class in released for image in of_class.images), key=lambda image: image.relative
        )
        reports = class_reports(manifest, found, released)
        names = "\0".join(f"{image.label} {image.identity}" for image in images)
        images_digest = digest_of(names.encode(errors="surrogateescape")).hex()
        about = (task.hex(), opened.number, opened.tensors.digest.hex(), images_digest)

        file = self._store.folder / CHECKPOINTS / digest_of(msgspec.json.encode(about)).hex()

        def on_checkpoint(checkpoint: Checkpoint) -> None:
            if not self._workspace.dry_run:
                packed = local_round.pack_checkpoint(checkpoint, about)
                require_space(self._store.folder, len(packed), what="a checkpoint of the training")
                _replace_others(file, packed)
                self._workspace.culprits.stored()

        progress = self._workspace.progress(f"training, round {opened.number}")
        with contextlib.closing(progress):
            result = local_round.train_round(
                manifest,
                opened,
                data=self._training_set(manifest, images),
                last=self._local_model(task),
                resumed=_checkpoint(file, about),
                blobs=self._store.blobs,
                device_id=self._workspace.settings.device_id,
                hooks=TrainingHooks(on_checkpoint=on_checkpoint, on_progress=progress.update),
            )
        values = result.prototypes.astype(np.float32)
        secret = self._workspace.secret(manifest) if manifest.perturbation else b""
        return PreparedSubmission(
            prototypes=outgoing_prototypes(values, result.labels, task=manifest, secret=secret),
            labels=result.labels,
            counts=result.counts,
            classes=reports,
            unusable=found.unusable,
            tensors=result.changes,
            loss=result.loss,
            local_model=result.local_model,
        )

    def put_model(self, task: bytes, model: LocalModel | None) -> StoredLocalModel:
        """Put a round's local model on disk, and return the fact to store with the round's submission.

        Raises:
            StateError: the disk fails, or has too little space.
        """
        return StoredLocalModel(task, self._put_model(model) if model else b"")

    def local_model_digest(self, task: bytes) -> bytes:
        """Return the digest of the task's local model; empty if there is none or it is lost."""
        return self._store.get(StoredLocalModel).digest if self._local_model(task) else b""

    def store_initial_model(self, manifest: TaskManifest, tensors: BlobRef, found: FoundImages) -> bytes:
        """Store the model to which a device that trained in no round binds a head; returns its digest."""
        images = found.for_training()
        data = self._training_set(manifest, images) if images else None
        model = local_round.initial_model(manifest, tensors, data=data, blobs=self._store.blobs)
        digest = self._put_model(model)
        self._store.set(StoredInitialModel(digest))
        return digest

    def _put_model(self, model: LocalModel) -> bytes:
        packed = local_round.pack(model)
        require_space(self._store.blobs.folder, len(packed), what="the local model")
        return self._store.blobs.put(packed)

    def _local_model(self, task: bytes) -> LocalModel | None:
        stored = self._store.get(StoredLocalModel)
        if not stored.digest or stored.task != task:
            return None
        try:
            return local_round.unpack(self._store.blobs.read(stored.digest))
        except StateError as error:
            text = "local model lost, training starts from the initial model"
            event(log, logging.WARNING, text, error=error)
            self._store.set(StoredLocalModel())
            return None

    def _training_set(self, manifest: TaskManifest, images: Sequence[LabeledImage]) -> TrainingSet:
        size = local_round.feature_size(manifest, self._store.blobs)
        features = self._workspace.features(images, training_feature_keys(manifest), size)
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
