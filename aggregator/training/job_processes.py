"""Runs jobs as processes and reports their progress and end as events."""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from aggregator.training.execution import JOB_FILE
from aggregator.training.jobs import Failure, Job, Result, read_result
from protocol.errors import ProtofleetError, ThreadFailed
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.threads import start_thread

log = logging.getLogger(__name__)


PROGRAM = "aggregator.training.execution"
"""The module that runs a job as a program."""

KILLED = (
    "killed (SIGKILL), as Linux does when memory runs out: add memory, or save some"
    ' (docs/operations/heads.md, "Memory of a training")'
)


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
    kind: Literal["error", "lost", "list"] = "error"
    lost: tuple[str, ...] = ()
    """Hex digests of lost submissions, as in `Failure`."""
    is_killed: bool = False
    """True if a signal has ended it, not an error of its own."""


class Trainer:
    """Runs at most one job at a time, each in a folder inside `folder`, and kills it after `timeout_s`.

    `blobs` is the location of the blobs that jobs read, and `engine` that of `[training]`. `on_event` is called
    from a thread with Progress and, whatever happens, one Finished; it must only enqueue them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        blobs: str,
        timeout_s: float,
        on_event: Callable[[Progress | Finished], None],
        engine: str = "local",
    ) -> None:
        self._folder = folder
        self._blobs = blobs
        self._engine = engine
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._process: subprocess.Popen[str] | None = None

    def start(self, job: Job) -> None:
        """Start a job.

        Raises:
            StateError: its folder cannot be written, or the process cannot be started.
            ThreadFailed: the process cannot be watched.
        """
        folder = self._folder / job.name
        with state_errors(folder):
            shutil.rmtree(self._folder, ignore_errors=True)
            folder.mkdir(parents=True)
        write_atomically(folder / JOB_FILE, msgspec.json.encode(job))
        alive, held = os.pipe()
        try:
            with state_errors(folder), (folder / "training.log").open("wb") as errors:
                # A new session, so that Ctrl-C reaches only the aggregator, which then stops the job. It ends with the
                # aggregator, which alone holds the other end of a pipe.
                process = self._process = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, str(folder), self._blobs, self._engine, str(alive)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    encoding="utf-8",
                    errors="replace",  # a library may print anything
                    start_new_session=True,
                    pass_fds=(alive,),
                    # Spinning threads made training 11 times slower beside other programs.
                    env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
                )
        except BaseException:
            os.close(held)
            raise
        finally:
            os.close(alive)

        def fail(failure: ThreadFailed) -> None:
            _kill(process)
            self._on_event(Finished(job, None, str(failure)))

        try:
            start_thread(lambda: self._watch(job, process, held), name="job", on_failure=fail)
        except ThreadFailed:
            _kill(process)
            os.close(held)
            raise

    def stop(self) -> None:
        """Stop a running job; the aggregator's next start runs it again."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                _kill(self._process)

    def _watch(self, job: Job, process: subprocess.Popen[str], held: int) -> None:
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            _kill(process)

        limit = threading.Timer(self._timeout_s, end)
        limit.daemon = True
        limit.start()
        try:
            self._read(process)
            code = process.wait()
        finally:
            limit.cancel()
            os.close(held)
        folder = self._folder / job.name
        try:
            result = read_result(folder)
            self._on_event(
                Finished(job, None, result.reason, kind=result.kind, lost=result.lost)
                if isinstance(result, Failure)
                else Finished(job, result)
            )
        except ProtofleetError as error:
            self._on_event(Finished(job, None, str(error)))
        except OSError:
            too_late = f"not finished within `[training]` timeout_s, {self._timeout_s:g} s"
            reason = (
                f"{too_late}: raise it, or use fewer epochs" if is_late.is_set() else _reason(folder, code)
            )
            self._on_event(Finished(job, None, reason, is_killed=code < 0 and not is_late.is_set()))

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            try:
                self._on_event(Progress(msgspec.json.decode(line, type=dict[str, Any])))
            except msgspec.MsgspecError:
                log.debug("job output: %s", line.rstrip())


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _reason(folder: Path, code: int) -> str:
    errors = ""
    with contextlib.suppress(OSError):
        errors = (folder / "training.log").read_text(errors="replace").strip()
    if code == -signal.SIGKILL:
        return KILLED
    return f"exit status {code}: {errors.splitlines()[-1] if errors else 'no error message'}"
