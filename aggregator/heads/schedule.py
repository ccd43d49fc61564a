"""The way from submissions to heads: stores what the round logic decides, and runs the training jobs."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from aggregator.coordination import round_state, rounds
from aggregator.heads.calibration import Calibration, store_calibrated
from aggregator.heads.head_rate import HeadRate
from aggregator.heads.next_head import (
    delete_members,
    job_of,
    log_head,
    put_failure,
    put_started,
    put_stopped,
    store_head,
)
from aggregator.heads.sum_lists import SecondOperatorLists
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.stored_values import NextHead, TrainingProgress
from aggregator.storage.sum_lists import devices_of
from aggregator.tasks.manifests import round_manifest
from aggregator.tasks.restoration import LostSubmissions, Restoration
from aggregator.tasks.retention import delete_carried_submissions, delete_unneeded_blobs
from aggregator.tasks.task_preparation import Task
from aggregator.training.job_processes import Finished, Progress, Trainer
from aggregator.training.jobs import UNUSABLE, BlobJob, Job, Result
from protocol.errors import StateError
from protocol.log import event
from protocol.wire.messages import BlobRef, RoundManifest

log = logging.getLogger(__name__)

PAUSE_S = 0.01
"""Seconds between two decisions about submissions, for each 1,000 of them: each looks at all."""

RETENTION_S = 60.0
"""Seconds from one deletion of what nothing needs to the next: a device can upload all day."""

RETENTION_REST = 100.0
"""Times as long as a deletion took, if that is more: at most 1 % of the time. 100,000 blobs take 3 s."""


class Schedule:
    """Makes the heads of a task from its submissions; `state` is the state of the round logic.

    `on_event` is called from a thread with the progress and the end of a training; it must only enqueue it.
    """

    def __init__(
        self,
        task: Task,
        store: Store,
        *,
        on_event: Callable[[Progress | Finished], None],
    ) -> None:
        self._task = task
        self._store = store
        self._on_event = on_event
        self._settings = task.file.settings
        self._due: list[rounds.Train] = []
        self._job: BlobJob | None = None
        self._change = store.newest_change()
        self._next_s = 0.0
        """When submissions are read again, by `time.monotonic`."""
        self._logged = 0
        """The devices of the open collection that the log names."""
        self._retention_s = 0.0
        """When blobs are deleted next, in elapsed seconds."""
        self._rate = HeadRate(task, store)
        self._calibration = Calibration(task, store)
        self.restoration = Restoration(task, store)
        operator = task.manifest.second_operator
        self.sum_lists = None if operator is None else SecondOperatorLists(task, store, operator)
        """The lists of a task with a second operator."""
        self._trainer = Trainer(
            store.folder / "training",
            blobs=store.blobs.location,
            timeout_s=task.file.training.timeout_s,
            on_event=on_event,
            engine=task.file.training.engine,
        )
        delete_carried_submissions(task, store)
        self.lost = LostSubmissions(task, store)
        self.lost.remove(round_state.counting(store.round_state(task.digest), self._settings))
        self.state = replace(store.round_state(task.digest), is_rate_limited=not self._rate.may_train())
        self._head = next(reversed(store.heads.all(task.digest)), None)
        self._resume()

    def _resume(self) -> None:
        """Start the training that has failed or was interrupted; one that ended with the aggregator has failed."""
        for train in rounds.resumed(self.state):
            if self._next.is_running:
                self.state = replace(self.state, failures=self.state.failures + 1)
                reason = "the aggregator was killed during the training"
                put_failure(self._store, self._task.digest, self.state, dict(train.members), reason)
            event(log, logging.INFO, "interrupted training resumed", version=train.version)
            self._start(train)

    def stop(self) -> None:
        """Stop a running training; the next start resumes it."""
        self._trainer.stop()
        with contextlib.suppress(StateError):  # on a full disk the next start counts the training as failed
            put_stopped(self._store)

    @property
    def round(self) -> RoundManifest | None:
        """The manifest of the open round; None without rounds."""
        learning, tensors = self._task.file.learning, self._tensors
        if learning is None or tensors is None:
            return None
        return round_manifest(self._task.digest, self.state.head_version, learning=learning, tensors=tensors)

    @property
    def _next(self) -> NextHead:
        return self._store.next_head(self._task.digest, self.state.head_version + 1)

    @property
    def _tensors(self) -> BlobRef | None:
        return self._head.tensors if self._head is not None else self._task.first_tensors

    def tick(self) -> None:
        if time.monotonic() < self._next_s:
            return
        self._read_changes()
        self._next_s = time.monotonic() + len(self.state.submissions) // 1000 * PAUSE_S
        if self.state.is_rate_limited:
            self.state = replace(self.state, is_rate_limited=not self._rate.may_train())
        self._step(self._store.decisions(self._task.digest))
        self._step(rounds.Ticked(self._store.clock.now_s()))
        self._log_collection()
        due, self._due = self._due, []
        for train in due:
            self._start(train)
        self._calibrate()
        self._delete_unneeded_blobs()

    def _delete_unneeded_blobs(self) -> None:
        started_s = self._store.clock.now_s()
        if started_s < self._retention_s:
            return
        self._retention_s = started_s + RETENTION_S  # also if it fails
        delete_unneeded_blobs(self._task, self._store)
        took_s = self._store.clock.now_s() - started_s
        self._retention_s = max(self._retention_s, started_s + RETENTION_REST * took_s)

    def reload(self) -> None:
        """Return to the stored state after a failed write; raises StateError if it cannot be read."""
        self._change = self._store.newest_change()
        stored = self._store.round_state(self._task.digest)
        # The store may still name a training that has failed since.
        running = None if self._due else self.state.training
        self._due.clear()
        self.state = replace(self.state, submissions=stored.submissions, training=running)

    def store_progress(self, figures: Mapping[str, Any]) -> None:
        known = {name: figures[name] for name in ("epoch", "epochs", "loss") if name in figures}
        following = self._next
        self._store.facts.put(
            structs.replace(following, progress=TrainingProgress(following.version, **known))
        )

    def finish(self, finished: Finished) -> bool:
        """Apply the end of a training or a calibration; return True if there is a new head."""
        job, head, reason = self._job, None, finished.reason
        if job is None or self._is_stopped(finished.job):
            return False
        if finished.result is not None:
            try:
                head = self._store_result(job, finished.result)
            except StateError as error:
                reason = str(error)
                if self._is_stopped(finished.job):
                    return False
        if head is None and self._adopt_stored():
            return True
        if head is not None:
            self._step(rounds.Trained(head.version, frozenset(head.quarantined)))
            self._use(head)
        elif self._gives_up(job, reason):
            pass
        elif finished.result is not None:
            self._fail(reason)
        elif not self._close_without_lost(self.state.training or {}):
            with contextlib.suppress(StateError):  # the next attempt fails, and then this is repeated
                self.restoration.restore(job.required_blobs(self._task.manifest))
            self._fail(reason)
        return head is not None

    def _gives_up(self, job: BlobJob, reason: str) -> bool:
        """Return True for a failure that is not repeated: of a calibration, or of a list that cannot be used."""
        if job.is_calibration:
            self._leave_uncalibrated(job, reason)
            return True
        if self.sum_lists is None or UNUSABLE not in reason:
            return False
        self.sum_lists.abandon(reason)
        self._step(rounds.Trained(self.state.head_version))
        return True

    def _store_result(self, job: BlobJob, result: Result) -> HeadRecord | None:
        if job.is_calibration:
            return store_calibrated(self._task, self._store, job, result)
        members = self.state.training
        if members is None:
            return None
        return store_head(self._task, self._store, job, result, members)

    def _use(self, head: HeadRecord) -> None:
        self._head = head
        counts_images = self._task.manifest.accepts_blocks
        log_head(head, self.state, self._settings, counts_images=counts_images)

    def _adopt_stored(self) -> bool:
        """Return True if the next head is stored already, by a transaction that failed only to report its commit."""
        with contextlib.suppress(StateError):
            head = self._stored_head()
            if head is not None:
                state = self._store.round_state(self._task.digest)
                self.state = replace(state, is_rate_limited=self.state.is_rate_limited)
                self._due.clear()
                self._use(head)
                return True
        return False

    def _stored_head(self) -> HeadRecord | None:
        head = next(reversed(self._store.heads.all(self._task.digest)), None)
        return head if head is not None and head.version > self.state.head_version else None

    def _close_without_lost(self, members: Mapping[str, round_state.Entry]) -> bool:
        """Repeat the training without the submissions that are lost; return False if none is."""
        lost: dict[str, bytes] = {}
        with contextlib.suppress(StateError):  # the training is repeated, and then this
            lost = self.lost.remove(members)
            if lost:
                self._step(rounds.SubmissionsLost(lost, self._store.clock.now_s()))
                delete_members(self._store, members)
        return bool(lost)

    def retry(self) -> None:
        self.state = replace(self.state, failed=None, retry_s=0.0)

    def _read_changes(self) -> None:
        """Apply what has changed in the store: submissions were stored, or a command has deleted some.

        A training on deleted ones stops; the collection closes again without them.
        """
        if self._store.newest_change() == self._change:
            return
        changes = self._store.submission_changes(self._task.digest, since=self._change)
        before = self.state.submissions
        entries = {
            device: record.entry
            for device, record in changes.records.items()
            if record.entry != before.get(device)
        }
        deleted = {device for device in changes.deleted if device in before}
        if entries or deleted:
            left = {device: entry for device, entry in before.items() if device not in deleted}
            self._step(rounds.SubmissionsChanged(left | entries))
        self._change = changes.newest
        if deleted:
            self._leave_deleted(deleted)

    def _log_collection(self) -> None:
        collection = self.state.collection
        if collection is not None and collection.count != self._logged:
            self._logged = collection.count
            wanted = round_state.wanted_devices(self.state, self._settings)
            event(log, logging.INFO, "submissions waiting", devices=collection.count, wanted=wanted)

    def _leave_deleted(self, deleted: set[str]) -> None:
        for device in sorted(deleted):
            event(log, logging.INFO, "submission deleted by an operator", device=device)
        if not deleted.isdisjoint(self.state.training or ()):
            self._trainer.stop()
            self._job = None
            self._due.clear()
            self.state = replace(self.state, training=None)
        delete_members(self._store, deleted)

    def _is_stopped(self, job: Job) -> bool:
        """Return True if a job was stopped, because a submission that it is made of was deleted."""
        with contextlib.suppress(StateError):  # then nothing else can be stored either
            self._read_changes()
        return job != self._job

    def _step(self, happened: rounds.Event) -> None:
        self.state, trainings = rounds.step(self.state, happened, settings=self._settings)
        self._due += trainings

    def _start(self, train: rounds.Train) -> None:
        if self.sum_lists is not None:
            if not self._has_sums(self.sum_lists, dict(train.members)):
                return
            # A device that is in no list yet belongs to a later one.
            listed = devices_of(self.sum_lists.stored)
            members = tuple(each for each in train.members if each[0] in listed)
            train, self.state = replace(train, members=members), replace(self.state, training=dict(members))
        job = job_of(train, self._task, self._store, self.state, tensors=self._tensors)
        with self._failing(job):
            if self._stored_head() is not None:
                raise StateError(f"head {train.version} is stored already")  # `finish` adopts it
            self.state = replace(self.state, is_rate_limited=not self._rate.count())
            put_started(self._store, self._next, dict(train.members))
            self._run(job)

    def _has_sums(self, lists: SecondOperatorLists, members: dict[str, round_state.Entry]) -> bool:
        """Return True if the second operator has opened what the next head is made of.

        While it has not, the training waits. With too few new devices there is none.
        """
        try:
            if lists.is_open(members):
                return True
        except StateError as error:
            self._fail(str(error))
            return False
        if lists.stored.pending is None:
            self._step(rounds.Trained(self.state.head_version))
        return False

    def take_sum(self, payload: bytes) -> None:
        """Take a frame of the second operator's reply, and go on with the training that waits for it.

        A refused list has failed: it is requested again later, or at once without a device that was revoked.
        """
        if self.sum_lists is None or not self.sum_lists.take(payload) or self.state.training is None:
            return
        pending = self.sum_lists.stored.pending
        if pending is not None and pending.problem:
            self._fail(f"the second operator opens no sum: {pending.problem}")
            return
        members = tuple(sorted(self.state.training.items()))
        self._start(rounds.Train(self.state.head_version + 1, members))

    def _calibrate(self) -> None:
        """Start to make the calibrated version of the newest head if it is due, and no training is running or failed.

        It is no training of `limits.heads_per_hour`, and is not resumed: after a restart, it is due again.
        """
        if self.state.training is not None or self.state.failures:
            return
        if (job := self._calibration.job(self._head, self.state.decisions)) is not None:
            self.state = replace(self.state, training=self.state.covered)
            with self._failing(job):
                self._run(job)

    @contextlib.contextmanager
    def _failing(self, job: BlobJob) -> Iterator[None]:
        """Make a job the one whose end counts; an error of the body ends it."""
        self._job = job
        try:
            yield
        except StateError as error:
            self._on_event(Finished(job, None, str(error)))

    def _run(self, job: BlobJob) -> None:
        self.restoration.verify(job.required_blobs(self._task.manifest), at_once=True)
        self._trainer.start(job)

    def _leave_uncalibrated(self, job: BlobJob, reason: str) -> None:
        self._calibration.postpone()
        self.state = replace(self.state, training=None)
        text = "head not calibrated: it stays in use as it is"
        event(log, logging.WARNING, text, version=job.version - 1, reason=reason)

    def _fail(self, reason: str) -> None:
        members, now_s = self.state.training, self._store.clock.now_s()
        self._step(rounds.TrainingFailed(now_s))
        version, is_round = self.state.head_version + 1, self._settings.rounds is not None
        event(
            *(log, logging.ERROR, "closing a round failed" if is_round else "head training failed"),
            version=None if is_round else version,
            round=version - 1 if is_round else None,
            failures=self.state.failures,
            reason=reason,
            retry=f"in {self.state.retry_s - now_s:.0f} s, with other submissions or at the next start",
        )
        with contextlib.suppress(StateError):  # the next start repeats it all the same
            put_failure(self._store, self._task.digest, self.state, members or {}, reason)
