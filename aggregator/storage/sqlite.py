"""The aggregator's tables in the SQLite file of its state directory."""

from pathlib import Path

from aggregator.storage import schema
from protocol.errors import StateError
from protocol.storage.database import Database
from protocol.storage.database_file import DatabaseFile
from protocol.storage.elapsed_clock import machine_time
from protocol.storage.folder_lock import FolderLock
from protocol.storage.state_folder import database_of, make_state_folder

_ADVICE = (
    "restore it from a backup; without one, move aggregator.sqlite* away and keep identity/: devices send their "
    "submissions again, in a closed fleet after `aggregator enroll DEVICE --renew`"
)
"""Advice for a damaged database."""


class SqliteDatabase(Database):
    """The tables of one aggregator, which leads its fleet alone; `PostgresDatabase` has the same methods.

    Args:
        folder: the state directory, created unless `read_only`.
        read_only: read an existing file.
        lock: taken while the file is opened, or with `is_leader` until `close`.
        is_leader: this program is the aggregator.

    Raises:
        StateError: there is no file to read, it cannot be used, or another aggregator has locked the directory.
    """

    is_shared = False

    def __init__(self, folder: Path, *, read_only: bool, lock: FolderLock, is_leader: bool) -> None:
        self._folder_lock = lock
        file = database_of("aggregator", folder)
        if read_only:
            _check_exists(file)
        else:
            make_state_folder(folder)
        super().__init__(
            DatabaseFile(
                path=file,
                program="aggregator run",
                migrations=schema.MIGRATIONS,
                read_only=read_only,
                lock=None if is_leader else lock,
                advice=_ADVICE,
            ),
            held=lock if is_leader else None,
        )

    def is_locked(self) -> bool:
        return self._folder_lock.is_taken()

    def leader(self) -> str:
        return ""

    def leads(self) -> bool:
        """Return True: no other aggregator can use the file."""
        return True

    def check_lead(self) -> None:
        """Do nothing, as `leads` is always True."""

    def machine_time(self) -> tuple[str, float]:
        return machine_time()


def _check_exists(file: Path) -> None:
    if file.is_file():
        return
    if (file.parent / "blobs").is_dir():
        raise StateError(
            f"cannot use {file}: it is missing, although `aggregator run` has used it: {_ADVICE}"
        )
    raise StateError(f"no aggregator state in {file.parent}: give the --state of `aggregator run`")
