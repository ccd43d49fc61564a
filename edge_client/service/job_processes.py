"""The processes that run jobs: started, told, and killed.

One process runs all jobs, one after the other. Where messages must not reveal images, each job has a process of its
own, in which no image has been read, and a head is evaluated beside a build.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from edge_client.core import events
from edge_client.core.state import Job as Name
from edge_client.privacy.charges import Charges
from edge_client.service.data_folder import ScanOrder
from edge_client.service.upload_times import Times
from edge_client.store.job_folder import At, Finished, FromJob, Line, ToJob
from protocol.children import Child
from protocol.log import event
from protocol.wire.messages import TaskManifest

PROGRAM = "edge_client.job"

IDLE_S = 60.0
"""How long a process waits for the next job, so that rounds do not pay for its start."""

MAX_END_S = 1.0
"""How long the end of the service waits for a killed process, which takes milliseconds."""

MAX_DECODING_S = 3600.0
"""Time after which a job that names no further image is ended: a decoder hangs. A graph has limits of its own."""


class FromChild(msgspec.Struct, frozen=True):
    """A message of a job's process, a line of its standard error, or its exit status."""

    runner: "Runner"
    said: FromJob | str | int


@dataclass(eq=False)
class Wanted:
    """A job that waits or runs."""

    name: Name
    action: events.BuildSubmission | events.InstallHead
    times: Times
    order: ScanOrder | None = None
    is_first: bool = True
    """False if a process has ended before it named anything of this job."""

    @property
    def manifest(self) -> TaskManifest:
        """The task that it is for."""
        return self.action.manifest


@dataclass(eq=False)
class Runner:
    """A process that runs jobs."""

    child: Child = field(init=False)
    job: Wanted | None = None
    number: int = 0
    """Number and folder of the job."""
    charges: Charges | None = None
    at: At = field(default_factory=At)
    at_since_s: float = 0.0
    lines: int = 0
    held: Finished | None = None
    """The end of a job whose result waits to be published; its process is killed."""
    is_starting: bool = True
    is_new: bool = True
    """True until it has run a job."""
    idle_since_s: float = field(default_factory=time.monotonic)

    def send(self, message: ToJob) -> None:
        """Send a message to the process."""
        self.child.send(msgspec.msgpack.encode(message))

    def note(self, at: At) -> None:
        """Note what the job runs from now on."""
        self.at, self.at_since_s = at, time.monotonic()

    def begin(self, job: Wanted, number: int) -> None:
        """Have a job."""
        self.job, self.number, self.is_new = job, number, False
        self.at, self.lines = At(), 0

    def release(self) -> None:
        """Wait for the next job."""
        self.job, self.charges, self.held = None, None, None
        self.idle_since_s = time.monotonic()


class JobProcesses:
    """The processes by their slots: "" for all jobs, or the name of the kind of job that has one of its own.

    `emit` takes what they say, on threads of their own.
    """

    def __init__(self, emit: Callable[[FromChild | BaseException], None]) -> None:
        self._emit = emit
        self._runners: dict[str, Runner] = {}

    def all(self) -> tuple[Runner, ...]:
        """Return all processes."""
        return tuple(self._runners.values())

    def get(self, slot: str) -> Runner | None:
        """Return the process of a slot."""
        return self._runners.get(slot)

    def start(self, slot: str = "") -> Runner:
        """Start a process."""
        runner = self._runners[slot] = Runner()

        def hear(data: bytes) -> None:
            try:
                said: FromJob = msgspec.msgpack.decode(data, type=FromJob)
            except msgspec.MsgspecError as error:
                runner.child.abort(f"malformed message of a job: {error}")
            else:
                self._emit(FromChild(runner, said))

        runner.child = Child(
            PROGRAM,
            on_message=hear,
            on_line=lambda line: self._emit(FromChild(runner, line)),
            on_end=lambda code: self._emit(FromChild(runner, code)),
            on_failure=self._emit,
        )
        return runner

    def for_job(self, slot: str) -> Runner:
        """Return a process without a job, in which no image was read if the slot has a name."""
        idle = self._runners.get("")
        if slot and idle is not None and slot not in self._runners and idle.job is None and idle.is_new:
            self._runners[slot] = self._runners.pop("")
        for other, each in tuple(self._runners.items()):
            if each.job is None and not each.is_new and (slot or other):
                self.end(each)  # it would keep the lock of the features, or has read images
        return self._runners.get(slot) or self.start(slot)

    def end(self, runner: Runner) -> None:
        """Kill a process."""
        self.forget(runner)
        runner.child.kill()

    def forget(self, runner: Runner) -> None:
        """Forget a process that has ended."""
        self._runners = {slot: each for slot, each in self._runners.items() if each is not runner}

    def end_idle(self) -> None:
        """End processes that have waited long for a job, and one whose decoder hangs."""
        now_s = time.monotonic()
        for each in self.all():
            if each.job is None and not each.is_starting and now_s > each.idle_since_s + IDLE_S:
                self.end(each)
            elif each.held is None and each.at.decoding and now_s > each.at_since_s + MAX_DECODING_S:
                each.child.abort(f"it decoded the same images for {MAX_DECODING_S:.0f} s")

    def stop(self) -> None:
        """Kill all processes, and wait for their ends, which are no fault of what they run."""
        runners = self.all()
        for each in runners:
            self.end(each)
        for each in runners:
            each.child.wait(MAX_END_S)


def log_line(line: Line | None) -> None:
    """Log what a job has logged."""
    if line is None:
        return
    logger = logging.getLogger(line.logger)
    if line.fields is None:
        logger.log(line.level, "%s", line.message)
    else:
        event(logger, line.level, line.message, **line.fields)
