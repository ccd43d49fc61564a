"""A command's access to a state directory: through the aggregator that runs on it, or with its lock."""

import contextlib
import os
import platform
import pwd
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from aggregator.commands.command_socket import is_listening, send_command
from aggregator.commands.writes import WRITES
from aggregator.security.device_keys import KeyChange
from aggregator.storage.open_store import open_store, recorded_location
from aggregator.storage.store import Store
from protocol.errors import ConfigError, StateError, StateLocked
from protocol.storage.folder_lock import FolderLock

START_S = 10.0
"""Time for a program that has the lock to take commands, or to release it: an aggregator that starts or ends."""

POLL_S = 0.1


@dataclass(frozen=True)
class Session:
    """A state directory, which the running aggregator writes or, if none runs, this program."""

    store: Store
    """Read only if an aggregator runs."""
    is_running: bool

    def carry_out(self, command: str, arguments: msgspec.Struct) -> Sequence[str]:
        """Write what a command of `WRITES` changes; return what to print, a sentence each.

        Raises:
            ConfigError: the command is impossible.
            Unanswered: the running aggregator has ended before it answered.
            StateError: the state cannot be written.
        """
        if self.is_running:
            return send_command(self.store.folder, command, arguments)
        return WRITES[command].run(self.store, arguments) or ()

    @property
    def change_keys(self) -> Callable[[KeyChange], object] | None:
        """How the running aggregator stores a change (`security.enrollment.Write`); None if none runs."""
        return partial(self.carry_out, "change-keys") if self.is_running else None


@contextlib.contextmanager
def open_session(folder: Path, *, fleet: str = "", may_create: bool = False) -> Iterator[Session]:
    """Open a state directory for a command.

    Args:
        folder: the state directory.
        fleet: the fleet's name, which is checked.
        may_create: create the state if there is none.

    Raises:
        ConfigError: the aggregator runs on another machine, the directory is another user's or another fleet's, or
            lacks what belongs to the fleet's tables.
        StateError: there is no state, it cannot be used, or another program keeps it locked.
    """
    if not may_create:  # it raises where there is none
        with contextlib.closing(open_store(folder, read_only=True)) as found:
            found.database.check_folder()
    require_owner(folder)
    is_running, store = _opened(folder, fleet)
    with contextlib.closing(store):
        yield Session(store, is_running)


def _opened(folder: Path, fleet: str) -> tuple[bool, Store]:
    """Return True and the state to read if an aggregator takes commands, or False and the state with its lock."""
    deadline_s, is_first = time.monotonic() + START_S, True
    while not is_listening(folder):
        is_locked, is_late = FolderLock(folder).is_taken(), time.monotonic() > deadline_s
        if is_first or is_late or not is_locked:
            _require_no_leader(folder, may_start=is_locked and not is_late)
        if not is_locked:
            with contextlib.suppress(StateLocked):
                return False, open_store(folder, lock=True, fleet=fleet)
        elif is_late:
            raise StateError(
                f"another program uses {folder} and takes no commands, such as an aggregator that starts: try again"
            )
        is_first = False
        time.sleep(POLL_S)
    return True, open_store(folder, read_only=True, fleet=fleet)


def _require_no_leader(folder: Path, *, may_start: bool) -> None:
    """Raise ConfigError if the aggregator of the fleet, whose tables are elsewhere, uses another state directory.

    With `may_start`, the one on this machine may have begun to lead, and take commands soon.
    """
    if recorded_location(folder) is None:
        return
    with contextlib.closing(open_store(folder, read_only=True)) as store:
        leader = store.database.leader()
    is_here = platform.node().startswith(leader)
    if leader and not (is_here and may_start):
        where = "with its --state" if is_here else "there"
        raise ConfigError(f"the aggregator that leads the fleet runs on {leader}: run the command {where}")


def require_owner(folder: Path) -> None:
    """Refuse to run as root in another user's folder, where the aggregator could not read the files.

    Raises:
        ConfigError: root runs this in another user's folder.
    """
    if os.geteuid() == 0 and folder.is_dir() and (owner := folder.stat().st_uid) != 0:
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = f"#{owner}"
        raise ConfigError(
            f"{folder} belongs to {name}, who could not read files written by root: run it with sudo -u {name}"
        )
