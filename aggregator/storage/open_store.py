"""Opening a state directory, whose tables are in SQLite or PostgreSQL."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec

from aggregator.storage.blobs import blobs_of
from aggregator.storage.sqlite import SqliteDatabase
from aggregator.storage.store import FleetDatabase, Store
from aggregator.storage.stored_values import ServedTask
from protocol.cli import require_packages
from protocol.errors import ConfigError, ProtofleetError, StateError
from protocol.storage.blobstore import delete_temporary_files, state_errors, write_atomically
from protocol.storage.facts import Facts
from protocol.storage.folder_lock import FolderLock
from protocol.storage.state_folder import database_of, make_state_folder

_FILE = "store.json"


class Location(msgspec.Struct, frozen=True):
    """A fleet's place in a PostgreSQL database, by a URL without a password."""

    database: str
    fleet: str


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
        if lock:
            store.require_served_blobs()
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
        raise ConfigError("expected the name of the fleet whose tables --store holds: give --fleet")
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
