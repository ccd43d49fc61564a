"""Where the database of a state directory is: in the directory itself, or in PostgreSQL."""

from pathlib import Path

import msgspec

from protocol.errors import ConfigError, StateError
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.storage.state_folder import database_of

_FILE = "store.json"


class Location(msgspec.Struct, frozen=True):
    """A fleet's place in a PostgreSQL database, by a URL without a password."""

    database: str
    fleet: str
    newest: int = 0
    """Number of changes that an aggregator of this directory has seen at its last start or end."""


def recorded(folder: Path) -> Location | None:
    """Return where the database of a state directory is; None if it is the SQLite file in it.

    Raises:
        StateError: the record cannot be read.
    """
    file = folder / _FILE
    with state_errors(file):
        data = file.read_bytes() if file.exists() else None
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=Location)
    except msgspec.MsgspecError as error:
        raise StateError(f"cannot use {file}: {error}: start `aggregator run --store` on it again") from error


def record(folder: Path, location: Location) -> None:
    """Store where the database of a state directory is, for the other commands.

    Raises:
        ConfigError: the directory has an SQLite file, or holds another fleet.
        StateError: the record cannot be written.
    """
    if (file := database_of("aggregator", folder)).is_file():
        raise ConfigError(f"{file} holds this aggregator's state: give --store with another --state")
    before = recorded(folder)
    if before is not None:
        check_fleet(folder, location.fleet, before.fleet)
        location = msgspec.structs.replace(location, newest=before.newest)
    if before != location:
        with state_errors(folder):
            write_atomically(folder / _FILE, msgspec.json.encode(location))


def record_newest(folder: Path, newest: int) -> int:
    """Store the number of changes in the database; returns how many it lacks of those that were seen before.

    Raises:
        StateError: the record cannot be read or written.
    """
    before = recorded(folder)
    if before is None or before.newest == newest:
        return 0
    with state_errors(folder):
        write_atomically(folder / _FILE, msgspec.json.encode(msgspec.structs.replace(before, newest=newest)))
    return max(0, before.newest - newest)


def check_fleet(folder: Path, fleet: str, known: str) -> None:
    """Raise ConfigError unless the fleet is the one that a state directory holds."""
    if fleet != known:
        raise ConfigError(
            f"{folder} holds the state of fleet {known!r}, not {fleet!r}: give {fleet!r} its own --state"
        )


def has_database(folder: Path) -> bool:
    """Return True if an aggregator has used a state directory."""
    return recorded(folder) is not None or database_of("aggregator", folder).is_file()
