"""The program `serve` of `aggregator run`: it owns the state directory, and serves the fleet."""

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from aggregator.job_processes import JobEnded, JobEvent, JobOrder, StopJob
from aggregator.supervised import RunningJob, decode, encode, run_program
from protocol.errors import ProtofleetError, StateError, ThreadFailed
from protocol.log import event
from protocol.mqtt.tls import BrokerAccess, BrokerAddress
from protocol.threads import start_thread

log = logging.getLogger(__name__)

LOCK_S = 10.0
"""Time for the program of a supervisor that was killed to release the state directory."""


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the program."""

    task: Path
    state: Path
    blobs: str
    database: str
    brokers: tuple[BrokerAddress, ...]
    access: BrokerAccess
    verbose: bool
    http_files: tuple[Path, Path] | None = None
    """Certificate and key of the HTTP server, which this program examines: it has the library."""


class SupervisedJobs:
    """The jobs of `serve`, which its supervisor runs: they go on when `serve` is started again."""

    def __init__(self, pipe: Connection, on_event: Callable[[JobEvent | ThreadFailed], None]) -> None:
        self._pipe = pipe
        self._on_event = on_event
        before: RunningJob = decode(pipe.recv_bytes(), RunningJob)
        self.folder, self.ended = before.folder, before.ended
        start_thread(self._hear, name="supervisor", on_failure=on_event)

    def start(self, order: JobOrder) -> None:
        self.folder, self.ended = order.folder, None
        self._pipe.send_bytes(encode(order))

    def stop(self) -> None:
        self._pipe.send_bytes(encode(StopJob()))

    def _hear(self) -> None:
        with contextlib.suppress(EOFError):  # this process ends with its supervisor
            while True:
                said: JobEvent = decode(self._pipe.recv_bytes(), JobEvent)
                if isinstance(said, JobEnded) and said.folder == self.folder:
                    self.ended, self.folder = said, None
                self._on_event(said)


def run(settings: ServeSettings, pipe: Connection) -> None:
    """Serve until SIGTERM.

    Raises:
        ConfigError: the task or another setting cannot be used.
        RuntimeMissing: a package is not installed.
        StateError: the state directory cannot be used.
        ThreadFailed: a thread that it depends on has ended.
    """
    from protocol.cli import start_logging

    start_logging(verbose=settings.verbose)
    from aggregator.cluster_modules import ENGINES, cluster_module
    from aggregator.config.task_file import class_name_notes, load_task
    from aggregator.config.training_packages import require_packages_of
    from aggregator.server.aggregator import prepare, serve
    from aggregator.storage.open_store import open_store
    from protocol.mqtt.tls import server_warnings, warnings

    of_http = server_warnings(*settings.http_files) if settings.http_files is not None else []
    for warning in [*warnings(settings.access, settings.brokers), *of_http]:
        log.warning("%s", warning)
    task_file, backbones = load_task(settings.task)
    require_packages_of(task_file)
    for note in class_name_notes(task_file.classes):
        log.warning("class names: %s", note)
    if (engine := task_file.training.engine) in ENGINES:
        cluster_module(ENGINES, engine).require()
    state = settings.state
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    jobs = SupervisedJobs(pipe, events.put)
    wait_for_folder(state)

    opened = open_store(
        state, lock=True, blobs=settings.blobs, database=settings.database, fleet=task_file.fleet
    )
    with contextlib.closing(opened) as store, reason_kept(state):
        prepared, access = prepare(task_file, backbones, store, settings.access)
        serve(prepared, store, broker=settings.brokers, access=access, events=events, jobs=jobs)


def wait_for_folder(state: Path) -> None:
    """Wait until an earlier program that is ending has released a state directory, so long at most."""
    from protocol.storage.folder_lock import FolderLock

    lock, deadline_s = FolderLock(state), time.monotonic() + LOCK_S
    if lock.is_taken():
        event(log, logging.INFO, "waiting for another program to release the state directory", state=state)
        while lock.is_taken() and time.monotonic() < deadline_s:
            time.sleep(0.1)


@contextlib.contextmanager
def reason_kept(state: Path) -> Iterator[None]:
    """Leave the reason of a failure where `aggregator status` reads it, also on a full disk."""
    from aggregator.storage import stop_reason

    try:
        yield
    except ProtofleetError as error:
        with contextlib.suppress(StateError):
            stop_reason.write(state, stop_reason.StopReason(time.time(), str(error)))
        raise


if __name__ == "__main__":
    run_program(ServeSettings, run)
