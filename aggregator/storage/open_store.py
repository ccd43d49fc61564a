"""Opening a state directory, whose tables are an SQLite file in it, or elsewhere."""

import contextlib
import sqlite3
from pathlib import Path

import msgspec

from aggregator.cluster_modules import DATABASES, cluster_module
from aggregator.storage import schema
from aggregator.storage.blobs import blobs_of
from aggregator.storage.store import FleetDatabase, Store
from aggregator.storage.stored_values import ServedTask
from protocol.errors import ConfigError, StateError
from protocol.storage.blobstore import delete_temporary_files, state_errors, write_atomically
from protocol.storage.database import Database
from protocol.storage.elapsed_clock import ElapsedClock
from protocol.storage.facts import Facts
from protocol.storage.folder_lock import FolderLock
from protocol.storage.state_folder import database_of, make_state_folder

_FILE = "store.json"

_ADVICE = (
    "restore it from a backup; without one, move aggregator.sqlite* away and keep identity/: devices send their "
    "submissions again, in a closed fleet after `aggregator enroll DEVICE --renew`"
)
"""Advice for a damaged database."""


class Location(msgspec.Struct, frozen=True):
    """A fleet's place in a database elsewhere, by a URL without a password."""

    database: str
    fleet: str


class SqliteDatabase(Database):
    """The tables of one aggregator, in its state directory.

    Args:
        folder: the state directory, created unless `read_only`.
        read_only: read an existing file.
        lock: taken while the file is opened, or with `holds_lock` until `close`.
        holds_lock: this program is the aggregator.

    Raises:
        StateError: there is no file to read, it cannot be used, or another aggregator has locked the directory.
    """

    def __init__(self, folder: Path, *, read_only: bool, lock: FolderLock, holds_lock: bool) -> None:
        self._folder_lock = lock
        file = database_of("aggregator", folder)
        if not read_only:
            make_state_folder(folder)
        elif not file.is_file():
            if not (folder / "blobs").is_dir():
                raise StateError(f"no aggregator state in {folder}: give the --state of `aggregator run`")
            raise StateError(
                f"cannot use {file}: it is missing, although `aggregator run` has used it: {_ADVICE}"
            )
        super().__init__(
            file,
            program="aggregator run",
            migrations=schema.MIGRATIONS,
            base=schema.BASE_VERSION,
            read_only=read_only,
            lock=lock,
            holds_lock=holds_lock,
            advice=_ADVICE,
        )
        self._open_files, self._damage = self._files(), ""

    def is_locked(self) -> bool:
        return self._folder_lock.is_taken()

    def leader(self) -> str:
        return ""

    def may_connect(self) -> bool:
        return True

    def check_folder(self) -> None:
        """Do nothing: the tables are in the state directory."""

    def clock(self, facts: Facts) -> ElapsedClock:
        return ElapsedClock(facts, read_only=self._read_only)

    def snapshot(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """Let all reads of the body see the file as it is at the first of them, whatever is written meanwhile."""
        return self.transaction("DEFERRED")

    def check_file(self) -> None:
        """Raise StateError if what is written is lost: the file was deleted, replaced, or found damaged."""
        files = self._files()
        if any(files.get(path) != identity for path, identity in self._open_files.items()):
            raise StateError(
                f"cannot use {self.path}: it was deleted or replaced while `aggregator run` was running: stop "
                f"`aggregator run`, {_ADVICE}"
            )
        if self._damage:
            raise StateError(self._damage)

    def search_damage(self) -> None:
        """Search for damage in the file's structure, on any thread; `check_file` reports it from then on."""
        try:
            self._examine()
        except StateError as error:
            self._damage = str(error)

    def _examine(self) -> None:
        """Read the whole file by a connection that has nothing of it in memory."""
        uri = self._uri("ro")
        with self._errors(), contextlib.closing(sqlite3.connect(uri, uri=True, timeout=10)) as database:
            self._check_version(database)
            ((found,),) = database.execute("PRAGMA quick_check(1)")
        if found != "ok":
            raise self._damaged(" ".join(found.split()))

    def _files(self) -> dict[Path, tuple[int, int]]:
        """Return device and inode of the file and its write-ahead log."""
        files = {}
        for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            with contextlib.suppress(OSError):
                status = path.stat()
                files[path] = (status.st_dev, status.st_ino)
        return files


def open_store(
    folder: Path,
    *,
    read_only: bool = False,
    lock: bool = False,
    blobs: str = "",
    database: str = "",
    fleet: str = "",
) -> Store:
    """Open the aggregator's state directory, created if missing.

    Args:
        folder: the state directory.
        read_only: read the state of an aggregator that may be running.
        lock: keep other programs that write out until `close`: an aggregator, and a command while none runs.
        blobs: a URL of `cluster_modules.BLOBS`, or empty: then the blobs are where they were before, at first in the
            directory.
        database: a URL of `cluster_modules.DATABASES`, which holds the tables in place of an SQLite file. The
            directory remembers it.
        fleet: the fleet's name, which is checked; necessary for a new `database`.

    Raises:
        ConfigError: the directory is a device's, another fleet's or among Python source files, or the URL or the blobs
            cannot be used.
        RuntimeMissing: the libraries for a URL are not installed.
        StateError: the state cannot be used, another protofleet wrote it, or another aggregator has locked it.
    """
    location = Location(database, fleet) if database else recorded_location(folder)
    if location is not None and fleet:
        _check_fleet(folder, fleet, location.fleet)
    opened: FleetDatabase
    if location is None:
        opened = SqliteDatabase(folder, read_only=read_only, lock=FolderLock(folder), holds_lock=lock)
    else:
        opened = _open_elsewhere(folder, location, read_only=read_only, lock=lock)
    try:
        if lock:
            delete_temporary_files(folder)
        served = Facts(opened).get(ServedTask)
        if fleet and served is not None:
            _check_fleet(folder, fleet, served.fleet)
        store = Store(folder, opened)
        if not read_only:
            store.blobs = blobs_of(folder, store.facts, blobs)
    except BaseException:
        opened.close()
        raise
    return store


def _open_elsewhere(folder: Path, location: Location, *, read_only: bool, lock: bool) -> FleetDatabase:
    module = cluster_module(DATABASES, location.database)
    module.check_url(location.database)
    if not location.fleet:
        raise ConfigError("expected the name of the fleet whose tables --store holds: give --task")
    before = recorded_location(folder)
    if not read_only:
        make_state_folder(folder)
        _check_recordable(folder, location, before)
        if before is None:
            _record(folder, location)  # at once: other commands use it while this one waits
    opened: FleetDatabase = module.open_database(
        location.database, fleet=location.fleet, folder=folder, read_only=read_only, lock=lock
    )
    if not read_only and before != location:  # only now: the new URL may be mistyped
        _record(folder, location)
    return opened


def recorded_location(folder: Path) -> Location | None:
    """Return where the database of a state directory is; None if it is the SQLite file in it. Raises StateError."""
    file = folder / _FILE
    with state_errors(file):
        data = file.read_bytes() if file.exists() else None
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=Location)
    except msgspec.MsgspecError as error:
        raise StateError(f"cannot use {file}: {error}: start `aggregator run --store` on it again") from error


def _check_recordable(folder: Path, location: Location, before: Location | None) -> None:
    if (file := database_of("aggregator", folder)).is_file():
        raise ConfigError(f"{file} holds this aggregator's state: give --store with another --state")
    if before is not None:
        _check_fleet(folder, location.fleet, before.fleet)


def _record(folder: Path, location: Location) -> None:
    with state_errors(folder):
        write_atomically(folder / _FILE, msgspec.json.encode(location))


def _check_fleet(folder: Path, fleet: str, known: str) -> None:
    if fleet != known:
        raise ConfigError(
            f"{folder} holds the state of fleet {known!r}, not {fleet!r}: give {fleet!r} its own --state"
        )


def has_database(folder: Path) -> bool:
    """Return True if an aggregator has used a state directory."""
    return recorded_location(folder) is not None or database_of("aggregator", folder).is_file()
