"""A device's rounds on its own disk: what was uploaded, what was learned, and trainings on their way."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edge_client.agent.upload_item import UploadItem
from edge_client.config import LocalSettings
from edge_client.data.images import LabeledImage, held_out
from edge_client.storage.device_state import DeviceState
from edge_client.storage.facts import (
    StoredInitialModel,
    StoredLocalModel,
    SubmissionReport,
    SubmissionSequence,
)
from edge_client.storage.feature_cache import FeatureCache
from edge_client.submission.builder import FoundImages, PreparedSubmission, learning_keys, prepare_round
from edge_client.training.local_round import (
    LocalModel,
    RoundResult,
    TrainingSet,
    feature_size,
    initial_model,
    pack,
    pack_checkpoint,
    train_round,
    unpack,
    unpack_checkpoint,
)
from edge_client.training.trainer import Checkpoint, TrainingHooks
from protocol.errors import StateError
from protocol.log import event
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import BlobRef, RoundManifest, Submission, TaskManifest

log = logging.getLogger(__name__)


class RoundWork:
    """Takes part in rounds, each of them once, whatever interrupts it.

    Args:
        local: the device's own.
        state: the device's state directory.
        cache: has the features of the images.
        dry: leave nothing on the disk.
    """

    def __init__(self, local: LocalSettings, state: DeviceState, cache: FeatureCache, *, dry: bool) -> None:
        self._local = local
        self._kept = state
        self._cache = cache
        self._dry = dry
        self._file = state.folder / "training.checkpoint"

    def uploaded(self, task: bytes, opened: RoundManifest, *, above: int) -> UploadItem | None:
        """The submission that was made for a round before, with a sequence above `above`; None if there is none."""
        outbox, standing = self._kept.outbox, self._kept.outbox.newest_submission()
        made_of = (task, str(opened.number))
        if self._dry or standing is None or (standing.task, standing.about) != made_of:
            return None
        if not above:
            return standing
        payload = outbox.payload(standing) or b""
        message = decode(payload, Submission, max_bytes=len(payload))
        sequence = self._kept.next_number(SubmissionSequence, above=above)
        renumbered = encode(msgspec.structs.replace(message, sequence=sequence))
        return outbox.keep("submission", renumbered, task=task, about=standing.about)

    def take_part(
        self,
        task: bytes,
        manifest: TaskManifest,
        opened: RoundManifest,
        *,
        found: FoundImages,
        on_progress: Callable[[int, int], None],
        should_stop: Callable[[], bool],
    ) -> tuple[PreparedSubmission, LocalModel]:
        """Train on the images that are not held out, from where an interruption left it.

        Raises:
            GraphRefused: a graph or the round's tensors cannot be used.
            Diverged: the training has led to NaN or infinity; what was learned before stands.
            Interrupted: `should_stop` said so.
            ProtofleetError: no class has enough images.
        """

        def contribution(images: Sequence[LabeledImage]) -> RoundResult:
            named = "\0".join(f"{image.label} {image.identity}" for image in images)
            trained_on = named.encode(errors="surrogateescape")
            tensors, of = opened.tensors.digest.hex(), digest_of(trained_on).hex()
            about = (task.hex(), opened.number, tensors, of)

            def on_checkpoint(checkpoint: Checkpoint) -> None:
                if not self._dry:
                    write_atomically(self._file, pack_checkpoint(checkpoint, about))

            return train_round(
                manifest,
                opened,
                data=self._data(manifest, images),
                last=self._local_model(task),
                resumed=_checkpoint(self._file, about),
                blobs=self._kept.blobs,
                device_id=self._local.device_id,
                hooks=TrainingHooks(
                    on_checkpoint=on_checkpoint, should_stop=should_stop, on_progress=on_progress
                ),
            )

        prepared, made = prepare_round(
            task=manifest,
            local=self._local,
            found=found,
            take_part=contribution,
            secret=self._kept.secret(keep=not self._dry) if manifest.perturbation else b"",
        )
        return prepared, made.local_model

    def keep(
        self,
        task: bytes,
        opened: RoundManifest,
        *,
        payload: bytes,
        local_model: LocalModel,
        report: SubmissionReport,
    ) -> UploadItem:
        """Put a round's submission and what it has taught on the disk, both or neither, with a report of it.

        Raises:
            ProtofleetError: the submission does not fit the outbox.
        """
        with self._kept.keeping:
            stored = StoredLocalModel(task, self._kept.blobs.put(pack(local_model)))
            item = self._kept.outbox.keep(
                "submission", payload, task=task, about=str(opened.number), facts=(stored, report)
            )
        self._file.unlink(missing_ok=True)
        return item

    def local_model_digest(self, task: bytes) -> bytes:
        """Return the digest of the local model of a task; empty if there is none, or it is lost."""
        return digest if (digest := self._kept_digest(task)) and self._local_model(task) else b""

    def _kept_digest(self, task: bytes) -> bytes:
        stored = self._kept.get(StoredLocalModel)
        return stored.digest if stored.task == task else b""

    def keep_initial_model(self, manifest: TaskManifest, tensors: BlobRef, found: FoundImages) -> bytes:
        """Store the initial model that a device without a local model binds a head to; return its digest."""
        images = [image for image in found.usable if not held_out(image, self._local.holdout)]
        data = self._data(manifest, images) if images else None
        packed = pack(initial_model(manifest, tensors, data=data, blobs=self._kept.blobs))
        with self._kept.keeping:
            digest = self._kept.blobs.put(packed)
            self._kept.set(StoredInitialModel(digest))
        return digest

    def _local_model(self, task: bytes) -> LocalModel | None:
        digest = self._kept_digest(task)
        try:
            return unpack(self._kept.blobs.read(digest)) if digest else None
        except StateError as error:
            event(
                log,
                logging.WARNING,
                "local model is lost; the next round starts from the initial model",
                error=error,
            )
            self._kept.set(StoredLocalModel())
            return None

    def _data(self, manifest: TaskManifest, images: Sequence[LabeledImage]) -> TrainingSet:
        identities = [image.identity for image in images]
        size = feature_size(manifest, self._kept.blobs)
        feature = self._cache.matrix(identities, *learning_keys(manifest), size=size)
        return TrainingSet(feature, np.array([image.label for image in images], np.int64))


def _checkpoint(file: Path, about: Sequence[str | int]) -> Checkpoint | None:
    """Where the training of just this was interrupted, if it was."""
    if not file.exists():
        return None
    with state_errors(file):
        data = file.read_bytes()
    try:
        checkpoint = unpack_checkpoint(data, about)
    except StateError as error:
        log.warning("%s: %s; the round begins anew", file, error)
        return None
    if checkpoint is not None:
        log.info("going on with the training from step %d", checkpoint.steps)
    return checkpoint
