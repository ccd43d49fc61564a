"""Leaves training jobs to worker programs, and reports their progress and end as events."""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from aggregator.storage.programs import MAX_LOST_WORKERS, Outcome, QueuedJob
from aggregator.storage.store import Store
from aggregator.training.jobs import (
    CalibrationJob,
    HeadJob,
    Job,
    NoisySumsJob,
    Result,
    RoundJob,
    StatisticsJob,
    WorkerJob,
)
from aggregator.training.runner import Finished, Progress
from protocol.errors import ProtofleetError, StateError, ThreadFailed
from protocol.log import event
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.threads import start_thread
from protocol.wire.codec import digest_of

log = logging.getLogger(__name__)

POLL_S = 0.5

UNCLAIMED_S = 30.0
"""Seconds after which the log says that no worker has claimed a job."""

KINDS: dict[str, type[WorkerJob]] = {
    "head": HeadJob,
    "statistics": StatisticsJob,
    "noisy-sums": NoisySumsJob,
    "round": RoundJob,
    "calibration": CalibrationJob,
}
"""The jobs that workers run, by their names in the table."""


class QueueTrainer:
    """Has workers run at most one job at a time; a job outlives the aggregator, and `start` attaches to it.

    `on_event` is called from a thread with Progress and one Finished; it must only enqueue them.
    """

    def __init__(
        self, store: Store, *, timeout_s: float, on_event: Callable[[Progress | Finished], None]
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, job: WorkerJob) -> None:
        """Queue a job, or attach to an equal one, whether it is waiting, running or over.

        Raises:
            StateError: it cannot be stored.
            ThreadFailed: it cannot be watched.
        """
        self._stopped.set()
        kind = next(name for name, of_kind in KINDS.items() if type(job) is of_kind)
        text = _portable(job)
        digest = digest_of(f"{kind} {text}".encode())
        self._store.jobs.add(
            bytes.fromhex(job.task),
            kind=kind,
            job=text,
            digest=digest,
            timeout_s=self._timeout_s,
            now_s=self._store.clock.now_s(),
        )
        self._stopped = stopped = threading.Event()

        def fail(failure: ThreadFailed) -> None:
            self._on_event(Finished(job, None, str(failure)))

        self._thread = start_thread(lambda: self._watch(digest, job, stopped), name="job", on_failure=fail)

    def stop(self) -> None:
        """Stop to watch the job; a worker goes on with it."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
            self._thread = None

    def cancel(self, task: bytes) -> None:
        self._stopped.set()  # its thread may wait for a transaction of this one, so it is not waited for
        self._store.jobs.cancel(task)

    def _watch(self, digest: bytes, job: Job, stopped: threading.Event) -> None:
        """Report the progress until the job's end, across errors of the database."""
        shown: dict[str, object] = {}
        unclaimed_s = time.monotonic() + UNCLAIMED_S
        while not stopped.wait(POLL_S):
            try:
                queued = self._store.jobs.get(digest, now_s=self._store.clock.now_s())
                if (finished := self._end(queued, job)) is not None:
                    self._on_event(finished)
                    return
            except StateError as error:
                log.debug("cannot read a job: %s", error)
                continue
            if queued is not None and queued.progress not in ({}, shown):
                shown = dict(queued.progress)
                self._on_event(Progress(shown))
            if queued is not None and not queued.worker and unclaimed_s < time.monotonic():
                unclaimed_s = float("inf")
                text = "no worker has claimed a training: start `aggregator train`"
                event(log, logging.WARNING, text, job=queued.number, seconds=UNCLAIMED_S)

    def _end(self, queued: QueuedJob | None, job: Job) -> Finished | None:
        """Return a job's end; None before it. A failed job is deleted, so that `start` queues it again.

        Raises:
            StateError: the database cannot be read.
        """
        if queued is None:
            return Finished(job, None, "the job was cancelled")
        if queued.is_abandoned:
            reason = (
                f"{MAX_LOST_WORKERS + 1} workers have ended during it, as Linux ends programs without memory"
            )
            outcome = Outcome(reason=reason, is_killed=True)
        elif queued.outcome is None:
            return None
        else:
            outcome = queued.outcome
        if outcome.result is not None:
            try:
                return Finished(job, self._fetch(queued, Path(job.folder), outcome))
            except (ProtofleetError, msgspec.ValidationError) as error:
                outcome = Outcome(reason=f"its files cannot be used: {error}")
        self._store.jobs.delete(queued.digest)
        return Finished(job, None, outcome.reason, is_killed=outcome.is_killed)

    def _fetch(self, queued: QueuedJob, folder: Path, outcome: Outcome) -> Result:
        """Write a job's files into its folder, and return its result.

        Raises:
            ProtofleetError: a file is lost or damaged, or the folder cannot be written.
            ValidationError: the result is none.
        """
        result = msgspec.convert(outcome.result, Result)
        with state_errors(folder):
            shutil.rmtree(folder.parent, ignore_errors=True)
            folder.mkdir(parents=True)
        for name, digest in queued.files.items():
            write_atomically(folder / name, self._store.blobs.read(bytes.fromhex(digest)))
        return result


def _portable(job: WorkerJob) -> str:
    """Return a job as JSON without the paths of this machine."""
    return msgspec.json.encode(msgspec.structs.replace(job, blobs="", folder="")).decode()
