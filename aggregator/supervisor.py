"""The supervisor of `aggregator run`: it starts the programs, and starts one again that has ended.

It also runs the jobs that `serve` orders, which go on while `serve` is started again. It needs neither disk nor
database. The programs and the job end with it, however it ends.
"""

import contextlib
import logging
import queue
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NoReturn

import msgspec

from aggregator.job_processes import JobEvent, JobOrder, JobRunner, StopJob
from aggregator.supervised import Failed, FromProgram, Notified, RunningJob, ServeState, decode, encode
from protocol import service_manager
from protocol.children import Child, ending
from protocol.errors import ConfigError, StateError, ThreadFailed
from protocol.log import event
from protocol.retry_delay import RestartDelay
from protocol.service_manager import ServiceManager

log = logging.getLogger(__name__)

STOP_S = 20.0
"""Time for the orderly end of a program: `serve` cancels a training and publishes its presence."""

SILENT_INTERVALS = 3
"""A program that has sent no sign of life for so many intervals hangs: the service manager gets none either."""


@dataclass(frozen=True)
class Program:
    """A program: a module that calls `supervised.run_program`, and its settings."""

    name: str
    module: str
    settings: msgspec.Struct
    _: KW_ONLY
    descriptors: tuple[int, ...] = ()
    """Open files that it gets."""
    is_told: bool = False
    """It gets the state of `serve`."""


@dataclass(kw_only=True)
class _Supervised:
    program: Program
    delay: RestartDelay = field(default_factory=RestartDelay)
    child: Child | None = None
    """None while it waits for its start."""
    start_s: float = 0.0
    """Of the last start, or of the next one."""
    is_ready: bool = False
    alive_s: float | None = None
    """The last sign of life of this run; None if it has sent none."""
    problem: str = ""
    """Why it has ended; empty once it is ready again."""
    failed: Failed | None = None
    """The failure that this run has sent."""


class Supervisor:
    """Runs programs, of which the last one is `serve`: each is started once the one before is ready or has failed."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._all = [_Supervised(program=each) for each in programs]
        self._waiting = list(self._all)
        """Those that were not started yet."""
        self._serve = self._all[-1]
        self._events = queue.SimpleQueue[tuple[_Supervised, bytes | int | ThreadFailed | JobEvent]]()
        self._jobs = JobRunner(lambda said: self._events.put((self._serve, said)))
        self._manager = ServiceManager()

    def run(self) -> NoReturn:
        """Run the programs until a signal interrupts this one.

        Raises:
            ConfigError: a program has ended by an error that a restart cannot mend.
            ThreadFailed: a program is no longer heard.
        """
        try:
            self._start(self._waiting.pop(0))
            while True:
                with contextlib.suppress(queue.Empty):
                    self._handle(*self._events.get(timeout=self._pause_s()))
                for each in self._all:
                    if each.problem and each.child is None and time.monotonic() >= each.start_s:
                        self._start(each)
                if all(map(_is_alive, self._all)):
                    self._manager.alive()
        finally:
            self._stop()

    def _pause_s(self) -> float:
        starts = [each.start_s for each in self._all if each.problem and each.child is None]
        return max(0.0, min([time.monotonic() + service_manager.INTERVAL_S, *starts]) - time.monotonic())

    def _start(self, each: _Supervised) -> None:
        each.start_s, each.alive_s, each.failed = time.monotonic(), None, None
        program = each.program

        def put(said: bytes | int | ThreadFailed) -> None:
            self._events.put((each, said))

        try:
            child = each.child = Child(
                program.module,
                on_message=put,
                on_line=None,
                on_end=put,
                on_failure=put,
                descriptors=program.descriptors,
            )
        except (StateError, ThreadFailed) as error:
            self._ended(each, str(error))
            return
        child.send(encode(program.settings))
        if each is self._serve:
            child.send(encode(RunningJob(self._jobs.folder, self._jobs.ended)))

    def _handle(self, each: _Supervised, said: bytes | int | ThreadFailed | JobEvent) -> None:
        if isinstance(said, ThreadFailed):
            raise said
        if isinstance(said, JobEvent):
            if each.child is not None:  # the next run hears of the end as it starts
                each.child.send(encode(said))
            return
        if isinstance(said, int):
            self._ended(each, each.failed.reason if each.failed is not None else ending(said))
            return
        message: FromProgram = decode(said, FromProgram)
        match message:
            case JobOrder() | StopJob():
                self._jobs.start(message) if isinstance(message, JobOrder) else self._jobs.stop()
            case Failed():
                each.failed = message
            case Notified(state="READY=1"):
                self._ready(each)
            case Notified():
                each.alive_s = time.monotonic()

    def _ready(self, each: _Supervised) -> None:
        if each.problem:
            event(log, logging.INFO, "program runs again", program=each.program.name)
        each.is_ready, each.problem = True, ""
        self._tell(each)
        self._start_next()

    def _ended(self, each: _Supervised, reason: str) -> None:
        if each.failed is not None and each.failed.is_final:
            raise ConfigError(reason)
        now_s = time.monotonic()
        delay_s = each.delay.next_s(ran_s=now_s - each.start_s)
        level = logging.ERROR if reason != each.problem else logging.DEBUG
        event(log, level, "program ended", program=each.program.name, reason=reason, retry_s=delay_s)
        each.child, each.is_ready, each.problem, each.start_s = None, False, reason, now_s + delay_s
        self._tell(each)
        self._start_next()

    def _tell(self, each: _Supervised) -> None:
        """Send the state of `serve` to whom it concerns: all programs once it changes, and one that is ready."""
        serve = self._serve
        if each is serve:
            self._manager.ready()
        for told in self._all if each is serve else [each]:
            if told.program.is_told and told.child is not None:
                told.child.send(encode(ServeState(serve.problem, serve.is_ready)))

    def _start_next(self) -> None:
        if self._waiting:
            self._start(self._waiting.pop(0))

    def _stop(self) -> None:
        """End the programs in order, the last one first, and the job."""
        for each in reversed(self._all):
            if each.child is not None:
                each.child.terminate()
                if not each.child.wait(STOP_S):
                    each.child.kill()
                    each.child.wait(1.0)
        self._jobs.stop()


def _is_alive(each: _Supervised) -> bool:
    if each.child is None or each.alive_s is None:
        return True
    return time.monotonic() - each.alive_s < SILENT_INTERVALS * service_manager.INTERVAL_S
