"""Builds a device's submission for a task or a round, and puts it into the outbox."""

import contextlib
import logging
import time
from functools import partial

from edge_client.agent.events import BuildSubmission
from edge_client.agent.state import UploadItem
from edge_client.data.images import NoImages
from edge_client.privacy.policy import check_task, is_private
from edge_client.storage.job_folder import Built, Line, Shown
from edge_client.storage.stored_values import SubmissionSequence, TaskSubmissions
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
from protocol.wire.codec import digest_of
from protocol.wire.messages import TaskManifest

log = logging.getLogger(__name__)

MAX_TASKS = 16
"""Tasks without rounds of which the newest submission's number and digest are stored."""

_MAY_PASS = (BackboneMismatch, Diverged, GraphRefused, NoImages, NoPrototype, PrivacyRefused)
"""Errors that the next round or task, or more images, can correct."""


class SubmissionBuilder:
    """Builds submissions; a dry run shows what would be sent, and stores nothing."""

    def __init__(self, workspace: Workspace, rounds: RoundTraining) -> None:
        self._workspace = workspace
        self._store = workspace.store
        self._rounds = rounds
        self.shown: Shown | None = None
        """The upload that a dry run shows."""
        self.line: Line | None = None
        """The line to log once the submission is stored."""

    def build(self, build: BuildSubmission) -> Built:
        """Build a submission; the result has the item in the outbox, or the reason why there is none.

        Raises:
            StateError: the disk fails.
        """
        workspace, settings = self._workspace, self._workspace.settings
        workspace.is_incomplete = workspace.awaits_block = False
        try:
            check_task(
                build.manifest, max_epsilon=settings.max_epsilon, second_operator=settings.second_operator
            )
            item = self._only_submission(build)
            if build.round is not None:
                item = self._rounds.existing_submission(build.task, build.round, above=build.above)
            if item is not None:
                return Built(item=item)
            if workspace.culprits.suspects and not is_private(
                build.manifest
            ):  # decoded after the charge there
                # Outside `run_task`: the task is not to blame for an image.
                workspace.decode_suspects(workspace.find_images(build.manifest))
            with workspace.run_task(build.manifest):
                return self._build(build)
        except StateError:
            raise
        except ProtofleetError as error:
            return Built(
                item=None,
                reason=plain(str(error)),
                may_pass=isinstance(error, _MAY_PASS),
                retries=isinstance(error, PrivacyFailed)
                or (isinstance(error, NoPrototype) and workspace.is_incomplete),
                no_images=isinstance(error, NoImages),
            )

    def _build(self, build: BuildSubmission) -> Built:
        try:
            prepared = self._prepare(build)
        except NoPrototype:
            if (last := self._submission_with_block(build)) is None:
                raise
            return Built(item=last, awaits_block=True, retries=self._workspace.is_incomplete)
        retries = self._workspace.is_incomplete
        if (last := self._submission_with_block(build)) is not None:
            report = prepared.report(last.size_bytes)
            return Built(item=last, report=report, awaits_block=True, retries=retries)
        item = self._put(build, prepared)
        return Built(item=item, report=prepared.report(item.size_bytes), retries=retries)

    def _submission_with_block(self, build: BuildSubmission) -> UploadItem | None:
        """Return the last submission to the same task, which counts while a block awaits an image."""
        last = self._store.outbox.newest_submission()
        is_kept = self._workspace.awaits_block and build.round is None and not build.above
        if not is_kept or self._workspace.dry_run or last is None or last.task != build.task:
            return None
        return last

    def _only_submission(self, build: BuildSubmission) -> UploadItem | None:
        """Return the submission to a task with a second operator, who opens one of each device."""
        if build.manifest.second_operator is None or build.above or self._workspace.dry_run:
            return None
        last = self._store.outbox.newest_submission()
        if last is None or last.task != build.task:
            return None
        with contextlib.suppress(ConfigError):
            images = self._workspace.find_images(build.manifest)
            self._workspace.forget_deleted(build.manifest, images)
        return last

    def _prepare(self, build: BuildSubmission) -> PreparedSubmission:
        task, manifest = build.task, build.manifest
        if is_private(manifest):
            return prepare_private(self._workspace, task, manifest)
        found = self._workspace.extract(manifest)
        if build.round is not None:
            with contextlib.closing(
                self._workspace.progress(f"training, round {build.round.number}")
            ) as progress:
                return self._rounds.train(
                    task,
                    manifest,
                    build.round,
                    found=found,
                    on_progress=progress.update,
                )
        if manifest.statistics is not None:
            return prepare_statistics(self._workspace, manifest, manifest.statistics, found)
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
        if self._workspace.dry_run:
            payload = encoded(sequence=int(time.time()))  # all of today take the same number of bytes
            self.shown = prepared.shown(len(payload))
            return UploadItem(digest_of(payload), len(payload), "submission", build.task)
        valid_for = {build.task, *(build.manifest.continues or ())}
        if last is not None and last.task in valid_for and last.about == about and not build.above:
            return outbox.assign(last, build.task)
        # After a return to an earlier task an equal submission has the same number and digest: it makes no other head.
        newest = dict(self._store.get(TaskSubmissions).newest)
        sequence, digest = newest.pop(build.task.hex(), (0, ""))
        if sequence <= build.above or digest_of(payload := encoded(sequence=sequence)).hex() != digest:
            sequence = self._store.next_number(SubmissionSequence, above=build.above)
            payload = encoded(sequence=sequence)
        if build.round is not None:
            item = self._rounds.store(build.task, build.round, prepared, payload)
        else:
            kept = {
                **dict([*newest.items()][1 - MAX_TASKS :]),
                build.task.hex(): (sequence, digest_of(payload).hex()),
            }
            item = outbox.keep(
                "submission",
                payload,
                task=build.task,
                about=about,
                facts=(TaskSubmissions(kept),),
                deletes_keys=prepared.privacy is not None,
            )
        cost, block = prepared.privacy, prepared.block
        self.line = Line(
            log.name,
            logging.INFO,
            "submission built",
            {
                "task": build.task.hex()[:12],
                "round": None if build.round is None else build.round.number,
                prepared.form.replace(" ", "_") + "s": len(prepared.counts),
                "block_images": None if block is None else block.images,
                "directions": None if block is None else len(block.rows),
                "images": sum(entry.images for entry in prepared.classes),
                "loss": prepared.loss,
                "epsilon": None if cost is None else cost.epsilon,
                "total_epsilon": None if cost is None else cost.total_epsilon,
                "bytes": len(payload),
            },
        )
        return item

    def _sealer(self, manifest: TaskManifest) -> Sealer | None:
        if manifest.second_operator is None:
            return None
        settings = self._workspace.settings
        return Sealer(settings.device_id, self._workspace.sealing_key, settings.min_devices or 2)
