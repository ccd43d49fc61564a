"""The device's images and their features for a task."""

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_client.config import Settings
from edge_client.data import file_ages
from edge_client.data.extraction import ISOLATED, Alter, Isolate, extract
from edge_client.data.file_ages import FileAges
from edge_client.data.holdout import held_out
from edge_client.data.images import ImageScan, LabeledImage, NoImages, log_skipped, name_some, scan_images
from edge_client.privacy.perturbation import cache_tag, perturb_image
from edge_client.privacy.policy import FAILED, is_bounded, is_private
from edge_client.runtime.backbone import Backbone, open_backbone
from edge_client.runtime.session import Provider
from edge_client.storage.crash_counter import MAX_CRASHES, task_key
from edge_client.storage.device_state import DeviceState
from edge_client.storage.feature_cache import FeatureCache
from edge_client.storage.stored_values import BackboneProvider, LeftOut
from edge_client.submission.extraction_progress import ProgressReporter
from protocol.cli import plain
from protocol.errors import BackboneMismatch, ConfigError, Interrupted, PrivacyFailed
from protocol.log import event
from protocol.models.preprocessing import Preprocessing
from protocol.wire.messages import BlobRef, TaskManifest

log = logging.getLogger(__name__)

BEING_WRITTEN = "still being written: a later scan uses it"


@dataclass(frozen=True)
class FoundImages:
    """A device's images whose features are in the cache, and the unusable files with reasons."""

    usable: tuple[LabeledImage, ...]
    unusable: tuple[tuple[Path, str], ...]
    held_out: frozenset[str] = frozenset()
    """Relative paths of the images that are held out."""

    def of_class(self, label: int) -> list[LabeledImage]:
        """Return the usable images of a class."""
        return [image for image in self.usable if image.label == label]

    def for_training(self, label: int | None = None) -> list[LabeledImage]:
        """Return the usable images that are not held out, of one class or of all."""
        images = self.usable if label is None else self.of_class(label)
        return [image for image in images if image.relative not in self.held_out]


@dataclass
class Workspace:
    """Shared inputs of submissions and heads: settings, state directory, feature cache and open backbones.

    A dry run writes no submission and no local model to the state directory.
    """

    settings: Settings
    store: DeviceState
    cache: FeatureCache
    dry_run: bool = False
    isolate: Isolate = Backbone.isolated
    """Runs backbones under differential privacy."""
    ages: FileAges = field(default_factory=FileAges)
    on_stored: Callable[[], None] = field(default_factory=lambda: _do_nothing, init=False)
    """Called when results are on disk, which `run_task` counts as progress."""
    is_incomplete: bool = field(default=False, init=False)
    """True if a later build may use images that the last one could not, although no file changes."""
    scanned: tuple[str, ...] | None = field(default=None, init=False)
    """The identities of the images that were found last, or the error with which that failed; None before the first."""
    awaits_block: bool = field(default=False, init=False)
    """True if the last build was made without a block that awaits an image."""
    unknown_names: frozenset[str] = field(default=frozenset(), init=False)
    """The folders or labels of the last scan that are no class of the task, as `normal` returns them."""
    replaced: dict[str, bytes] = field(default_factory=dict, init=False)
    """By relative paths, the digests of images in whose files extractions have found others, even if interrupted."""
    _being_written: frozenset[str] = field(default=frozenset(), init=False)
    """The relative paths of the files that the last scan left out, because they may be incomplete."""
    _classes: tuple[str, ...] = field(default=(), init=False)
    """Of the last scan."""
    _logged: set[str] = field(default_factory=set, init=False)
    """Reasons to skip files that were logged."""
    _left_out: LeftOut = field(default_factory=LeftOut, init=False)
    _backbones: dict[tuple[str, Provider], Backbone] = field(default_factory=dict, init=False)

    @contextlib.contextmanager
    def run_task(
        self, manifest: TaskManifest, *, purpose: Literal["build", "install"] = "build"
    ) -> Iterator[None]:
        """Count a start of a task's graphs, as `CrashCounter.guard` does; a dry run is how the operator tries it again.

        Raises:
            CrashedBefore: they have ended the program too often.
        """
        what = "the task's graphs: waiting for another task; to try it again, run `edge-client dry-run`"
        key, max_crashes = task_key(manifest, purpose=purpose), None if self.dry_run else MAX_CRASHES
        with self.store.crash_counter.guard(key, what=what, max_crashes=max_crashes) as progress:
            self.on_stored = progress
            try:
                yield
            finally:
                self.on_stored = _do_nothing

    def is_bounded(self, manifest: TaskManifest) -> bool:
        """Return whether messages about a task must not reveal images."""
        return is_bounded(manifest, max_epsilon=self.settings.max_epsilon)

    def backbones(self, manifest: TaskManifest) -> list[Backbone]:
        """Return the task's open backbones; they stay open until another task needs others, or other privacy."""
        wanted = {(blob.digest.hex(), self._provider(manifest)): blob for blob in manifest.backbones}
        if self._backbones.keys() != wanted.keys():
            self._backbones = {}
            self._backbones = {key: self._open(blob, manifest) for key, blob in wanted.items()}
        return [self._backbones[digest, self._provider(manifest)] for digest in backbone_digests(manifest)]

    def try_backbones(self, manifest: TaskManifest) -> None:
        """Run each of the task's backbones on an image of zeros; under differential privacy as in `extract`.

        Raises:
            BackboneMismatch: a backbone cannot be used.
            ProtofleetError: a backbone fails.
            BlobLost: a backbone was damaged on disk.
        """
        isolate = self.isolate if self.is_bounded(manifest) else nullcontext
        for number, blob in enumerate(manifest.backbones):
            backbone = self._open(blob, manifest) if manifest.program else self.backbones(manifest)[number]
            spec = backbone.metadata.preprocessing
            with isolate(backbone) as isolated:
                isolated.features(np.zeros((1, spec.height, spec.width, 3), np.uint8))

    def find_images(self, manifest: TaskManifest) -> tuple[LabeledImage, ...]:
        """Find the complete images; what is left out is logged, and stored for `edge-client status`.

        Where the first scan finds files that were changed a moment ago, it is repeated once they may be complete.

        Raises:
            ConfigError: the data folder cannot be read.
        """
        data = self.settings.data
        try:
            scan, ages = self._scan(manifest)
        except ConfigError as error:
            self.scanned, self._being_written = (str(error),), frozenset()
            raise
        is_complete = [age_s >= file_ages.SETTLE_S for age_s in ages]
        images = tuple(itertools.compress(scan.images, is_complete))
        incomplete = [
            image.relative for image, complete in zip(scan.images, is_complete, strict=True) if not complete
        ]
        self.scanned, self._being_written = tuple(image.identity for image in images), frozenset(incomplete)
        self.unknown_names = scan.unknown_names
        skipped = {BEING_WRITTEN: len(incomplete), **scan.skipped} if incomplete else scan.skipped
        before, now = self._left_out, LeftOut(scan.unknown, skipped, self._left_out.unusable)
        if now.unknown and now.unknown != before.unknown:
            text = "no class of the task, images left out: rename the folders, or add the classes to the task file"
            event(log, logging.WARNING, text, unknown=name_some(now.unknown), data=data)
        log_skipped(now.skipped, self._logged, data)
        self._note(now)
        return images

    def _scan(self, manifest: TaskManifest) -> tuple[ImageScan, list[float]]:
        """Return what the data folder has, and the images' ages; at the first scan for these classes after a pause."""
        if manifest.classes != self._classes:
            self._classes = manifest.classes
            self.ages.forget()
        is_first = self.ages.is_new
        scan = scan_images(self.settings.data, manifest.classes)
        ages = self.ages.update(scan.images)
        if is_first and (pause_s := file_ages.SETTLE_S - min(ages, default=math.inf)) > 0:
            time.sleep(pause_s)
            scan = scan_images(self.settings.data, manifest.classes)
            ages = self.ages.update(scan.images)
        return scan, ages

    def missing(self, earlier: Iterable[str]) -> set[str]:
        """Return the identities of an earlier scan that the last one misses, without files that are being written."""
        missing = set(earlier).difference(self.scanned or ())
        return {each for each in missing if _path_of(each) not in self._being_written}

    def _note(self, left_out: LeftOut) -> None:
        """Store what is left out for `edge-client status`, if it has changed."""
        self._left_out = left_out
        if not self.dry_run and left_out != self.store.get(LeftOut):
            self.store.set(left_out)

    def extract(
        self,
        manifest: TaskManifest,
        should_stop: Callable[[], bool],
        images: tuple[LabeledImage, ...] | None = None,
    ) -> FoundImages:
        """Put the features of all images, or of those that were found before, into the cache.

        If the task perturbs images, training images are perturbed and held-out images are not. Under differential
        privacy each image is computed in a process of its own, and no image is held out: which ones are depends on
        the class's other images. A task with rounds closes its backbones afterwards.

        Raises:
            NoImages: there are none, and the task is not private.
            ConfigError: as in `find_images`.
            Interrupted: `should_stop` returned True.
            PrivacyRefused: the task perturbs images, and there is no secret.
            BlobLost: a backbone was damaged on disk.
        """
        opened = {} if manifest.program else {each.sha256: each for each in self.backbones(manifest)}
        alter, settings = _perturbation(manifest, self.secret(manifest)), self.settings
        images = self.find_images(manifest) if images is None else images
        if not images and not is_private(manifest):
            left_out = f"; left out: {name_some(self._left_out.unknown)}" if self._left_out.unknown else ""
            raise NoImages(
                f"no image of the task's classes ({name_some(manifest.classes)}) in {settings.data}{left_out}: this "
                "device uploads nothing, and receives heads"
            )
        self.forget_deleted(manifest, images)
        kept = self._held_out(manifest, images)
        unusable = self._compute(manifest, opened, images, kept, alter, should_stop)
        if (now := self._held_out(manifest, images)) != kept:  # a new file shows an image that is in a group
            kept = now
            if alter is not None:
                unusable = self._compute(manifest, opened, images, kept, alter, should_stop)
        if should_stop():  # a run that was ended for it may have passed for an image's failure
            raise Interrupted("extraction was interrupted; what was computed is stored")
        useless = {path for path, _ in unusable}
        named = tuple((plain(str(path)), plain(reason)) for path, reason in sorted(unusable))
        self._note(msgspec.structs.replace(self._left_out, unusable=named))
        usable = tuple(image for image in images if image.path not in useless)
        return FoundImages(usable, tuple(sorted(unusable)), kept)

    def forget_deleted(self, manifest: TaskManifest, images: Sequence[LabeledImage]) -> None:
        """Delete the features of images that do not exist any more, and note the images that were replaced."""
        paths, identities = {image.relative for image in images}, {image.identity for image in images}
        before = {
            _path_of(identity): (identity, digest) for identity, digest in self.cache.contents().items()
        }
        self.replaced |= {
            path: digest
            for path, (identity, digest) in before.items()
            if path in paths and identity not in identities
        }
        identities |= {identity for path, (identity, _) in before.items() if path in self._being_written}
        self.cache.prune(identities, *backbone_digests(manifest), *training_feature_keys(manifest))

    def _compute(
        self,
        manifest: TaskManifest,
        opened: Mapping[str, Backbone],
        images: Sequence[LabeledImage],
        kept: frozenset[str],
        alter: tuple[str, Alter] | None,
        should_stop: Callable[[], bool],
    ) -> list[tuple[Path, str]]:
        """Put features into the cache, of altered images unless they are kept; return unusable images with reasons."""
        blobs = {blob.digest.hex(): blob for blob in manifest.backbones}
        parts: dict[bool, list[LabeledImage]] = {False: [], True: []}
        for image in images:
            parts[alter is not None and image.relative not in kept].append(image)
        unusable: list[tuple[Path, str]] = []
        reporter = ProgressReporter(
            None if self.dry_run else self.store, images=len(images), backbones=len(manifest.backbones)
        )
        with contextlib.closing(reporter):
            for is_altered, part in parts.items():
                extraction = extract(
                    part,
                    backbone_digests(manifest),
                    self.cache,
                    open_backbone=lambda digest: (
                        self._open(blobs[digest], manifest) if manifest.program else opened[digest]
                    ),
                    batch_size=self.settings.batch_size,
                    on_progress=reporter.advance,
                    on_stored=self.on_stored,
                    should_stop=should_stop,
                    alter=alter if is_altered else None,
                    isolate=self.isolate if is_private(manifest) else None,
                )
                unusable += extraction.refused
                # Under differential privacy each build is charged, and which images fail must not be seen.
                self.is_incomplete |= extraction.may_pass and not is_private(manifest)
        return unusable

    def _held_out(self, manifest: TaskManifest, images: Sequence[LabeledImage]) -> frozenset[str]:
        return frozenset() if is_private(manifest) else self.held_out(images)

    def held_out(self, images: Sequence[LabeledImage]) -> frozenset[str]:
        """Return the relative paths of the images that are held out; none that is in a group."""
        groups, digests = self.store.image_groups.read(), self.cache.contents()
        grouped = {image.relative for image in images if digests.get(image.identity) in groups.number_of}
        return held_out(images, self.settings.holdout, grouped=grouped)

    def secret(self, manifest: TaskManifest) -> bytes:
        """Return the device's secret, from which shuffles and noise are derived.

        Raises:
            PrivacyFailed: the task needs noise, and the secret can be neither generated nor stored.
        """
        try:
            return self.store.secret(keep=not self.dry_run)
        except Exception as error:
            if manifest.perturbation is None and manifest.differential_privacy is None:
                raise
            event(log, logging.ERROR, "no secret for noise", error=error)
            raise PrivacyFailed(FAILED) from error

    def training_features(
        self, manifest: TaskManifest, images: Sequence[LabeledImage]
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the columns that prototypes have of the cached features of training images, float32 (any, D)."""
        identities = [image.identity for image in images]
        for features in self.cache.chunks(identities, *training_feature_keys(manifest)):
            yield features[:, prototype_columns(manifest, features.shape[1])]

    def features(self, images: Sequence[LabeledImage], keys: Sequence[str], size: int) -> NDArray[np.float32]:
        """Return the cached features of images, float32 (n, size)."""
        return self.cache.matrix([image.identity for image in images], *keys, size=size)

    def _provider(self, manifest: TaskManifest) -> Provider:
        """Return where a task's backbones are opened.

        On a GPU, opening one runs it in this process, whose memory has images, and the device reports what came of it.
        """
        return "cpu" if self.is_bounded(manifest) else self.settings.provider

    def _open(self, blob: BlobRef, manifest: TaskManifest) -> Backbone:
        file, settings = self.store.blobs.verified_path(blob.digest), self.settings
        provider = self._provider(manifest)
        backbone = open_backbone(file, provider=provider, threads=settings.threads, digest=blob.digest)
        event(log, logging.INFO, "backbone opened", name=blob.name, provider=backbone.model.provider)
        if backbone.model.note:
            log.warning("%s", backbone.model.note)
        self.store.set(BackboneProvider(backbone.model.provider))
        return backbone


def _path_of(identity: str) -> str:
    """Return the relative path in an image's identity."""
    return identity.split("-", 2)[-1]


def _do_nothing() -> None:
    pass


def prototype_columns(task: TaskManifest, feature_size: int) -> NDArray[np.intp] | slice:
    """Return the columns of features (n, feature_size) that a task's prototypes have.

    Raises:
        BackboneMismatch: the features have no such columns.
    """
    if not task.columns:
        return slice(None)
    bounds = list(itertools.chain.from_iterable(task.columns))
    if sorted({*bounds}) != bounds or bounds[-1] > feature_size:
        raise BackboneMismatch(f"expected ascending columns of {feature_size} features, got {task.columns}")
    return np.concatenate([np.arange(start, end) for start, end in task.columns])


def backbone_digests(task: TaskManifest) -> list[str]:
    """Return the hex digests of a task's backbones: the cache keys of unperturbed features."""
    return [blob.digest.hex() for blob in task.backbones]


def training_feature_keys(task: TaskManifest) -> list[str]:
    """Return the cache keys of the training images' features, which may be perturbed or computed in isolation."""
    how = task.perturbation
    tag = cache_tag(how) if how and how.on == "images" else ISOLATED if is_private(task) else ""
    return [digest + tag for digest in backbone_digests(task)]


def _perturbation(task: TaskManifest, secret: bytes) -> tuple[str, Alter] | None:
    """Return the perturbation of training images with its cache tag; None if the task has none."""
    how = task.perturbation
    if how is None or how.on != "images":
        return None

    def alter(image: LabeledImage, wanted: Preprocessing, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return perturb_image(pixels, how, identity=image.identity, wanted=wanted, secret=secret)

    return cache_tag(how), alter
