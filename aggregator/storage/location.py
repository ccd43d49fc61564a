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
        ConfigError: the directory has an SQLite file.
        StateError: the record cannot be written.
    """
    if (file := database_of("aggregator", folder)).is_file():
        raise ConfigError(f"{file} holds this aggregator's state: give --store with another --state")
    if recorded(folder) != location:
        with state_errors(folder):
            write_atomically(folder / _FILE, msgspec.json.encode(location))


def has_database(folder: Path) -> bool:
    """Return True if an aggregator has used a state directory."""
    return recorded(folder) is not None or database_of("aggregator", folder).is_file()
