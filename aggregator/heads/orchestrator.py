"""From submissions to heads: what the round logic decides is stored, and the trainer does it."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aggregator.coordination import rounds
from aggregator.heads.quarantine import keep_asides
from aggregator.storage.facts import PendingHead, TrainingProgress
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.manifests import round_manifest
from aggregator.tasks.retention import forget_lost, needed_blobs
from aggregator.tasks.task import Task
from aggregator.training.jobs import CompileJob, HeadJob, Result, RoundJob
from aggregator.training.runner import Finished, Progress, Trainer
from protocol.errors import StateError
from protocol.storage.blobstore import WriteBatch, state_errors
from protocol.wire.messages import BlobRef, RoundManifest

log = logging.getLogger(__name__)

MAX_REPLACED_BYTES = 512 * 1024**2
"""Of submissions in the place of others, after which the others are deleted: a device can upload all day."""


class Learning:
    """The heads of a task, one after the other.

    Args:
        task: what to learn.
        store: where it goes on from.
        on_event: called from a thread with what a training says; it must only put it somewhere.

    Attributes:
        state: the round logic's.
    """

    def __init__(self, task: Task, store: Store, *, on_event: Callable[[Progress | Finished], None]) -> None:
        self._task = task
        self._store = store
        self._on_event = on_event
        self._settings = task.file.settings
        self._due: list[rounds.Train] = []
        self._version = store.data_version()
        self._writing = WriteBatch()
        self._replaced_bytes = 0
        self._trainer = Trainer(store.folder / "training", on_event=on_event)
        forget_lost(task, store)
        self.state = store.round_state(task.digest)
        self._head = self._newest()
        store.facts.delete(TrainingProgress)
        for train in rounds.resumed(self.state):
            log.info("going on with head %d, which was cut off", train.version)
            self._start(train)

    def stop(self) -> None:
        """End a running training; the next start goes on with it."""
        self._trainer.stop()
        self._store.facts.delete(TrainingProgress)

    @property
    def round(self) -> RoundManifest | None:
        """What the fleet is told of the open round; None if there are none."""
        learning, tensors = self._task.file.learning, self._tensors
        if learning is None or tensors is None:
            return None
        return round_manifest(self._task.digest, self.state.head_version, learning=learning, tensors=tensors)

    @property
    def _tensors(self) -> BlobRef | None:
        return self._head.tensors if self._head is not None else self._task.first_tensors

    def tick(self) -> None:
        """Let time pass, and begin what is due."""
        self._look_for_changes()
        self._advance(self._store.decisions(self._task.digest))
        self._advance(rounds.Ticked(time.time()))
        due, self._due = self._due, []
        for train in due:
            self._start(train)
        if self._replaced_bytes > MAX_REPLACED_BYTES:
            self._replaced_bytes = 0
            self._store.blobs.keep_only(needed_blobs(self._task, self._store))

    def take(self, row: SubmissionRecord, payload: bytes) -> rounds.SubmissionVerdict:
        """Take a checked submission; what stands is stored once `settle` and a commit of the store have returned.

        Raises:
            StateError: it cannot be stored.
        """

        def keep(answer: rounds.SubmissionVerdict) -> None:
            self._store.blobs.put_in_batch(payload, digest=row.entry.digest, batch=self._writing)
            if row.device in self.state.submissions:
                self._replaced_bytes += row.size_bytes
            self._store.submissions.put(
                self._task.digest, replace(row, entry=answer.counted_entry or row.entry)
            )
            self._tell_submission(row)

        self._look_for_changes()
        (answer,) = self._advance(rounds.SubmissionReceived(row.device, row.entry), keep=keep)
        return answer

    def _look_for_changes(self) -> None:
        """See whether somebody was enrolled anew: what came under that name before is not in its way."""
        if (version := self._store.data_version()) != self._version:
            self._version = version
            stored = self._store.submissions.all(self._task.digest)
            self.state = replace(self.state, submissions={each: row.entry for each, row in stored.items()})

    def settle(self) -> None:
        """Make durable what was taken.

        Raises:
            StateError: it cannot be stored.
        """
        self._writing.finish()

    def go_back(self) -> None:
        """Go back to what the store has: what was taken since could not be stored."""
        self._writing.discard()
        # Whether a training runs is not the store's to say: that one has failed could perhaps not be stored.
        running = None if self._due else self.state.training
        self._due.clear()
        stored = self._store.round_state(self._task.digest)
        self.state = replace(self.state, submissions=stored.submissions, training=running)

    def show_progress(self, figures: Mapping[str, Any]) -> None:
        """Keep what a training says of itself, for who looks."""
        self._store.facts.put(TrainingProgress(self.state.head_version + 1, figures))

    def finish(self, finished: Finished) -> bool:
        """Take the end of a training; returns whether there is a new head."""
        row, reason = None, finished.reason
        members = self.state.training
        if finished.result is not None and members is not None and not isinstance(finished.job, CompileJob):
            try:
                row = self._keep_head(finished.job, finished.result, members)
            except StateError as error:
                reason = str(error)
        if row is None:
            self._fail(reason)
        else:
            self._advance(rounds.Trained(row.version, frozenset(row.quarantined)))
            self._head = row
            self._tell(row)
        with contextlib.suppress(StateError):  # what is shown may be out of date; what is done is done
            self._store.facts.delete(TrainingProgress)
        return row is not None

    def retry(self) -> None:
        """Try again at the next tick what has failed."""
        self.state = replace(self.state, failed=None, retry_s=0.0)

    def _advance(
        self, event: rounds.Event, *, keep: Callable[[rounds.SubmissionVerdict], None] | None = None
    ) -> list[rounds.SubmissionVerdict]:
        """Let the round logic take an event; `keep` is called with what is new before it counts."""
        state, actions = rounds.step(self.state, event, settings=self._settings)
        answers = [action for action in actions if isinstance(action, rounds.SubmissionVerdict)]
        for answer in answers:
            if answer.verdict == "new" and keep is not None:
                keep(answer)
        self.state = state
        self._due += [action for action in actions if isinstance(action, rounds.Train)]
        return answers

    def _start(self, train: rounds.Train) -> None:
        job = self._job(train)
        try:
            self._store.facts.put(PendingHead(self._task.digest, train.version, dict(train.members)))
            self._trainer.start(job)
        except StateError as error:
            self._on_event(Finished(job, None, str(error)))

    def _job(self, train: rounds.Train) -> HeadJob | RoundJob:
        members = {device: entry.digest.hex() for device, entry in train.members}
        folder = self._store.folder / "training"
        if self._tensors is not None:
            return RoundJob(
                version=train.version,
                task=self._task.digest.hex(),
                task_file=self._task.file,
                members=members,
                tensors=self._tensors.digest.hex(),
                blobs=str(self._store.blobs.folder),
                feature_size=self._task.feature_size,
                folder=str(folder / f"round-{train.version - 1}"),
            )
        log.info("training head %d on the prototypes of %d devices", train.version, len(members))
        return HeadJob(
            version=train.version,
            task=self._task.digest.hex(),
            members=members,
            readmitted=tuple(sorted(self.state.decisions.released)),
            robust=self._task.file.robust,
            blobs=str(self._store.blobs.folder),
            feature_size=self._task.feature_size,
            training=self._task.file.training,
            folder=str(folder / f"head-{train.version}"),
        )

    def _fail(self, reason: str) -> None:
        version, settings = self.state.head_version + 1, self._settings
        if settings.rounds is None:
            log.error(
                "training head %d failed: %s; it will be tried again when a submission changes, or at the next start",
                *(version, reason),
            )
        else:
            log.error(
                "round %d failed: %s; it will be tried again in %.0f s, when a submission comes, or at the next start",
                *(version - 1, reason, settings.deadline_s),
            )
        with contextlib.suppress(StateError):  # the next start would go on with it
            self._store.facts.delete(PendingHead)
        self._advance(rounds.TrainingFailed(time.time()))

    def _tell_submission(self, row: SubmissionRecord) -> None:
        settings, where = self._settings, ""
        if settings.rounds is not None:
            where = f" for round {row.entry.round}"
        elif not self.state.head_version:
            devices = len(self.state.submissions.keys() | {row.device})
            where = f"; {devices} of {settings.quorum} devices for the first head"
        log.info(
            "%s: %d prototypes of %d images, %d bytes%s",
            *(row.device, row.prototypes, row.images, row.size_bytes, where),
        )

    def _keep_head(
        self, job: HeadJob | RoundJob, result: Result, members: Mapping[str, rounds.Entry]
    ) -> HeadRecord:
        folder = Path(job.folder)
        digests = {device: entry.digest.hex() for device, entry in members.items()}
        program = self._task.manifest.program
        file = _read(folder / "head.onnx")
        if program is None:
            head, tensors = self._keep_blob(file, "head.onnx"), None
        else:
            payload = _read(folder / "tensors.bin")
            head, tensors = program.head, self._keep_blob(payload, f"tensors-{job.version}")
        row = HeadRecord(
            version=job.version,
            task=self._task.digest,
            digest=head.digest,
            size_bytes=head.size_bytes,
            trained_s=time.time(),
            prototypes=result.prototypes,
            members={device: digest for device, digest in digests.items() if device not in result.aside},
            metrics=result.metrics,
            tensors=tensors,
            file=self._store.blobs.put(file),
            quarantined={device: digest for device, digest in digests.items() if device in result.aside},
        )
        with self._store.transaction():
            self._store.heads.add(row)
            keep_asides(self._store, row, result)
        return row

    def _keep_blob(self, data: bytes, name: str) -> BlobRef:
        return BlobRef(digest=self._store.blobs.put(data), size_bytes=len(data), name=name)

    def _tell(self, row: HeadRecord) -> None:
        metrics = row.metrics
        if row.tensors is None:
            log.info(
                "head %d: %d prototypes of %d devices, %.1f s of training, at most %.1e from torch",
                *(row.version, row.prototypes, len(row.members)),
                *(metrics["seconds"], metrics["onnx_max_abs_diff"]),
            )
            return
        log.info(
            "round %d of %d: %d devices (%d from earlier rounds), %d classes, %.1f s; made head %d",
            *(row.version - 1, self._settings.rounds, len(row.members), metrics["carried"]),
            *(metrics["classes"], metrics["seconds"], row.version),
        )
        if rounds.is_over(self.state, self._settings):
            log.info("all %d rounds are over; head %d is the last", self._settings.rounds, row.version)

    def _newest(self) -> HeadRecord | None:
        heads = self._store.heads.all(self._task.digest)
        return heads[-1] if heads else None


def _read(file: Path) -> bytes:
    with state_errors(file):
        return file.read_bytes()
