"""A program of `aggregator run`: what it and its supervisor send each other, and its end with one sentence."""

import logging
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from aggregator import EXTRAS
from aggregator.job_processes import JobEnded, JobOrder, StopJob
from protocol import service_manager
from protocol.children import connect
from protocol.cli import problem_of
from protocol.errors import ConfigError, RuntimeMissing, StateRefused

log = logging.getLogger(__name__)

Settings = TypeVar("Settings", bound=msgspec.Struct)


class Notified(msgspec.Struct, frozen=True, tag=True):
    """A program is ready, or its main loop runs, as a service manager is told it."""

    state: service_manager.State


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A program ends because of a failure."""

    reason: str
    is_final: bool
    """A restart cannot mend it."""


FromProgram = Notified | Failed | JobOrder | StopJob
"""Only `serve` has jobs."""


class ServeState(msgspec.Struct, frozen=True):
    """The state of `serve`, as the supervisor sends it to other programs."""

    problem: str
    """Why it has ended; empty once it is ready."""
    is_ready: bool


class RunningJob(msgspec.Struct, frozen=True):
    """The second message to `serve`, after its settings."""

    folder: Path | None
    """Of the job that runs."""
    ended: JobEnded | None
    """The end of the last job: no `serve` has heard it perhaps."""


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message on the pipe; a path is its text."""
    return msgspec.msgpack.encode(message, enc_hook=str)


def decode(data: bytes, kind: Any) -> Any:
    """Return the message of `encode`, of a type or one of several."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_path)


def _path(_kind: type, text: Any) -> Path:
    return Path(text)


def run_program(kind: type[Settings], run: Callable[[Settings, Connection], None]) -> NoReturn:
    """Run the program of this process with the settings that the supervisor sends first.

    SIGTERM ends it with status 0; the supervisor hears of any other end why.
    """
    pipe = connect(sys.argv[1:], oom_score=None)
    service_manager.notify = lambda state: pipe.send_bytes(encode(Notified(state)))
    service_manager.stop_on_terminate()
    try:
        run(decode(pipe.recv_bytes(), kind), pipe)
    except Exception as error:
        pipe.send_bytes(encode(failure_of(error)))
        sys.exit(1)
    sys.exit()


def failure_of(error: Exception) -> Failed:
    """Return the failure that ends a program; log the stack trace of an error of the program itself."""
    if not (reason := problem_of(error, EXTRAS)):
        log.critical("the program has failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
    return Failed(
        reason, isinstance(error, ConfigError | RuntimeMissing | StateRefused | ModuleNotFoundError)
    )
