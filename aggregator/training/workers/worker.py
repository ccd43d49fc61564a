"""A program that trains: claims jobs from the aggregator's database, runs them, and stores what they make as blobs."""

import contextlib
import logging
import queue
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from aggregator.storage.programs import FileName, Outcome, QueuedJob
from aggregator.storage.store import Store
from aggregator.training.jobs import Job
from aggregator.training.runner import Finished, Progress, Trainer
from aggregator.training.workers.queue_trainer import KINDS
from protocol.errors import StateError
from protocol.log import event
from protocol.storage.blobstore import file_digest, state_errors
from protocol.storage.folder_lock import FolderLock

log = logging.getLogger(__name__)

POLL_S = 1.0

RENEWALS = 5
"""Renewals of a lease within its duration."""


@contextlib.contextmanager
def scratch_folder(state: Path, name: str) -> Iterator[Path]:
    """Lock a worker's folder inside `state`, deleted at the end; those that killed workers left are deleted now.

    Raises:
        StateError: it cannot be written, or another worker has the same name.
    """
    parent = state / "workers"
    folder, lock = parent / name, FolderLock(parent, f"{name}.lock")
    with state_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for file in parent.glob("*.lock"):
            if not FolderLock(parent, file.name).is_taken():
                shutil.rmtree(file.with_suffix(""), ignore_errors=True)
    if not lock.take():
        raise StateError(f"a worker of the name {name} runs already on {state}: give another --name")
    try:
        with state_errors(folder):
            folder.mkdir(exist_ok=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


class Worker:
    """A worker with a name of its own and a folder for the files of its job.

    Another worker claims its job once it has not renewed its lease for `lease_s`.
    """

    def __init__(self, store: Store, folder: Path, *, name: str, lease_s: float) -> None:
        self._store = store
        self._folder = folder
        self._name = name
        self._lease_s = lease_s
        self._renewed_s = 0.0

    def run(self) -> None:
        """Claim and run jobs until an exception, such as that of a signal, ends it; then give the job back."""
        event(log, logging.INFO, "worker ready", worker=self._name)
        is_usable = True
        while True:
            try:
                is_busy, is_usable = self.run_next(), True
            except StateError as error:
                if is_usable:
                    event(log, logging.ERROR, "cannot use the store: retrying", reason=error)
                is_busy = is_usable = False
            if not is_busy:
                time.sleep(POLL_S)

    def run_next(self) -> bool:
        """Claim a job and run it to its end; return False if there is none."""
        claimed = self._store.jobs.claim(self._name, now_s=self._store.clock.now_s(), lease_s=self._lease_s)
        if claimed is None:
            return False
        fields = {"job": claimed.number, "kind": claimed.kind, "attempt": claimed.attempt}
        event(log, logging.INFO, "job claimed", **fields)
        try:
            is_counted = self._work(claimed)
        except BaseException:
            with contextlib.suppress(StateError):  # then its lease ends it
                self._store.jobs.give_back(claimed)
                event(log, logging.INFO, "job given back", **fields)
            raise
        text = (
            "job finished"
            if is_counted
            else "job stopped: it was cancelled, or another worker has claimed it"
        )
        event(log, logging.INFO, text, **fields)
        return True

    def _work(self, claimed: QueuedJob) -> bool:
        """Run a claimed job; return False if it is no longer this worker's."""
        events: queue.SimpleQueue[Progress | Finished] = queue.SimpleQueue()
        job, folder = self._job(claimed), self._folder / "training"
        trainer = Trainer(folder, timeout_s=claimed.timeout_s, on_event=events.put)
        self._renewed_s, progress = time.monotonic(), dict[str, Any]()
        trainer.start(job)
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    match events.get(timeout=self._lease_s / RENEWALS):
                        case Progress(figures=progress):
                            pass
                        case Finished() as finished:
                            return self._finish(claimed, finished, progress)
                if not self._renew(claimed, progress):
                    return False
        finally:
            trainer.stop()

    def _job(self, claimed: QueuedJob) -> Job:
        """Return a job with the paths of this machine; raises StateError if it cannot be read."""
        try:
            job = msgspec.json.decode(claimed.job, type=KINDS[claimed.kind])
        except (KeyError, msgspec.MsgspecError) as error:
            raise StateError(
                f"cannot read job {claimed.number}, perhaps of another version: {error}"
            ) from error
        return msgspec.structs.replace(
            job, blobs=self._store.blobs.location, folder=str(self._folder / "training" / "job")
        )

    def _renew(self, claimed: QueuedJob, progress: Mapping[str, Any]) -> bool:
        """Renew the lease if it is time; return False if the job is no longer this worker's.

        While the database cannot be used the job goes on: no other worker can claim it either.
        """
        if time.monotonic() < self._renewed_s + self._lease_s / RENEWALS:
            return True
        try:
            is_own = self._store.jobs.renew(claimed, until_s=self._until_s(), progress=progress)
        except StateError as error:
            event(log, logging.WARNING, "cannot renew a lease: retrying", job=claimed.number, reason=error)
            is_own = True
        self._renewed_s = time.monotonic()
        return is_own

    def _finish(self, claimed: QueuedJob, finished: Finished, progress: Mapping[str, Any]) -> bool:
        """Store a job's files as blobs and then its end; return False if the job is no longer this worker's.

        Raises StateError if the blobs cannot be used, by which a job without a result may have failed.
        """
        jobs, result = self._store.jobs, finished.result
        if result is None:
            self._store.blobs.check_writable()
            return jobs.finish(claimed, Outcome(reason=finished.reason, is_killed=finished.is_killed))
        names: tuple[FileName, ...] = get_args(FileName)
        folder = Path(finished.job.folder)
        digests = {name: file_digest(folder / name).hex() for name in names if (folder / name).is_file()}
        # The aggregator deletes blobs that nothing names, so they are named before they are stored.
        if not jobs.renew(claimed, until_s=self._until_s(), progress=progress, files=digests):
            return False
        for name in digests:
            self._store.put_file(folder / name)
        return jobs.finish(claimed, Outcome(result=msgspec.to_builtins(result)))

    def _until_s(self) -> float:
        return self._store.clock.now_s() + self._lease_s
