"""The device's images and their features for a task."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_client.config import LocalSettings, Settings
from edge_client.data.extraction import Alter, Extraction, extract
from edge_client.data.images import LabeledImage, find_images, held_out
from edge_client.privacy.perturbation import cache_tag, perturb_image
from edge_client.privacy.policy import FAILED, is_private
from edge_client.progress_bar import Progress
from edge_client.runtime.backbone import Backbone, open_backbone
from edge_client.storage.device_state import DeviceState
from edge_client.storage.feature_cache import FeatureCache
from edge_client.storage.stored_values import BackboneProvider
from edge_client.submission.prepared_submission import FoundImages
from protocol.errors import PrivacyRefused
from protocol.log import event
from protocol.preprocessing import Preprocessing
from protocol.wire.messages import BlobRef, TaskManifest

log = logging.getLogger(__name__)


@dataclass
class Workspace:
    """Shared inputs of submissions and heads: settings, state directory, feature cache and open backbones.

    Args:
        dry_run: write nothing to the state directory.
    """

    settings: Settings
    store: DeviceState
    cache: FeatureCache
    dry_run: bool = False
    _backbones: dict[str, Backbone] = field(default_factory=dict, init=False)

    @property
    def local(self) -> LocalSettings:
        """Return the settings for processing images."""
        return self.settings.local

    def backbones(self, manifest: TaskManifest) -> list[Backbone]:
        """Return the task's open backbones; they stay open until another task needs others."""
        wanted = {blob.digest.hex(): blob for blob in manifest.backbones}
        if self._backbones.keys() != wanted.keys():
            self._backbones = {}
            self._backbones = {digest: self._open(blob) for digest, blob in wanted.items()}
        return [self._backbones[digest] for digest in backbone_digests(manifest)]

    def extract(self, manifest: TaskManifest, should_stop: Callable[[], bool]) -> FoundImages:
        """Find the images and compute missing features; a task with rounds closes its backbones afterwards."""
        blobs = {blob.digest.hex(): blob for blob in manifest.backbones}
        if manifest.program is None:
            self.backbones(manifest)
        with contextlib.closing(Progress("extracting features")) as progress:
            return extract_features(
                task=manifest,
                local=self.local,
                cache=self.cache,
                open_backbone=lambda digest: (
                    self._open(blobs[digest]) if manifest.program else self._backbones[digest]
                ),
                on_progress=progress.update,
                should_stop=should_stop,
                secret=self.secret(manifest),
            )

    def secret(self, manifest: TaskManifest) -> bytes:
        """Return the device's secret, from which shuffles and noise are derived.

        Raises:
            PrivacyRefused: the task needs noise, and the secret can be neither generated nor stored.
        """
        try:
            return self.store.secret(keep=not self.dry_run)
        except Exception as error:
            if manifest.perturbation is None and manifest.differential_privacy is None:
                raise
            event(log, logging.ERROR, "no secret for noise", error=error)
            raise PrivacyRefused(FAILED) from error

    def _open(self, blob: BlobRef) -> Backbone:
        backbone = open_backbone(
            self.store.blobs.path(blob.digest),
            provider=self.settings.provider,
            threads=self.settings.threads,
        )
        event(log, logging.INFO, "backbone opened", name=blob.name, provider=backbone.model.provider)
        if backbone.model.note:
            log.warning("%s", backbone.model.note)
        self.store.set(BackboneProvider(backbone.model.provider))
        return backbone


def extract_features(
    *,
    task: TaskManifest,
    local: LocalSettings,
    cache: FeatureCache,
    open_backbone: Callable[[str], Backbone],
    on_progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
    secret: bytes = b"",
) -> FoundImages:
    """Find a device's images and put the features of all of them into the cache.

    If the task perturbs images, training images are perturbed and held-out images are not.

    Raises:
        ConfigError: there are no images, or folders that are not classes of the task.
        Interrupted: `should_stop` returned True.
        PrivacyRefused: the task perturbs images, and `secret` is not 32 bytes.
    """
    images = find_images(local.data, task.classes, may_be_none=is_private(task))
    cache.prune(
        (image.identity for image in images), *{*backbone_digests(task), *training_feature_keys(task)}
    )

    def extraction(part: Sequence[LabeledImage], done: int, alter: tuple[str, Alter] | None) -> Extraction:
        return extract(
            part,
            backbone_digests(task),
            cache,
            open_backbone=open_backbone,
            batch_size=local.batch_size,
            workers=local.workers,
            on_progress=lambda now, _: on_progress(done + now, len(images) * len(task.backbones)),
            should_stop=should_stop,
            alter=alter,
        )

    if (alter := _perturbation(task, secret)) is None:
        unusable = extraction(images, 0, None).refused
    else:
        held = [image for image in images if held_out(image, local.holdout)]
        training = [image for image in images if not held_out(image, local.holdout)]
        parts = (extraction(held, 0, None), extraction(training, len(held) * len(task.backbones), alter))
        unusable = tuple(sorted(entry for part in parts for entry in part.refused))
    useless = {path for path, _ in unusable}
    return FoundImages(tuple(image for image in images if image.path not in useless), unusable)


def backbone_digests(task: TaskManifest) -> list[str]:
    """Return the hex digests of a task's backbones: the cache keys of unperturbed features."""
    return [blob.digest.hex() for blob in task.backbones]


def training_feature_keys(task: TaskManifest) -> list[str]:
    """Return the cache keys of the training images' features, which may be perturbed."""
    how = task.perturbation
    tag = cache_tag(how) if how and how.on == "images" else ""
    return [digest + tag for digest in backbone_digests(task)]


def _perturbation(task: TaskManifest, secret: bytes) -> tuple[str, Alter] | None:
    """Return the perturbation of training images with its cache tag; None if the task has none."""
    how = task.perturbation
    if how is None or how.on != "images":
        return None

    def alter(image: LabeledImage, wanted: Preprocessing, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return perturb_image(pixels, how, identity=image.identity, wanted=wanted, secret=secret)

    return cache_tag(how), alter
