"""The training of a head: its job in a folder of its own, and what has become of it."""

import contextlib
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from aggregator.job_processes import STOPPED_FILE, JobEnded, JobOrder, Jobs
from aggregator.training.job_program import LOG_FILE
from aggregator.training.jobs import JOB_FILE, BlobJob, Failure, Job, Result, read_result
from protocol.errors import ProtofleetError
from protocol.storage.blobstore import state_errors, write_atomically

KILLED = (
    "killed (SIGKILL), as Linux does when memory runs out: add memory, or save some"
    ' (docs/operations/heads.md, "Memory of a training")'
)


@dataclass(frozen=True)
class Finished:
    """A job has ended; without a result it has failed for `reason`."""

    result: Result | None
    reason: str = ""
    kind: Literal["error", "lost", "list"] = "error"
    lost: tuple[str, ...] = ()
    """Hex digests of lost submissions, as in `Failure`."""
    damaged: str = ""
    """Hex digest of another lost file, as in `Failure`."""
    is_killed: bool = False
    """True if a signal has ended it, not an error of its own."""


class Trainer:
    """Runs the jobs of one state directory, each in a folder inside `folder`, which it deletes at the next one.

    `blobs` is the location of the blobs that jobs read, and `timeout_s` and `engine` are of `[training]`.
    """

    def __init__(self, folder: Path, jobs: Jobs, *, blobs: str, timeout_s: float, engine: str) -> None:
        self._folder = folder
        self._jobs = jobs
        self._blobs = blobs
        self._timeout_s = timeout_s
        self._engine = engine
        self.job: BlobJob | None = None
        """The job that runs, or has ended and is not handled yet."""
        self._stopped: Path | None = None
        """The folder of a job that was stopped, until its end is handled: another one may have the same name."""

    def start(self, job: BlobJob) -> None:
        """Start a job; raises StateError if its folder cannot be written."""
        start(
            *(self._jobs, job, self._folder),
            blobs=self._blobs,
            timeout_s=self._timeout_s,
            engine=self._engine,
        )
        self.job = job

    def resume(self, job: BlobJob) -> bool:
        """Take a job over that an earlier program has started; return False if it is to be started again."""
        folder = self._folder / job.name
        if not _is_in(folder, job):
            return False
        if folder != self._jobs.folder:
            try:
                read_result(folder)
            except (OSError, ProtofleetError):
                if _is_stopped(folder) or not self._has_ended(folder):
                    return False
        self.job = job
        return True

    def has_failed(self, job: BlobJob) -> bool:
        """Return True if a job that cannot be resumed was killed, and not by this program or its supervisor."""
        folder = self._folder / job.name
        return _is_in(folder, job) and not _is_stopped(folder)

    def ended(self) -> JobEnded | None:
        """Return the end of a job that has ended while no program took it."""
        if self.job is None or self._jobs.folder is not None:
            return None
        folder = self._folder / self.job.name
        return self._jobs.ended if self._has_ended(folder) else JobEnded(folder)

    def _has_ended(self, folder: Path) -> bool:
        return self._jobs.ended is not None and self._jobs.ended.folder == folder

    @property
    def is_stopping(self) -> bool:
        """True until the end of a stopped job is handled: no other one can be started."""
        return self._stopped is not None

    def stop(self) -> None:
        """Kill the job that runs."""
        running = self._jobs.folder if self.job is None else self._folder / self.job.name
        self._stopped = running or self._stopped
        self._jobs.stop()
        self.job = None

    def take(self, ended: JobEnded) -> tuple[BlobJob, Finished] | None:
        """Return the job that has ended, with what it has left; None if it was stopped."""
        if ended.folder == self._stopped:
            self._stopped = None
            return None
        if self.job is None or ended.folder != self._folder / self.job.name:
            return None
        job, self.job = self.job, None
        return job, finished(ended)


def _is_in(folder: Path, job: BlobJob) -> bool:
    """Return True if a folder is of exactly this job: with other settings it would have another result."""
    try:
        return (folder / JOB_FILE).read_bytes() == msgspec.json.encode(job)
    except OSError:
        return False


def _is_stopped(folder: Path) -> bool:
    return (folder / STOPPED_FILE).exists()


def start(jobs: Jobs, job: Job, folder: Path, *, blobs: str, timeout_s: float, engine: str = "local") -> None:
    """Start a job in a folder of its own inside `folder`, whose other contents are deleted.

    Raises:
        StateError: its folder cannot be written.
    """
    own = folder / job.name
    with state_errors(own):
        shutil.rmtree(folder, ignore_errors=True)
        own.mkdir(parents=True)
    write_atomically(own / JOB_FILE, msgspec.json.encode(job))
    jobs.start(JobOrder(own, blobs, engine, timeout_s))


def finished(ended: JobEnded) -> Finished:
    """Return what a job has left."""
    try:
        result = read_result(ended.folder)
    except ProtofleetError as error:
        return Finished(None, str(error))
    except OSError:
        is_killed = ended.code < 0 and not ended.problem
        return Finished(None, ended.problem or _reason(ended), is_killed=is_killed)
    if isinstance(result, Failure):
        return Finished(None, result.reason, kind=result.kind, lost=result.lost, damaged=result.damaged)
    return Finished(result)


def _reason(ended: JobEnded) -> str:
    if ended.code == -signal.SIGKILL:
        return KILLED
    errors = ""
    with contextlib.suppress(OSError):
        errors = (ended.folder / LOG_FILE).read_text(errors="replace").strip()
    return f"exit status {ended.code}: {errors.splitlines()[-1] if errors else 'no error message'}"
