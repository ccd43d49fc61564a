"""Runs jobs as processes and reports their progress and end as events."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aggregator.training.jobs import CompileJob, HeadJob, Job, Result, RoundJob
from protocol.errors import ThreadFailed
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.threads import start_thread

log = logging.getLogger(__name__)


PROGRAMS: dict[type[Job], str] = {
    HeadJob: "aggregator.training.head_job",
    RoundJob: "aggregator.training.round_job",
    CompileJob: "aggregator.tasks.graph_cache",
}
"""The module that runs each kind of job."""


@dataclass(frozen=True)
class Progress:
    """A job's progress: device, prototypes, epoch, epochs or loss."""

    figures: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """A job has ended; without a result it has failed for `reason`."""

    job: Job
    result: Result | None
    reason: str = ""


class Trainer:
    """Runs at most one job at a time, each in a folder inside `folder`.

    `on_event` is called from a thread with Progress and, whatever happens, one Finished; it must only enqueue them.
    """

    def __init__(self, folder: Path, *, on_event: Callable[[Progress | Finished], None]) -> None:
        self._folder = folder
        self._on_event = on_event
        self._process: subprocess.Popen[str] | None = None

    def start(self, job: Job) -> None:
        """Start a job.

        Raises:
            StateError: its folder cannot be written, or the process cannot be started.
            ThreadFailed: the process cannot be watched.
        """
        folder = Path(job.folder)
        with state_errors(folder):
            shutil.rmtree(self._folder, ignore_errors=True)
            folder.mkdir(parents=True)
        write_atomically(folder / "job.json", msgspec.json.encode(job))
        with state_errors(folder), (folder / "training.log").open("wb") as errors:
            # A new session, so that Ctrl-C reaches only the aggregator, which then stops the job.
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAMS[type(job)], str(folder / "job.json")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                errors="replace",  # a library may print anything
                start_new_session=True,
                # Spinning threads made training 11 times slower beside other programs.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            )

        def fail(failure: ThreadFailed) -> None:
            process.kill()
            self._on_event(Finished(job, None, str(failure)))

        try:
            start_thread(lambda: self._watch(job, process), name="job", on_failure=fail)
        except ThreadFailed:
            process.kill()
            raise

    def stop(self) -> None:
        """Stop a running job; the aggregator's next start runs it again."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _watch(self, job: Job, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            try:
                self._on_event(Progress(msgspec.json.decode(line, type=dict[str, Any])))
            except msgspec.MsgspecError:
                log.debug("job output: %s", line.rstrip())
        code = process.wait()
        try:
            data = (Path(job.folder) / "result.json").read_bytes()
            self._on_event(Finished(job, msgspec.json.decode(data, type=Result)))
        except (OSError, msgspec.MsgspecError):
            errors = ""
            with contextlib.suppress(OSError):
                errors = (Path(job.folder) / "training.log").read_text(errors="replace").strip()
            last = errors.splitlines()[-1] if errors else "no error message"
            self._on_event(Finished(job, None, f"exit status {code}: {last}"))
