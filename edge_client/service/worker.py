"""The device's work, one piece after the other on a thread of its own."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from edge_client.agent import events
from edge_client.agent.state import head_key
from edge_client.agent.upload_item import UploadItem
from edge_client.config import Settings
from edge_client.data.images import find_images
from edge_client.inference.head_loader import open_installed
from edge_client.inference.predictor import Head
from edge_client.privacy.differencing_guard import LastSubmission, last_submission
from edge_client.privacy.policy import FAILED, HEAD_REFUSED, check_task, is_private
from edge_client.runtime.backbone import Backbone, open_backbone
from edge_client.service.progress import Progress
from edge_client.storage.device_state import DeviceState
from edge_client.storage.facts import (
    BackboneProvider,
    Heads,
    HeadTrial,
    InstalledHead,
    SubmissionReport,
    SubmissionSequence,
    UploadedImages,
)
from edge_client.storage.feature_cache import FeatureCache
from edge_client.submission.builder import (
    FoundImages,
    PreparedSubmission,
    digests,
    evaluate_head,
    find,
    prepare,
    submission_of,
)
from edge_client.submission.private import PrivateWork
from edge_client.submission.rounds import RoundWork
from edge_client.training.local_round import (
    feature_size,
)
from edge_client.training.trainer import Diverged
from protocol.errors import (
    BackboneMismatch,
    ConfigError,
    GraphRefused,
    PrivacyRefused,
    ProtofleetError,
    StateError,
)
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, Evaluation, HeadRef, RoundManifest, TaskManifest

log = logging.getLogger(__name__)

MAX_ENDS = 3
"""Times in a row that the program may end while it tries a head, which power loss may do as well."""


@dataclass(frozen=True)
class Crashed:
    """Work ended in an error that is not about this task or head: a full disk, or a fault of ours."""

    error: BaseException


class Worker:
    """Makes submissions and takes heads into use.

    Args:
        settings: what the person chose.
        state: the device's state directory.
        emit: takes the outcomes, from the work's thread.
        show: in a dry run, takes what is prepared and the bytes that would be sent.
    """

    def __init__(
        self,
        settings: Settings,
        state: DeviceState,
        *,
        emit: Callable[[events.Event | Crashed], None],
        show: Callable[[PreparedSubmission, int], None] | None,
    ) -> None:
        self.focus: bytes | None = None
        """The task that work is for; work for another one is dropped."""
        self.round: int | None = None
        """The round that work is for, likewise."""
        self._settings = settings
        self._kept = state
        self._emit = emit
        self._show = show
        self._cache = FeatureCache(state.folder / "features.sqlite")
        self._rounds = RoundWork(settings.local, state, self._cache, dry=show is not None)
        self._backbones: dict[str, Backbone] = {}
        self._seen: tuple[str, ...] | None = None
        self._warned: set[str] = set()
        self._newest: bytes | None = None
        self._manifest: TaskManifest | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="work", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """End after what cannot be interrupted."""
        self.focus = None
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def build(self, build: events.BuildSubmission) -> None:
        """Make a submission; the outcome is a Built, unless another task comes in between."""
        self._jobs.put(lambda: self._build(build))

    def install(self, install: events.InstallHead) -> None:
        """Take a head into use and evaluate it; the outcome is an Installed, unless another task or head comes."""
        self._newest = head_key(install.head)
        self._jobs.put(lambda: self._install(install))

    def refuse(self, refuse: events.RefuseHead) -> None:
        """Report that a head cannot be taken into use; the outcome is an Installed with the reason."""
        self._jobs.put(
            lambda: self._emit(self._refused(refuse.task, refuse.manifest, refuse.head, refuse.reason))
        )

    def look(self) -> None:
        """See whether there are other images than in the last submission; if so, emit ImagesChanged."""
        self._jobs.put(self._look)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._emit(Crashed(error))

    def _look(self) -> None:
        if self._manifest is None or self._seen is None:
            return
        seen = self._identities(self._manifest)
        if seen != self._seen:
            self._seen = seen
            log.info("the images in %s have changed", self._settings.local.data)
            self._emit(events.ImagesChanged())

    def _identities(self, manifest: TaskManifest) -> tuple[str, ...]:
        try:
            images = find_images(self._settings.local.data, manifest.classes)
        except ProtofleetError as error:
            return (str(error),)  # telling it is the next build's part
        return tuple(image.identity for image in images)

    def _open_backbone(self, blob: BlobRef) -> Backbone:
        backbone = open_backbone(
            self._kept.blobs.path(blob.digest),
            provider=self._settings.provider,
            threads=self._settings.threads,
        )
        log.info("running %s on %s", blob.name, backbone.model.provider)
        if backbone.model.note:
            log.warning("%s", backbone.model.note)
        self._kept.set(BackboneProvider(backbone.model.provider))
        return backbone

    def _open_backbones(self, manifest: TaskManifest) -> list[Backbone]:
        """All of a task's backbones, which stay open until there is another task."""
        wanted = {blob.digest.hex(): blob for blob in manifest.backbones}
        if self._backbones.keys() != wanted.keys():
            self._backbones = {}
            self._backbones = {digest: self._open_backbone(blob) for digest, blob in wanted.items()}
        return [self._backbones[digest] for digest in digests(manifest)]

    def _is_due(self, build: events.BuildSubmission) -> bool:
        """Whether nothing newer has come in between."""
        return build.task == self.focus and (build.round is None or build.round.number == self.round)

    def _build(self, build: events.BuildSubmission) -> None:
        if not self._is_due(build):
            return
        self._manifest = build.manifest
        self._seen = self._identities(build.manifest)
        number = None if build.round is None else build.round.number
        try:
            built = self._prepare(build)
        except StateError:
            if self._is_due(build):
                raise
            return  # what it was about to read may have been deleted by now
        except ProtofleetError as error:
            # What the aggregator has sent, it can mend: with the next round, or the next task.
            may_pass = isinstance(error, BackboneMismatch | Diverged | GraphRefused | PrivacyRefused)
            built = events.SubmissionBuilt(build.task, None, number, str(error), may_pass=may_pass)
        if self._is_due(build):
            self._emit(built)

    def _prepare(self, build: events.BuildSubmission) -> events.SubmissionBuilt:
        check_task(build.manifest, max_epsilon=self._settings.local.max_epsilon)
        if build.round is not None:
            return self._prepare_round(build, build.round)
        found = self._find(build.manifest, lambda: not self._is_due(build))
        if is_private(build.manifest):
            prepared = self._prepare_private(build, found)
        else:
            prepared = prepare(
                task=build.manifest,
                local=self._settings.local,
                found=found,
                cache=self._cache,
                secret=self._secret(build.manifest),
                standing=self._standing(build.task),
            )
        self._warn(build.manifest, prepared)
        if self._show is None:
            return self._keep(build, prepared)
        return self._show_only(build, prepared)

    def _standing(self, task: bytes) -> LastSubmission:
        """What was uploaded last, or waits for it."""
        item = self._kept.outbox.newest_submission()
        payload = self._kept.outbox.payload(item) if item is not None and item.task == task else None
        return last_submission(self._kept.get(UploadedImages), payload)

    def _prepare_private(self, build: events.BuildSubmission, found: FoundImages) -> PreparedSubmission:
        backbones = self._open_backbones(build.manifest)
        work = PrivateWork(
            self._settings.local,
            self._kept.ledger,
            self._cache,
            secret=self._secret(build.manifest),
            dry=self._show is not None,
        )
        prepared = work.prepare(
            build.task,
            build.manifest,
            found,
            feature_size=sum(backbone.metadata.feature_size for backbone in backbones),
        )
        if (spent := prepared.privacy) is not None:
            log.info(
                "epsilon %.3f of this submission, %.3f of all %d together, at delta %g",
                *(spent.epsilon, spent.total_epsilon, spent.releases, spent.delta),
            )
        return prepared

    def _find(self, manifest: TaskManifest, should_stop: Callable[[], bool]) -> FoundImages:
        """The images, with their features in the cache; backbones of a program are open only meanwhile."""
        if manifest.program is None:
            opened = {backbone.sha256: backbone for backbone in self._open_backbones(manifest)}
            open_one = opened.__getitem__
        else:
            blobs = {blob.digest.hex(): blob for blob in manifest.backbones}
            open_one = lambda digest: self._open_backbone(blobs[digest])  # noqa: E731 - the other one is a method
        with contextlib.closing(Progress("extracting features")) as progress:
            return find(
                task=manifest,
                local=self._settings.local,
                cache=self._cache,
                open_backbone=open_one,
                on_progress=progress.update,
                should_stop=should_stop,
                secret=self._secret(manifest),
            )

    def _secret(self, manifest: TaskManifest) -> bytes:
        """What shuffles and noise hang on.

        Raises:
            PrivacyRefused: the task wants noise, and there is no randomness to make it of, or it cannot be kept.
        """
        try:
            return self._kept.secret(keep=self._show is None)
        except Exception as error:
            if manifest.perturbation is None and manifest.differential_privacy is None:
                raise
            log.error("there is no secret to make noise of: %s", error)
            raise PrivacyRefused(FAILED) from error

    def _show_only(
        self, build: events.BuildSubmission, prepared: PreparedSubmission
    ) -> events.SubmissionBuilt:
        """Show what would be sent; a sequence number of today has as many bytes as the one that would be."""
        number = None if build.round is None else build.round.number
        payload = submission_of(
            prepared, task=build.task, manifest=build.manifest, sequence=int(time.time()), number=number or 0
        )
        if self._show is not None:
            self._show(prepared, len(payload))
        return events.SubmissionBuilt(
            build.task, UploadItem(digest_of(payload), len(payload), "submission", build.task), number
        )

    def _prepare_round(self, build: events.BuildSubmission, opened: RoundManifest) -> events.SubmissionBuilt:
        """Take part in a round, unless its submission is there already."""
        standing = self._rounds.uploaded(build.task, opened, above=build.above)
        if standing is not None:
            return events.SubmissionBuilt(build.task, standing, opened.number)
        found = self._find(build.manifest, lambda: not self._is_due(build))
        with contextlib.closing(Progress(f"training, round {opened.number}")) as progress:
            prepared, local_model = self._rounds.take_part(
                build.task,
                build.manifest,
                opened,
                found=found,
                on_progress=progress.update,
                should_stop=lambda: not self._is_due(build),
            )
        self._warn(build.manifest, prepared)
        if self._show is not None:
            return self._show_only(build, prepared)
        sequence = self._kept.next_number(SubmissionSequence, above=build.above)
        payload = submission_of(
            prepared, task=build.task, manifest=build.manifest, sequence=sequence, number=opened.number
        )
        report = _report(prepared, len(payload))
        item = self._rounds.keep(build.task, opened, payload=payload, local_model=local_model, report=report)
        loss = "" if prepared.loss is None else f", loss {prepared.loss:.4f}"
        log.info(
            "round %d of %d: %d prototypes, %d bytes%s",
            *(opened.number, opened.rounds, len(prepared.counts), len(payload), loss),
        )
        return events.SubmissionBuilt(build.task, item, opened.number)

    def _warn(self, manifest: TaskManifest, prepared: PreparedSubmission) -> None:
        """Say what is left out and why, each thing once."""
        data, used = self._settings.local.data, {entry.name for entry in prepared.classes}
        lines = [f"left out {path}: {reason}" for path, reason in prepared.refused]
        lines += [
            f"left out class {entry.name!r}: {entry.images} images are too few"
            for entry in prepared.classes
            if entry.left_out
        ]
        lines += [
            f"{entry.waiting} images of class {entry.name!r} have come or gone; they count once "
            f"{manifest.batch_size} have, for a smaller change would give them away"
            for entry in prepared.classes
            if entry.waiting
        ]
        empty = [name for name in manifest.classes if name not in used and (data / name).is_dir()]
        lines += [f"no image that can be used in {data / name}" for name in empty]
        for line in lines:
            if line not in self._warned:
                log.warning("%s", line)
        self._warned = set(lines)

    def _keep(self, build: events.BuildSubmission, prepared: PreparedSubmission) -> events.SubmissionBuilt:
        """Put a submission on the disk; the one that is there stands if it says the same."""
        kept, standing = self._kept, self._kept.outbox.newest_submission()
        made_of = (build.task, prepared.fingerprint)
        if standing is not None and (standing.task, standing.about) == made_of and not build.above:
            return events.SubmissionBuilt(build.task, standing)
        sequence = kept.next_number(SubmissionSequence, above=build.above)
        payload = submission_of(prepared, task=build.task, manifest=build.manifest, sequence=sequence)
        report = _report(prepared, len(payload))
        facts = (report, UploadedImages(prepared.images)) if prepared.privacy is None else (report,)
        item = kept.outbox.keep(
            "submission", payload, task=build.task, about=prepared.fingerprint, facts=facts
        )
        prototypes, images = len(prepared.counts), sum(entry.images for entry in prepared.classes)
        log.info("%d prototypes of %d images, %d bytes", prototypes, images, len(payload))
        return events.SubmissionBuilt(build.task, item)

    def _install(self, install: events.InstallHead) -> None:
        key = head_key(install.head)
        if install.task != self.focus or key != self._newest:
            return  # an older head's blobs may have been deleted by now
        try:
            with self._trying(key):
                outcome = events.HeadInstalled(key, self._evaluate(install))
        except StateError:
            raise
        except ProtofleetError as error:
            outcome = self._refused(install.task, install.manifest, install.head, str(error))
        self._emit(outcome)

    @contextlib.contextmanager
    def _trying(self, key: bytes) -> Iterator[None]:
        """Remember that a head is being tried, so that one that ends the program cannot do so at every start.

        Raises:
            GraphRefused: the program has ended each of the last times that it was tried.
        """
        last = self._kept.get(HeadTrial)
        times = last.attempts + 1 if last.head == key else 1
        self._kept.set(HeadTrial(key, times))
        try:
            if times > MAX_ENDS:
                raise GraphRefused(f"the program has ended {MAX_ENDS} times while it tried it out")
            yield
        finally:
            self._kept.set(HeadTrial())

    def _refused(
        self, task: bytes, manifest: TaskManifest, head: HeadRef, problem: str
    ) -> events.HeadInstalled:
        """Keep a report of why a head is not used."""
        none = (0,) * len(manifest.classes)
        told = HEAD_REFUSED if is_private(manifest) else problem[:256]
        evaluation = Evaluation(
            task=task, head_version=head.version, correct=none, incorrect=none, problem=told
        )
        key, reason = head_key(head), f"head {head.version} refused, the old one stays: {problem}"
        report = self._kept.outbox.keep("evaluation", encode(evaluation), task=task, about=key.hex())
        return events.HeadInstalled(key, report, reason)

    def _evaluate(self, install: events.InstallHead) -> UploadItem:
        """Check a head, evaluate it, and only then take it into use; returns the evaluation in the outbox."""
        kept, reference = self._kept, install.head
        installed, previous = self._describe(install), self._head_before(install)
        backbones = [] if reference.tensors else self._open_backbones(install.manifest)
        head = open_installed(kept.blobs, installed, backbones)
        evaluation = evaluate_head(
            head,
            task=install.task,
            manifest=install.manifest,
            version=reference.version,
            local=self._settings.local,
            cache=self._cache,
            before=self._open_before(previous, backbones),
        )
        right, total = sum(evaluation.correct), sum(evaluation.correct) + sum(evaluation.incorrect)
        installed = msgspec.structs.replace(installed, correct=right, total=total)
        report = kept.outbox.keep(
            "evaluation",
            encode(evaluation),
            task=install.task,
            about=installed.key.hex(),
            facts=(Heads(installed, previous),),
        )
        figures = f": {right} of {total} held-out images right" if total else ""
        canary = "; this device tries it first" if install.as_canary else ""
        log.info("head %d in use%s%s", reference.version, figures, canary)
        return report

    def _head_before(self, install: events.InstallHead) -> InstalledHead | None:
        """The head of the same task that was in use before this one; this one may be in use already."""
        heads, key = self._kept.get(Heads), head_key(install.head)
        candidates = (heads.installed, heads.previous)
        return next(
            (head for head in candidates if head and head.task == install.task and head.key != key), None
        )

    def _open_before(self, previous: InstalledHead | None, backbones: Sequence[Backbone]) -> Head | None:
        """The head before, to be compared with; a new one does not depend on whether this one still works."""
        try:
            return open_installed(self._kept.blobs, previous, backbones) if previous else None
        except ProtofleetError as error:
            log.warning("no comparison with the head before: %s", error)
            return None

    def _describe(self, install: events.InstallHead) -> InstalledHead:
        """What is to be remembered of a head, with what is bound to it."""
        manifest, reference = install.manifest, install.head
        local_model, size = b"", 0
        if reference.tensors is not None:
            size = feature_size(manifest, self._kept.blobs)
            local_model = self._previous_local_model(install) or self._rounds.local_model_digest(install.task)
            if not local_model:
                local_model = self._rounds.keep_initial_model(
                    manifest, reference.tensors, self._found_at_all(install)
                )
        return InstalledHead(
            head=reference.head.digest,
            version=reference.version,
            task=install.task,
            backbones=tuple(blob.digest for blob in manifest.backbones),
            classes=manifest.classes,
            round=reference.round,
            tensors=reference.tensors.digest if reference.tensors else b"",
            local_model=local_model,
            feature_size=size,
        )

    def _previous_local_model(self, install: events.InstallHead) -> bytes:
        """What the head before was bound to, where the device goes back to that one; empty if it is gone."""
        previous = self._kept.get(Heads).previous
        if previous is None or previous.key != head_key(install.head):
            return b""
        return previous.local_model if previous.local_model in self._kept.blobs else b""

    def _found_at_all(self, install: events.InstallHead) -> FoundImages:
        """The images of a device that takes a head without having taken part; they need not be there."""
        try:
            return self._find(install.manifest, lambda: install.task != self.focus)
        except ConfigError as error:
            log.warning("no image to fit the head to: %s", error)
            return FoundImages((), ())


def _report(prepared: PreparedSubmission, size_bytes: int) -> SubmissionReport:
    unusable = tuple((str(path), reason) for path, reason in prepared.refused)
    return SubmissionReport(prepared.classes, unusable, size_bytes)
