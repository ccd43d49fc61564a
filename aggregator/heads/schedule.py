"""The way from submissions to heads: a head is planned as a row, a job makes its files, and the row becomes made.

Between two ticks only the running job is kept in memory, and what was read at the last change.
"""

import contextlib
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from aggregator.coordination.collection import Collection as OpenCollection
from aggregator.coordination.collection import Plan, decide, wanted_devices
from aggregator.heads.calibration import Calibration
from aggregator.heads.head_rate import log_limit, wait_s
from aggregator.heads.lost_submissions import LostSubmissions
from aggregator.heads.next_head import job_of, log_head, store_head
from aggregator.heads.open_collection import open_collection
from aggregator.job_processes import JobEnded, JobProgress, Jobs
from aggregator.storage.heads import HeadKind, HeadRecord, TrainingProgress
from aggregator.storage.store import Store
from aggregator.sums.second_operator import sums_for
from aggregator.tasks.manifests import round_manifest
from aggregator.tasks.restoration import report_damage
from aggregator.tasks.retention import Retention, delete_carried_submissions
from aggregator.tasks.task_preparation import Task
from aggregator.training.jobs import BlobJob
from aggregator.training.trainer import Finished, Trainer
from protocol.errors import BlobLost, StateError
from protocol.log import event
from protocol.retry_delay import retry_delay_s
from protocol.wire.messages import BlobRef, RoundManifest

log = logging.getLogger(__name__)

PAUSE_S = 0.01
"""Seconds between two counts of the open collection, for each 1,000 devices in it."""

KILLED = "the aggregator was killed during the training"


class Schedule:
    """Makes the heads of a task from its submissions, by `jobs`."""

    def __init__(self, task: Task, store: Store, jobs: Jobs) -> None:
        self._task = task
        self._store = store
        self._settings = task.file.settings
        self._collection = OpenCollection()
        self._change = -1
        """The number of the change at which the collection was counted."""
        self._count_s = 0.0
        """When it may be counted again (elapsed seconds)."""
        self._compared = b"", -1, False
        """The submissions of a failed training, the number of the change, and whether others count by then."""
        self._nothing_at = -1
        """The number of the change at which no head could be planned."""
        self._logged = 0
        """The devices of the open collection that the log names."""
        self._retention = Retention(task, store)
        self._calibration = Calibration(task, store)
        self.sums = sums_for(task.expectation, store, fleet=task.file.fleet)
        self._trainer = Trainer(
            store.folder / "training",
            jobs,
            blobs=store.blobs.location,
            timeout_s=task.file.training.timeout_s,
            engine=task.file.training.engine,
        )
        present = set(store.blobs.digests())  # faster than a question for each
        delete_carried_submissions(task, store, present)
        self.lost = LostSubmissions(task, store)
        counting = store.submissions_of(task.digest, self._settings).members(self.version)
        stored = self.sums.with_payloads(counting)
        self.lost.remove({device: digest for device, digest in stored.items() if digest not in present})
        self._resume()
        if (ended := self._trainer.ended()) is not None:
            self.finish(ended)

    def _resume(self) -> None:
        """Go on with the training that an earlier program has started, if it still runs or has a result.

        Another one starts again at once; it has failed if it was killed.
        """
        plan = self.plan
        job = None if plan is None or plan.state == "planned" else self._started_job(plan)
        if plan is not None and job is not None and self._trainer.resume(job):
            event(log, logging.INFO, "training goes on", version=plan.version)
            return
        has_failed = job is not None and self._trainer.has_failed(job)
        self._trainer.stop()
        if plan is None:
            return
        if plan.kind == "calibration":  # it is due again
            self._store.heads.delete(plan.task, plan.version)
            return
        after = self._failed(plan, KILLED) if has_failed else replace(plan, state="planned", progress=None)
        self._store.heads.put(replace(after, retry_s=0.0))
        event(log, logging.INFO, "interrupted training resumed", version=plan.version)

    def _started_job(self, plan: HeadRecord) -> BlobJob | None:
        """Return the job that was started for a head; None if it is to be made anew."""
        if plan.kind == "calibration":
            return None
        try:
            return self._job_of(plan, self._store.members(plan))
        except BlobLost:
            return None

    def _job_of(self, plan: HeadRecord, members: Mapping[str, bytes]) -> BlobJob:
        return job_of(plan, members, self._task, self._store, tensors=self._tensors(self.newest))

    def stop(self) -> None:
        """Stop a running training; the next start runs it again."""
        self._trainer.stop()

    @property
    def plan(self) -> HeadRecord | None:
        """The head that is planned, or trained now."""
        return self._store.heads.planned(self._task.digest)

    @property
    def newest(self) -> HeadRecord | None:
        """The newest head that was made."""
        return self._store.heads.newest(self._task.digest)

    @property
    def version(self) -> int:
        """The version of the newest head, 0 if there is none; with rounds, also the number of the open round."""
        head = self.newest
        return head.version if head is not None else 0

    @property
    def round(self) -> RoundManifest | None:
        """The manifest of the open round; None without rounds."""
        head, learning = self.newest, self._task.file.learning
        tensors = self._tensors(head)
        if learning is None or tensors is None:
            return None
        number = head.version if head is not None else 0
        return round_manifest(self._task.digest, number, learning=learning, tensors=tensors)

    def _tensors(self, head: HeadRecord | None) -> BlobRef | None:
        return head.tensors if head is not None else self._task.first_tensors

    def tick(self) -> None:
        """Plan or train the next head if it is due; raises StateError."""
        plan = self.plan
        if self._trainer.job is not None and not self._is_running(plan):
            self._trainer.stop()
            event(log, logging.INFO, "training ended: an operator's command has changed what it is made of")
        self._train_or_plan(plan)
        self._retention.tick()

    def _is_running(self, plan: HeadRecord | None) -> bool:
        """Return True if the job that runs is the planned head's training."""
        job = self._trainer.job
        return job is not None and plan is not None and _is_of(job, plan)

    def _train_or_plan(self, plan: HeadRecord | None) -> None:
        now_s = self._store.clock.now_s()
        if self._trainer.is_stopping or not self._is_counted(now_s):
            return
        if plan is not None and plan.state == "planned" and not self._is_readable(plan):
            plan = None
        limits = self._task.file.limits
        decision = decide(
            self._collection,
            self._plan_of(plan),
            now_s=now_s,
            is_rate_limited=self._settings.rounds is None
            and wait_s(self._store, self._task.digest, limits) > 0,
            settings=self._settings,
        )
        match decision:
            case "plan" if self._nothing_at != self._change:
                if (plan := self._plan(plan)) is not None:
                    self._train(plan)
            case "train" if plan is not None:
                self._train(plan)
            case "wait" if plan is None:
                self._calibrate()

    def _is_readable(self, plan: HeadRecord) -> bool:
        """Delete a plan whose list of submissions is lost: it is made again of what counts."""
        try:
            self._store.members(plan)
        except BlobLost as error:
            event(
                log, logging.ERROR, "planned again: its submissions are lost", head=plan.version, reason=error
            )
            self._store.heads.delete(plan.task, plan.version)
            return False
        return True

    def _plan_of(self, head: HeadRecord | None) -> Plan | None:
        if head is None:
            return None
        return Plan(
            is_running=head.state == "training", retry_s=head.retry_s, is_outdated=self._is_outdated(head)
        )

    def _is_counted(self, now_s: float) -> bool:
        """Count the open collection if something has changed; return False if it is too early to do so again."""
        if self._store.newest_change() == self._change:
            return True
        if now_s < self._count_s:
            return False
        with self._store.snapshot():
            change = self._store.newest_change()
            self._collection = open_collection(self._store, self._task.digest, self._settings)
        self._change = change
        self._count_s = now_s + self._collection.count // 1000 * PAUSE_S
        if (count := self._collection.count) != self._logged:
            self._logged = count
            wanted = wanted_devices(self._collection.version, self._settings)
            event(log, logging.INFO, "submissions waiting", devices=count, wanted=wanted)
        return True

    def _is_outdated(self, plan: HeadRecord) -> bool:
        """Return True if a training has failed, and other submissions count by now."""
        if plan.state == "training" or not plan.failures:
            return False
        if self.sums.is_requested:
            return False
        if self._compared[:2] != (plan.members, self._change):
            opened = self._store.submissions_of(self._task.digest, self._settings)
            members = self.sums.members(opened.members(self._collection.version))
            self._compared = plan.members, self._change, members != self._store.members(plan)
        return self._compared[2]

    def _plan(self, before: HeadRecord | None) -> HeadRecord | None:
        """Plan the next head of what counts now, in place of one that has failed; return None if there is nothing."""
        task, change, version = self._task.digest, self._store.newest_change(), self.version
        counting = self._store.submissions_of(task, self._settings).members(version)
        members = self.sums.members(counting)
        if not members:
            self._nothing_at = change
            return None
        plan = replace(
            before or HeadRecord(task=task, version=version + 1, kind=self._kind),
            state="planned",
            up_to=change,
            members=self._store.put_members(members),
            devices=len(members),
            retry_s=0.0,
        )
        with self._store.transaction():
            for device in counting.keys() - members.keys():  # they belong to a later head
                self._store.submissions.count_again(device)
            self._store.heads.put(plan)
        return plan

    @property
    def _kind(self) -> HeadKind:
        if self._settings.rounds is not None:
            return "round"
        return "training" if self._task.manifest.differential_privacy is None else "sum"

    def _train(self, plan: HeadRecord) -> None:
        """Start the training of a planned head, unless it waits for its sums."""
        try:
            if not self.sums.ready(plan):
                return
        except BlobLost as error:
            self._plan_without(plan, {error.digest.hex()})
            return
        except StateError as error:
            self._fail(plan, str(error))
            return
        members = self._store.members(plan)
        training = replace(
            plan,
            state="training",
            attempt=plan.attempt + 1,
            started_s=self._store.clock.now_s(),
            progress=None,
        )
        self._begin(training, self._job_of(training, members))
        if self._settings.rounds is None:
            log_limit(self._store, plan.task, self._task.file.limits)

    def _begin(self, training: HeadRecord, job: BlobJob) -> None:
        """Store that a head is trained, and start its job."""
        self._store.heads.put(training)
        try:
            self._trainer.start(job)
        except StateError as error:
            self._finish(job, Finished(None, str(error)))

    def take_sum(self, payload: bytes) -> None:
        """Take a frame of a reply about sums; the training that waits for it starts at the next tick."""
        problem = self.sums.take(payload)
        if problem and (plan := self.plan) is not None and plan.state == "planned":
            self._fail(plan, problem)

    def _calibrate(self) -> None:
        """Start to make the calibrated version of the newest head if it is due.

        It is no training of `limits.heads_per_hour`, and is not resumed: after a restart, it is due again.
        """
        head = self.newest
        if head is None or (job := self._calibration.job(head)) is None:
            return
        calibrated = replace(
            head,
            version=job.version,
            kind="calibration",
            state="training",
            attempt=job.attempt,
            started_s=0.0,
            place=0,
            is_watched=False,
            trial=None,
            reason="",
        )
        self._begin(calibrated, job)

    def store_progress(self, said: JobProgress) -> None:
        """Store the progress of the running training, for `status`."""
        known: dict[str, Any] = {
            name: said.figures[name] for name in ("epoch", "epochs", "loss") if name in said.figures
        }
        plan = self.plan
        if plan is None or not self._is_running(plan):
            return
        with contextlib.suppress(msgspec.ValidationError):  # a library may print anything
            progress = msgspec.convert({"version": plan.version, **known}, TrainingProgress)
            self._store.heads.put_progress(replace(plan, progress=progress))

    def finish(self, ended: JobEnded) -> bool:
        """Apply the end of a training or a calibration; return True if there is a new head."""
        taken = self._trainer.take(ended)
        return taken is not None and self._finish(*taken)

    def _finish(self, job: BlobJob, finished: Finished) -> bool:
        plan, reason = self.plan, finished.reason
        if plan is None or not _is_of(job, plan):
            return False
        if finished.result is not None:
            try:
                head = store_head(self._task, self._store, plan, job, finished.result)
            except StateError as error:
                reason = str(error)
            else:
                log_head(head, self._settings, counts_images=self._task.manifest.accepts_blocks)
                return True
        self._ended(plan, finished, reason)
        return False

    def _ended(self, plan: HeadRecord, finished: Finished, reason: str) -> None:
        """Apply the end of a training without a head: it has failed, or its head could not be stored."""
        if self.plan is None:  # a transaction failed only to report its commit
            return
        if plan.kind == "calibration":
            self._store.heads.delete(plan.task, plan.version)
            self._calibration.postpone()
            text = "head not calibrated: it stays in use as it is"
            event(log, logging.WARNING, text, version=plan.version - 1, reason=reason)
        elif finished.kind == "list":
            self.sums.abandon(reason)
            self._store.heads.delete(plan.task, plan.version)
        elif finished.kind == "lost":
            self._plan_without(plan, finished.lost)
        else:
            self._fail(plan, reason)
            if finished.damaged:
                report_damage(self._task, self._store, BlobLost(bytes.fromhex(finished.damaged), reason))

    def _plan_without(self, plan: HeadRecord, lost: Collection[str]) -> None:
        """Repeat a training at once without submissions that are lost, of which hex digests are given."""
        members = self._store.members(plan)
        self.lost.remove({device: digest for device, digest in members.items() if digest.hex() in lost})
        self._store.heads.delete(plan.task, plan.version)
        self._count_s = 0.0
        if not self._is_counted(self._store.clock.now_s()):
            return
        is_enough = self._collection.count >= max(self._settings.min_devices, 1)
        if is_enough and (again := self._plan(plan)) is not None:
            self._train(again)

    def _failed(self, plan: HeadRecord, reason: str) -> HeadRecord:
        """Return a planned head whose training has failed, and log it."""
        now_s = self._store.clock.now_s()
        retry_s = now_s + retry_delay_s(plan.failures)
        is_round = self._settings.rounds is not None
        event(
            *(log, logging.ERROR, "closing a round failed" if is_round else "head training failed"),
            version=None if is_round else plan.version,
            round=plan.version - 1 if is_round else None,
            failures=plan.failures + 1,
            reason=reason,
            retry=f"in {retry_s - now_s:.0f} s, with other submissions or at the next start",
        )
        return replace(
            plan,
            state="planned",
            progress=None,
            failures=plan.failures + 1,
            problem=reason,
            failed_s=time.time(),
            retry_s=retry_s,
        )

    def _fail(self, plan: HeadRecord, reason: str) -> None:
        self._store.heads.put(self._failed(plan, reason))


def _is_of(job: BlobJob, plan: HeadRecord) -> bool:
    """Return True if a job is the training of a planned head."""
    return (plan.state, plan.version, plan.attempt) == ("training", job.version, job.attempt)
