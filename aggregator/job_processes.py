"""Jobs as child processes: of a supervisor, or of a program without one.

A supervisor imports this: it needs no numpy.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from protocol.children import Child
from protocol.errors import StateError, ThreadFailed

PROGRAM = "aggregator.training.job_program"
"""The module that runs a job as a program."""

STOPPED_FILE = "stopped"
"""In the folder of a job that was stopped: it has not failed."""


class JobOrder(msgspec.Struct, frozen=True, tag=True):
    """Run the job in `folder`/job.json."""

    folder: Path
    blobs: str
    """Location of the blobs that it reads."""
    engine: str
    """Of `[training]`."""
    timeout_s: float


class StopJob(msgspec.Struct, frozen=True, tag=True):
    """Kill the job that runs."""


class JobProgress(msgspec.Struct, frozen=True, tag=True):
    """A job's progress: device, prototypes, epoch, epochs or loss."""

    folder: Path
    figures: dict[str, Any]


class JobEnded(msgspec.Struct, frozen=True, tag=True):
    """A job has ended."""

    folder: Path
    code: int = 0
    """The exit status, or the negative number of a signal."""
    problem: str = ""
    """Why it could not be run to its end; empty if the end is its own."""


JobEvent = JobProgress | JobEnded


class Jobs(Protocol):
    """Runs at most one job at a time; each start is followed by one JobEnded, whatever happens."""

    folder: Path | None
    """The folder of the job that runs."""
    ended: JobEnded | None
    """The end of the last job; None once another one was started."""

    def start(self, order: JobOrder) -> None:
        """Start a job, in place of one that runs."""

    def stop(self) -> None:
        """Kill the job that runs."""


class JobRunner:
    """Runs jobs as children of this program.

    `on_event` is called from a thread, or by `start`; it must only enqueue the event.
    """

    def __init__(self, on_event: Callable[[JobEvent], None]) -> None:
        self._on_event = on_event
        self._child: Child | None = None
        self.folder: Path | None = None
        self.ended: JobEnded | None = None

    def start(self, order: JobOrder) -> None:
        """Start a job, in place of one that runs."""
        self.stop()
        folder = self.folder = order.folder
        self.ended = None
        is_late = threading.Event()

        def take(message: bytes) -> None:
            self._on_event(JobProgress(folder, msgspec.msgpack.decode(message, type=dict[str, Any])))

        def end(code: int, problem: str = "") -> None:
            limit.cancel()
            if is_late.is_set():
                problem = f"not finished within `[training]` timeout_s, {order.timeout_s:g} s"
                problem += ": raise it, or use fewer epochs"
            ended = JobEnded(folder, code, problem)
            if self.folder == folder:
                self.ended, self.folder = ended, None
            self._on_event(ended)

        def fail(failure: ThreadFailed) -> None:
            self.stop()
            end(0, str(failure))

        def end_late() -> None:
            is_late.set()
            child.kill()

        limit = threading.Timer(order.timeout_s, end_late)
        limit.daemon = True
        try:
            child = self._child = Child(PROGRAM, on_message=take, on_line=None, on_end=end, on_failure=fail)
        except (StateError, ThreadFailed) as error:
            end(0, str(error))
            return
        limit.start()
        child.send(msgspec.msgpack.encode(order, enc_hook=str))

    def stop(self) -> None:
        """Kill the job that runs."""
        if self.folder is not None:
            with contextlib.suppress(OSError):  # on a full disk it counts as failed
                (self.folder / STOPPED_FILE).touch()
        if self._child is not None:
            self._child.kill()
