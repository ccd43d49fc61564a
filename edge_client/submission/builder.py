"""Builds a device's submission for a task or a round, and puts it into the outbox."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from edge_client.agent.events import BuildSubmission, SubmissionBuilt
from edge_client.agent.state import UploadItem
from edge_client.data.extraction import decode_suspects
from edge_client.data.images import NoImages, is_folder, name_some
from edge_client.privacy.policy import check_task, is_private
from edge_client.progress_bar import Progress
from edge_client.storage.stored_values import (
    ClassReport,
    SubmissionReport,
    SubmissionSequence,
    TaskSubmissions,
)
from edge_client.submission.image_features import Workspace
from edge_client.submission.prepared_submission import (
    NoPrototype,
    PreparedSubmission,
    Sealer,
    encode_submission,
    prepare_prototypes,
)
from edge_client.submission.private_submission import prepare_private
from edge_client.submission.round_submission import RoundTraining
from edge_client.submission.statistics_submission import prepare_statistics
from edge_client.training.trainer import Diverged
from protocol.cli import plain
from protocol.errors import (
    BackboneMismatch,
    ConfigError,
    GraphRefused,
    PrivacyFailed,
    PrivacyRefused,
    ProtofleetError,
    StateError,
)
from protocol.log import event
from protocol.wire.codec import digest_of
from protocol.wire.messages import TaskManifest

log = logging.getLogger(__name__)

LOST_IMAGES = "class has lost images: restore them, or restart edge-client if they were removed on purpose"

AWAITS_BLOCK = (
    "images of a block are missing, and the last submission counts for a day, without new images: restore them, "
    "unless they were deleted on purpose"
)

MAX_TASKS = 16
"""Tasks without rounds of which the newest submission's number and digest are stored."""

ShowDryRun = Callable[[PreparedSubmission, int], None]
"""Takes a prepared submission and its size in bytes."""

_MAY_PASS = (BackboneMismatch, Diverged, GraphRefused, NoImages, NoPrototype, PrivacyRefused)
"""Errors that the next round or task, or more images, can correct."""


class SubmissionBuilder:
    """Builds submissions; in a dry run `show` takes what would be sent, and nothing is stored."""

    def __init__(self, workspace: Workspace, rounds: RoundTraining, show: ShowDryRun | None) -> None:
        self._workspace = workspace
        self._store = workspace.store
        self._rounds = rounds
        self._show = show
        self._warned: set[tuple[str, str]] = set()
        self._images: tuple[bytes, dict[str, int]] = b"", {}
        """The task, and the images that each class had before it lost most of them."""

    def build(self, build: BuildSubmission, should_stop: Callable[[], bool]) -> SubmissionBuilt:
        """Build a submission; the result has the item in the outbox, or the reason why there is none.

        Raises:
            Interrupted: `should_stop` returned True.
            StateError: the disk fails.
        """
        number = None if build.round is None else build.round.number
        self._workspace.is_incomplete = self._workspace.awaits_block = False
        try:
            settings = self._workspace.settings
            check_task(
                build.manifest, max_epsilon=settings.max_epsilon, second_operator=settings.second_operator
            )
            item = self._only_submission(build)
            if build.round is not None:
                item = self._rounds.existing_submission(build.task, build.round, above=build.above)
            if item is None:
                # Outside `run_task`: the task is not to blame for an image.
                find_images = partial(self._workspace.find_images, build.manifest)
                decode_suspects(find_images, self._workspace.cache, should_stop)
                with self._workspace.run_task(build.manifest):
                    item = self._build(build, should_stop)
        except StateError:
            raise
        except ProtofleetError as error:
            if isinstance(error, NoImages):
                self._lost_images(build.task, ())
            return SubmissionBuilt(
                build.task,
                None,
                number,
                plain(str(error)),
                may_pass=isinstance(error, _MAY_PASS),
                retries=isinstance(error, PrivacyFailed)
                or (isinstance(error, NoPrototype) and self._workspace.is_incomplete),
                no_images=isinstance(error, NoImages),
            )
        return SubmissionBuilt(build.task, item, number, retries=self._workspace.is_incomplete)

    def _build(self, build: BuildSubmission, should_stop: Callable[[], bool]) -> UploadItem:
        try:
            prepared = self._prepare(build, should_stop)
        except NoPrototype:
            if (last := self._submission_with_block(build)) is None:
                raise
            return last
        prepared = replace(prepared, lost_images=self._lost_images(build.task, prepared.classes))
        last = self._submission_with_block(build)
        self._warn(build.manifest, prepared, is_uploaded=last is None)
        return last or self._put(build, prepared)

    def _submission_with_block(self, build: BuildSubmission) -> UploadItem | None:
        """Return the last submission to the same task, which counts while a block awaits an image."""
        last = self._store.outbox.newest_submission()
        is_kept = self._workspace.awaits_block and build.round is None and not build.above
        if not is_kept or self._show is not None or last is None or last.task != build.task:
            return None
        report = self._store.get(SubmissionReport)
        if report.lost_images != AWAITS_BLOCK:
            log.warning("%s", AWAITS_BLOCK)
            self._store.set(msgspec.structs.replace(report, lost_images=AWAITS_BLOCK))
        return last

    def _only_submission(self, build: BuildSubmission) -> UploadItem | None:
        """Return the submission to a task with a second operator, who opens one of each device."""
        if build.manifest.second_operator is None or build.above or self._show is not None:
            return None
        last = self._store.outbox.newest_submission()
        if last is None or last.task != build.task:
            return None
        with contextlib.suppress(ConfigError):
            images = self._workspace.find_images(build.manifest)
            self._workspace.forget_deleted(build.manifest, images)
        return last

    def _prepare(self, build: BuildSubmission, should_stop: Callable[[], bool]) -> PreparedSubmission:
        task, manifest = build.task, build.manifest
        if is_private(manifest):
            return prepare_private(self._workspace, task, manifest, should_stop)
        found = self._workspace.extract(manifest, should_stop)
        if build.round is not None:
            with contextlib.closing(Progress(f"training, round {build.round.number}")) as progress:
                return self._rounds.train(
                    task,
                    manifest,
                    build.round,
                    found=found,
                    on_progress=progress.update,
                    should_stop=should_stop,
                )
        if manifest.statistics is not None:
            return prepare_statistics(self._workspace, manifest, manifest.statistics, found, should_stop)
        return prepare_prototypes(self._workspace, manifest, found)

    def _put(self, build: BuildSubmission, prepared: PreparedSubmission) -> UploadItem:
        """Put a submission into the outbox, or show it; an equal one that is there already stays."""
        outbox, last = self._store.outbox, self._store.outbox.newest_submission()
        about = prepared.fingerprint if build.round is None else str(build.round.number)
        encoded = partial(
            encode_submission,
            prepared,
            task=build.task,
            manifest=build.manifest,
            round_number=0 if build.round is None else build.round.number,
            sealer=self._sealer(build.manifest),
        )
        if self._show is not None:
            payload = encoded(sequence=int(time.time()))  # all of today take the same number of bytes
            self._show(prepared, len(payload))
            return UploadItem(digest_of(payload), len(payload), "submission", build.task)
        valid_for = {build.task, *(build.manifest.continues or ())}
        if last is not None and last.task in valid_for and last.about == about and not build.above:
            self._store.set(prepared.report(last.size_bytes))
            return outbox.assign(last, build.task)
        # After a return to an earlier task an equal submission has the same number and digest: it makes no other head.
        newest = dict(self._store.get(TaskSubmissions).newest)
        sequence, digest = newest.pop(build.task.hex(), (0, ""))
        if sequence <= build.above or digest_of(payload := encoded(sequence=sequence)).hex() != digest:
            sequence = self._store.next_number(SubmissionSequence, above=build.above)
            payload = encoded(sequence=sequence)
        cost = prepared.privacy
        if build.round is not None:
            item = self._rounds.store(build.task, build.round, prepared, payload)
        else:
            kept = {
                **dict([*newest.items()][1 - MAX_TASKS :]),
                build.task.hex(): (sequence, digest_of(payload).hex()),
            }
            facts = (prepared.report(len(payload)), TaskSubmissions(kept))
            item = outbox.keep(
                "submission",
                payload,
                task=build.task,
                about=about,
                facts=facts,
                delete_secrets=None if cost is None else self._store.ledger.delete_keys,
            )
        event(
            log,
            logging.INFO,
            "submission built",
            task=build.task.hex()[:12],
            round=None if build.round is None else build.round.number,
            **{prepared.form.replace(" ", "_") + "s": len(prepared.counts)},
            block_images=prepared.block and prepared.block.images,
            directions=prepared.block and len(prepared.block.rows),
            images=sum(entry.images for entry in prepared.classes),
            loss=prepared.loss,
            epsilon=cost and cost.epsilon,
            total_epsilon=cost and cost.total_epsilon,
            bytes=len(payload),
        )
        return item

    def _sealer(self, manifest: TaskManifest) -> Sealer | None:
        if manifest.second_operator is None:
            return None
        settings, is_shown = self._workspace.settings, self._show is not None
        key = self._store.signing_key(settings.identity.signing_key, keep=not is_shown)
        return Sealer(settings.device_id, key or os.urandom(32), settings.min_devices or 2)

    def _lost_images(self, task: bytes, classes: Sequence[ClassReport]) -> str:
        """Log and return which classes have lost their prototypes, or most of their images.

        They are compared with the last submission to the same task, or with that before they were lost.
        """
        last, (known, images) = self._store.outbox.newest_submission(), self._images
        before = dict(images) if known == task else {}
        if last is not None and last.task == task:
            for entry in self._store.get(SubmissionReport).classes:
                if entry.counts or entry.in_blocks or entry.unused:
                    before.setdefault(entry.name, entry.images)
        now = {entry.name: entry.images for entry in classes}
        used = {entry.name for entry in classes if entry.counts or entry.in_blocks or entry.unused}
        lost = {
            name: most for name, most in before.items() if name not in used or 2 * now.get(name, 0) < most
        }
        for name, most in lost.items():
            if images.get(name) != most:
                event(log, logging.WARNING, LOST_IMAGES, name=name, images=now.get(name, 0), before=most)
        self._images = task, lost
        texts = [f"{name} has {now.get(name, 0)} of {most} images" for name, most in lost.items()]
        return f"{LOST_IMAGES}: {name_some(texts)}" if texts else ""

    def _warn(self, manifest: TaskManifest, prepared: PreparedSubmission, *, is_uploaded: bool) -> None:
        """Log each omission once, with its reason; of a submission that is not uploaded, only unusable images."""
        data, used = self._workspace.settings.data, {entry.name for entry in prepared.classes}
        before, self._warned = self._warned, set()

        def warn(message: str, **fields: object) -> None:
            self._warned.add((message, str(fields)))
            if (message, str(fields)) not in before:
                event(log, logging.WARNING, message, **fields)

        for path, reason in prepared.unusable:
            warn("image omitted", path=path, reason=reason)
        for entry in prepared.classes if is_uploaded else ():
            _warn_of_class(entry, warn)
        for name in manifest.classes:
            if name not in used and is_folder(data / name):
                warn("no usable image", folder=data / name)


def _warn_of_class(entry: ClassReport, warn: Callable[..., None]) -> None:
    missing = entry.missing or None
    if entry.unused:
        text = "images left out, their block does not suit the task, or awaits an image"
        warn(text, name=entry.name, images=entry.unused, missing=missing)
    elif entry.left_out:
        warn("class omitted, too few images", name=entry.name, images=entry.images)
    if entry.waiting:
        # A group of fewer images would reveal single ones.
        text = "images held back, too few for a prototype"
        if missing:
            text = "images held back, others of the same prototype are missing: restore them"
        warn(text, name=entry.name, waiting=entry.waiting, more_needed=entry.more_needed, missing=missing)
