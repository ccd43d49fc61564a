"""The program `serve` of `aggregator run`: it owns the state directory, and serves the fleet."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aggregator import EXTRAS
from aggregator.supervised import run_program
from protocol.errors import ConfigError, ProtofleetError, StateError
from protocol.log import event
from protocol.mqtt.tls import BrokerAccess, BrokerAddress

if TYPE_CHECKING:
    from aggregator.storage.store import Store

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


def run(settings: ServeSettings, _pipe: Connection) -> None:
    """Serve until SIGTERM.

    Raises:
        ConfigError: the task or another setting cannot be used.
        RuntimeMissing: a package is not installed.
        StateError: the state directory cannot be used.
        ThreadFailed: a thread that it depends on has ended.
    """
    from protocol.cli import require_packages, start_logging

    start_logging(verbose=settings.verbose)
    from aggregator.config.task_file import class_name_notes, load_task
    from aggregator.config.training_packages import require_packages_of
    from aggregator.server.aggregator import prepare, serve
    from aggregator.server.standby import Standby, until_answered
    from aggregator.storage.open_store import open_store

    task_file, backbones = load_task(settings.task)
    require_packages_of(task_file)
    for note in class_name_notes(task_file.classes):
        log.warning("class names: %s", note)
    if task_file.training.engine == "ray":
        require_packages("ray", extras=f"{EXTRAS},ray")
        if not os.environ.get("RAY_ADDRESS"):
            raise ConfigError('engine = "ray" needs a cluster: set RAY_ADDRESS=HOST:PORT')
    wait_for_folder(settings.state)
    standby = Standby(settings.state)

    def open_to_lead() -> "Store":
        return open_store(
            settings.state,
            lock=True,
            blobs=settings.blobs,
            database=settings.database,
            fleet=task_file.fleet,
            standby=standby.wait,
        )

    def lead() -> None:
        with contextlib.closing(standby.open(open_to_lead)) as store, reason_kept(settings.state):
            prepared, access = prepare(task_file, backbones, store, settings.access)
            serve(prepared, store, broker=settings.brokers, access=access)

    until_answered(lambda: standby.repeat(lead))


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
    from aggregator.intake import intake_status

    try:
        yield
    except ProtofleetError as error:
        with contextlib.suppress(StateError):
            intake_status.write(state, intake_status.IntakeStatus(time.time(), str(error)))
        raise


if __name__ == "__main__":
    run_program(ServeSettings, run)
