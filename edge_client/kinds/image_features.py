"""The device's images and their features for a task."""

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge_client.config import Settings
from edge_client.core.submission_kinds import kind_of
from edge_client.graphs.backbone import Backbone, open_backbone
from edge_client.graphs.session import Provider
from edge_client.images.extraction import (
    ISOLATED,
    Alter,
    Decode,
    Isolate,
    decode_suspects,
    extract,
    pixels_of,
)
from edge_client.images.image_scanner import Scan, path_of
from edge_client.images.images import LabeledImage, NoImages, name_some
from edge_client.images.isolated_decoding import isolated_decoder
from edge_client.kinds.job_progress import ExtractionCounter, JobProgress
from edge_client.privacy.perturbation import cache_tag, perturb_image
from edge_client.privacy.policy import is_bounded
from edge_client.privacy.upload_slots import longest_build_s
from edge_client.prototypes.holdout import held_out
from edge_client.store.culprits import MAX_DEATHS, Culprits, task_key
from edge_client.store.feature_cache import FeatureCache
from edge_client.store.job_folder import Charge, Doing, Grant
from edge_client.store.job_state import JobState
from edge_client.store.stored_values import BackboneProvider, LeftOut
from protocol.cli import plain
from protocol.errors import BackboneMismatch, ConfigError
from protocol.log import event
from protocol.models.preprocessing import Preprocessing
from protocol.wire.messages import BlobRef, TaskManifest

log = logging.getLogger(__name__)

SHORT_PERIOD = (
    "--upload-period-s is too short for the slowest build for this task, whose time would reveal images: lengthen it, "
    "or limit --max-images"
)


@dataclass(frozen=True)
class FoundImages:
    """A device's images whose features are in the cache, and the unusable files with reasons."""

    usable: tuple[LabeledImage, ...]
    unusable: tuple[tuple[Path, str], ...]
    held_out: frozenset[str] = frozenset()
    """Relative paths of the images that are held out."""
    scan: Scan = field(default_factory=Scan)
    """The scan of the data folder that found them."""
    may_pass: bool = False
    """True if a later build may use images that are unusable now, although no file changes."""

    def of_class(self, label: int) -> list[LabeledImage]:
        """Return the usable images of a class."""
        return [image for image in self.usable if image.label == label]

    def for_training(self, label: int | None = None) -> list[LabeledImage]:
        """Return the usable images that are not held out, of one class or of all."""
        images = self.usable if label is None else self.of_class(label)
        return [image for image in images if image.relative not in self.held_out]


@dataclass
class Workspace:
    """Shared inputs of submissions and heads: settings, the device's state, feature cache and open backbones.

    A dry run writes no submission and no local model to the state directory.
    """

    settings: Settings
    store: JobState
    cache: FeatureCache
    find: Callable[[Sequence[str]], Scan]
    """Returns a scan of the data folder for the classes of a task."""
    dry_run: bool = False
    requires_privacy: bool = False
    """The device takes part in tasks with differential privacy only."""
    culprits: Culprits = field(default_factory=Culprits)
    charge: Callable[[Charge], Grant] | None = None
    """Charges a release under differential privacy."""
    show_progress: Callable[[Doing], None] = lambda _: None
    open_backbones: dict[tuple[str, Provider], Backbone] = field(default_factory=dict)
    """Backbones by digest in hex and provider, which stay open for the next job."""
    isolate: Isolate = Backbone.isolated
    """Runs backbones under differential privacy."""

    @contextlib.contextmanager
    def run_task(
        self, manifest: TaskManifest, *, purpose: Literal["build", "install"] = "build"
    ) -> Iterator[None]:
        """Name the task's graphs, as `Culprits.running` does; a dry run is how the operator tries them again.

        Raises:
            CrashedBefore: they have ended too many jobs.
        """
        what = "the task's graphs: waiting for another task; to try it again, run `edge-client dry-run`"
        key, max_deaths = task_key(manifest, purpose=purpose), None if self.dry_run else MAX_DEATHS
        with self.culprits.running(key, what=what, max_deaths=max_deaths):
            yield

    def decode_suspects(self, images: Sequence[LabeledImage]) -> None:
        """Decode images singly at one of which a job may have ended."""
        decode_suspects(images, self.culprits)

    def is_bounded(self, manifest: TaskManifest) -> bool:
        """Return whether messages about a task must not reveal images."""
        return is_bounded(manifest, requires_privacy=self.requires_privacy)

    def backbones(self, manifest: TaskManifest) -> list[Backbone]:
        """Return the task's open backbones; they stay open until another task needs others, or other privacy."""
        wanted = {(blob.digest.hex(), self._provider(manifest)): blob for blob in manifest.backbones}
        if self.open_backbones.keys() != wanted.keys():
            self.open_backbones.clear()
            self.open_backbones.update({key: self._open(blob, manifest) for key, blob in wanted.items()})
        return [
            self.open_backbones[digest, self._provider(manifest)] for digest in backbone_digests(manifest)
        ]

    def try_backbones(self, manifest: TaskManifest) -> None:
        """Run each of the task's backbones on an image of zeros; under differential privacy as in `extract`.

        Raises:
            BackboneMismatch: a backbone cannot be used.
            ProtofleetError: a backbone fails.
            BlobLost: a backbone was damaged on disk.
        """
        isolate = self.isolate if self.is_bounded(manifest) else nullcontext
        for number, blob in enumerate(manifest.backbones):
            backbone = (
                self._open(blob, manifest)
                if kind_of(manifest).in_rounds
                else self.backbones(manifest)[number]
            )
            spec = backbone.metadata.preprocessing
            with isolate(backbone) as isolated:
                isolated.features(np.zeros((1, spec.height, spec.width, 3), np.uint8))

    def progress(self, label: str) -> JobProgress:
        """Return what shows the progress of something."""
        return JobProgress(label, self.show_progress)

    def find_images(self, manifest: TaskManifest) -> Scan:
        """Return a scan of the complete images; what is left out is stored for `edge-client status`.

        Raises:
            ConfigError: the data folder cannot be read.
        """
        scan = self.find(manifest.classes)
        if scan.problem:
            raise ConfigError(scan.problem)
        self._note(LeftOut(scan.unknown, scan.skipped, self.store.get(LeftOut).unusable))
        return scan

    def _note(self, left_out: LeftOut) -> None:
        """Store what is left out for `edge-client status`, if it has changed."""
        if not self.dry_run and left_out != self.store.get(LeftOut):
            self.store.set(left_out)

    def extract(self, manifest: TaskManifest, scan: Scan | None = None) -> FoundImages:
        """Put the features of all images, or of those of an earlier scan, into the cache.

        If the task perturbs images, training images are perturbed and held-out images are not. Under differential
        privacy each image is computed in a process of its own, and no image is held out: which ones are depends on
        the class's other images. A task with rounds closes its backbones afterwards.

        Raises:
            NoImages: there are none, and the task is not private.
            ConfigError: as in `find_images`.
            PrivacyRefused: the task perturbs images, and there is no secret.
            BlobLost: a backbone was damaged on disk.
        """
        kind = kind_of(manifest)
        opened = {} if kind.in_rounds else {each.sha256: each for each in self.backbones(manifest)}
        alter, settings = _perturbation(manifest, self.store.secret), self.settings
        scan = self.find_images(manifest) if scan is None else scan
        images = scan.images
        if not images and not kind.is_private:
            left_out = f"; left out: {name_some(scan.unknown)}" if scan.unknown else ""
            raise NoImages(
                f"no image of the task's classes ({name_some(manifest.classes)}) in {settings.data}{left_out}: this "
                "device uploads nothing, and receives heads"
            )
        self.forget_deleted(manifest, scan)
        kept = self._held_out(manifest, images)
        unusable, may_pass = self._compute(manifest, opened, images, kept, alter)
        if (now := self._held_out(manifest, images)) != kept:  # a new file shows an image that is in a group
            kept = now
            if alter is not None:
                unusable, may_pass = self._compute(manifest, opened, images, kept, alter)
        useless = {path for path, _ in unusable}
        named = tuple((plain(str(path)), plain(reason)) for path, reason in sorted(unusable))
        self._note(LeftOut(scan.unknown, scan.skipped, named))
        usable = tuple(image for image in images if image.path not in useless)
        return FoundImages(usable, tuple(sorted(unusable)), kept, scan, may_pass)

    def forget_deleted(self, manifest: TaskManifest, scan: Scan) -> None:
        """Delete the features of images that do not exist any more, and note the images that were replaced."""
        paths, identities = {image.relative for image in scan.images}, {*scan.identities}
        before = {path_of(identity): identity for identity in self.cache.contents()}
        replaced = {
            path: identity
            for path, identity in before.items()
            if path in paths and identity not in identities
        }
        identities |= {identity for path, identity in before.items() if path in scan.being_written}
        keys = (*backbone_digests(manifest), *training_feature_keys(manifest))
        self.cache.prune(identities, *keys, replaced=replaced)

    def _compute(
        self,
        manifest: TaskManifest,
        opened: Mapping[str, Backbone],
        images: Sequence[LabeledImage],
        kept: frozenset[str],
        alter: tuple[str, Alter] | None,
    ) -> tuple[list[tuple[Path, str]], bool]:
        """Put features into the cache, of altered images unless they are kept.

        Returns the unusable images with reasons, and whether a reason may pass by itself.
        """
        kind, may_pass = kind_of(manifest), False
        blobs = {blob.digest.hex(): blob for blob in manifest.backbones}
        parts: dict[bool, list[LabeledImage]] = {False: [], True: []}
        for image in images:
            parts[alter is not None and image.relative not in kept].append(image)
        unusable: list[tuple[Path, str]] = []
        slots_s: list[float] = []

        @contextlib.contextmanager
        def isolated(backbone: Backbone) -> Iterator[tuple[Backbone, Decode]]:
            with self.isolate(backbone) as one, contextlib.ExitStack() as stack:
                decode: Decode = pixels_of
                slot_s = one.model.slot_s
                if math.isfinite(slot_s):  # decoding has a budget where runs have one
                    decoder = stack.enter_context(isolated_decoder(backbone.metadata.preprocessing))
                    slot_s, decode = max(slot_s, decoder.slot_s), decoder.pixels_of
                slots_s.append(slot_s)
                self._warn_of_period(len(images), sum(slots_s))
                yield one, decode

        reporter = ExtractionCounter(
            self.show_progress, images=len(images), backbones=len(manifest.backbones)
        )
        with contextlib.closing(reporter):
            for is_altered, part in parts.items():
                extraction = extract(
                    part,
                    backbone_digests(manifest),
                    self.cache,
                    open_backbone=lambda digest: (
                        self._open(blobs[digest], manifest) if kind.in_rounds else opened[digest]
                    ),
                    batch_size=self.settings.batch_size,
                    on_progress=reporter.advance,
                    culprits=self.culprits,
                    alter=alter if is_altered else None,
                    isolate=isolated if kind.is_private else None,
                )
                unusable += extraction.refused
                # Under differential privacy each build is charged, and which images fail must not be seen.
                may_pass |= extraction.may_pass and not kind.is_private
        return unusable, may_pass

    def _warn_of_period(self, images: int, slot_s: float) -> None:
        """Log that the owner's period cannot hold a build of so many images of `slot_s` seconds each."""
        period_s, needed_s = self.settings.upload_period_s, longest_build_s(images, slot_s)
        if period_s is not None and math.isfinite(needed_s) and needed_s > period_s:
            event(log, logging.WARNING, SHORT_PERIOD, needed_s=math.ceil(needed_s), images=images)

    def _held_out(self, manifest: TaskManifest, images: Sequence[LabeledImage]) -> frozenset[str]:
        return frozenset() if kind_of(manifest).is_private else self.held_out(images)

    def held_out(self, images: Sequence[LabeledImage]) -> frozenset[str]:
        """Return the relative paths of the images that are held out; none that is in a group."""
        groups, digests = self.store.partition, self.cache.contents()
        grouped = {image.relative for image in images if digests.get(image.identity) in groups.number_of}
        return held_out(images, self.settings.holdout, grouped=grouped)

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
    tag = cache_tag(how) if how and how.on == "images" else ISOLATED if kind_of(task).is_private else ""
    return [digest + tag for digest in backbone_digests(task)]


def _perturbation(task: TaskManifest, secret: bytes) -> tuple[str, Alter] | None:
    """Return the perturbation of training images with its cache tag; None if the task has none."""
    how = task.perturbation
    if how is None or how.on != "images":
        return None

    def alter(image: LabeledImage, wanted: Preprocessing, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return perturb_image(pixels, how, identity=image.identity, wanted=wanted, secret=secret)

    return cache_tag(how), alter
