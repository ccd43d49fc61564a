"""Opening a state directory, whose tables are in SQLite or PostgreSQL."""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec

from aggregator.storage import schema
from aggregator.storage.blobs import blobs_of
from aggregator.storage.store import FleetDatabase, Store
from aggregator.storage.stored_values import ServedTask
from protocol.cli import require_packages
from protocol.errors import ConfigError, ProtofleetError, StateError
from protocol.storage.blobstore import delete_temporary_files, state_errors, write_atomically
from protocol.storage.database import Database
from protocol.storage.elapsed_clock import machine_time
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
    """A fleet's place in a PostgreSQL database, by a URL without a password."""

    database: str
    fleet: str


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
            read_only=read_only,
            lock=lock,
            holds_lock=is_leader,
            advice=_ADVICE,
        )
        self._open_files, self._damage = self._files(), ""

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

    def snapshot(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """Let all reads of the body see the file as it is at the first of them, whatever other processes write."""
        return self.transaction("DEFERRED")

    def check_file(self) -> None:
        """Raise StateError if what is written is lost: the file was deleted or replaced, or `check` found damage."""
        files = self._files()
        if any(files.get(path) != identity for path, identity in self._open_files.items()):
            raise StateError(
                f"cannot use {self.path}: it was deleted or replaced while `aggregator run` was running: stop "
                f"`aggregator run`, {_ADVICE}"
            )
        if self._damage:
            raise StateError(self._damage)

    def check(self) -> None:
        """Do what `check_file` does, after a search for damage in the file's structure."""
        self._damage = ""
        self.check_file()
        try:
            self._search_damage()
        except StateError as error:
            self._damage = str(error)
            raise

    def _search_damage(self) -> None:
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
    standby: Callable[[str], None] | None = None,
) -> Store:
    """Open the aggregator's state directory, created if missing.

    Args:
        folder: the state directory.
        read_only: read the state of an aggregator that may be running.
        lock: keep other aggregators out until `close`. Without it, the state of a running aggregator can be changed,
            but not migrated.
        blobs: s3://BUCKET/PREFIX, or empty: then the blobs are where they were before, at first in the directory.
        database: a URL of PostgreSQL (`postgresql://[USER@]HOST[:PORT]/DATABASE`), which holds the tables in place of
            an SQLite file. The directory remembers it.
        fleet: the fleet's name, which is checked; necessary for a new `database`.
        standby: with `lock`, called about every second while another aggregator leads the fleet on PostgreSQL, with its
            machine's name; it may raise. None to raise StateError instead of waiting.

    Raises:
        ConfigError: the directory is a device's, another fleet's or among Python source files, or the URL or the blobs
            cannot be used.
        RuntimeMissing: psycopg is not installed.
        StateError: the state cannot be used, another protofleet wrote it, or another aggregator has locked it.
    """
    location = Location(database, fleet) if database else recorded_location(folder)
    if location is not None and fleet:
        _check_fleet(folder, fleet, location.fleet)
    folder_lock = FolderLock(folder)
    opened: FleetDatabase
    if location is None:
        opened = SqliteDatabase(folder, read_only=read_only, lock=folder_lock, is_leader=lock)
    else:
        opened = _open_postgresql(
            folder, location, read_only=read_only, lock=folder_lock if lock else None, standby=standby
        )
    try:
        if lock:
            delete_temporary_files(folder)
        served = Facts(opened).get(ServedTask)
        if fleet and served is not None:
            _check_fleet(folder, fleet, served.fleet)
        store = Store(folder, opened, read_only=read_only)
        if lock and served is not None:
            store.require_blobs()
        if not read_only:
            store.blobs = blobs_of(folder, store.facts, blobs)
    except BaseException:
        opened.close()
        raise
    return store


def _open_postgresql(
    folder: Path,
    location: Location,
    *,
    read_only: bool,
    lock: FolderLock | None,
    standby: Callable[[str], None] | None,
) -> FleetDatabase:
    _check_url(location.database)
    if not location.fleet:
        raise ConfigError("expected the name of the fleet whose tables --store holds: give --task")
    require_packages("psycopg", extras="cluster")
    from aggregator.storage.postgresql import PostgresDatabase
    from aggregator.storage.postgresql_lead import LeadingDatabase

    before = recorded_location(folder)
    if not read_only:
        make_state_folder(folder)
        _record(folder, location)  # at once: other commands use it while this one is a standby
    try:
        if lock is not None:
            return LeadingDatabase(location.database, fleet=location.fleet, lock=lock, standby=standby)
        return PostgresDatabase(location.database, fleet=location.fleet, read_only=read_only)
    except ProtofleetError:
        if not read_only and before is not None:
            _record(folder, before)  # the new URL may be mistyped
        raise


def _check_url(url: str) -> None:
    expected = "expected postgresql://[USER@]HOST[:PORT]/DATABASE for --store"
    try:
        parts = urlsplit(url)
        has_password = parts.password is not None or "password" in parse_qs(parts.query)
    except ValueError:
        raise ConfigError(expected) from None
    if has_password:
        raise ConfigError("the URL of --store has a password: set PGPASSWORD, or write it into ~/.pgpass")
    if parts.scheme not in {"postgresql", "postgres"}:
        raise ConfigError(expected)


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


def _record(folder: Path, location: Location) -> None:
    if (file := database_of("aggregator", folder)).is_file():
        raise ConfigError(f"{file} holds this aggregator's state: give --store with another --state")
    before = recorded_location(folder)
    if before is not None:
        _check_fleet(folder, location.fleet, before.fleet)
    if before != location:
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
