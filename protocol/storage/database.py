"""SQLite files: opened in WAL mode, locked, migrated, and written in durable transactions."""

import contextlib
import logging
import sqlite3
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from protocol.errors import StateError
from protocol.log import event
from protocol.storage.blobstore import create_atomically, state_errors
from protocol.storage.folder_lock import FolderLock

log = logging.getLogger(__name__)

Value = TypeVar("Value")

_PRAGMAS = {"journal_mode": "WAL", "synchronous": "FULL", "journal_size_limit": 2**20}


class Database:
    """An SQLite file that the threads of a program share.

    All methods raise StateError if SQLite cannot read or write the file.

    Args:
        file: created if it does not exist, unless `read_only`.
        program: the command that writes the file, for error messages.
        migrations: SQL scripts that each bring the schema from one version to the next, beginning with an empty
            file; every statement ends its line. `PRAGMA user_version` holds how many of them have run.
        read_only: open an existing file without changing it, even while another process writes it.
        lock: the folder's lock. With `exclusive` it is taken before the file is opened and held until `close`; else it
            is taken while the file is migrated, which another program that holds the lock prevents. None for a file
            that no running program of another version can have open.
        is_cache: the contents can be computed again. A damaged file is renamed to `.damaged` and created anew; a
            file of another schema version is deleted and created anew.
        advice: what to do if the file is damaged, for error messages.
        pragmas: set before or in place of WAL, synchronous FULL, and 1 MiB for the log between transactions.

    Raises:
        StateError: the file cannot be used, has another schema version, or another process holds the lock.
    """

    def __init__(  # noqa: PLR0913 - all but the first are of the few files that exist
        self,
        file: Path,
        *,
        program: str,
        migrations: Sequence[str],
        read_only: bool = False,
        lock: FolderLock | None = None,
        exclusive: bool = False,
        is_cache: bool = False,
        advice: str = "restore it from a backup, or use another --state",
        pragmas: Mapping[str, str | int] | None = None,
    ) -> None:
        self.file = file
        self._program = program
        self._migrations = migrations
        self._read_only = read_only
        self._is_cache = is_cache
        self._advice = advice
        # Those of the caller first: auto_vacuum has no effect once the file has pages.
        self._pragmas = {} if read_only else {**(pragmas or {}), **_PRAGMAS, **(pragmas or {})}
        self._thread_lock = threading.RLock()
        self._lock = lock
        self._exclusive = exclusive and lock is not None
        if exclusive and lock is not None and not lock.take():
            raise StateError(f"`{program}` already runs on {file.parent}: stop it, or use another --state")
        try:
            with self._errors():
                self._db = self._open()
            self._open_files, self._damage = self._files(), ""
        except BaseException:
            self._release()
            raise

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not (self._is_cache and _is_damage(error)):
                raise
        self._move_damaged()
        return self._connect()

    def _connect(self) -> sqlite3.Connection:
        self._create_whole()
        mode = "ro" if self._read_only else "rwc"
        uri = f"file:{urllib.parse.quote(str(self.file))}?mode={mode}"
        database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10, check_same_thread=False)
        try:
            for name, value in self._pragmas.items():
                database.execute(f"PRAGMA {name} = {value}")
            if not self._read_only and self._is_outdated(database):
                with self._migration_lock(database):
                    self._migrate(database)
            self._check_version(database)
        except BaseException:
            database.close()
            raise
        return database

    def _create_whole(self) -> None:
        """Write a file that does not exist, whole or not at all: an empty one is damaged, and no new state.

        It is for its owner only, in a folder that other users may read too; SQLite's other files have the same mode.
        """
        with state_errors(self.file):
            size = self.file.stat().st_size if self.file.exists() else None
        if size == 0 and not self._is_cache:
            raise self._empty()
        if size is not None or self._read_only:
            return
        is_held = self._lock is not None and not self._exclusive and self._lock.take()
        try:
            if not self.file.exists():  # another process may have written it meanwhile
                create_atomically(self.file, self._new_contents(), mode=0o600)
        finally:
            if is_held and self._lock is not None:
                self._lock.release()

    def _new_contents(self) -> bytes:
        with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
            for name, value in self._pragmas.items():
                database.execute(f"PRAGMA {name} = {value}")
            self._migrate(database)
            return database.serialize()

    def _is_outdated(self, database: sqlite3.Connection) -> bool:
        version, expected = _version(database), len(self._migrations)
        return version < expected or (self._is_cache and version != expected)

    @contextlib.contextmanager
    def _migration_lock(self, database: sqlite3.Connection) -> Iterator[None]:
        """Hold the folder's lock, so that the schema does not change under a running program of another version."""
        if self._lock is None or self._exclusive:
            yield
        elif self._lock.take():
            try:
                yield
            finally:
                self._lock.release()
        elif self._is_outdated(database):
            raise StateError(
                f"{self._found(database)}, and `{self._program}` of an older protofleet runs on it: stop it, and start "
                "it with this version"
            )
        else:
            yield  # the running program has migrated it meanwhile

    def _migrate(self, database: sqlite3.Connection) -> None:
        expected = len(self._migrations)
        with _transaction(database, "IMMEDIATE"):
            version = _version(database)  # again: another process may have migrated the file meanwhile
            if self._is_cache and version != expected:
                _drop_tables(database)
                version = 0
            for script in self._migrations[version:]:
                for statement in _statements(script):
                    database.execute(statement)
            database.execute(f"PRAGMA user_version = {max(version, expected)}")

    def _check_version(self, database: sqlite3.Connection) -> None:
        version, expected = _version(database), len(self._migrations)
        if version > expected:
            raise StateError(f"{self._found(database)}: upgrade protofleet here, or use another --state")
        if not version:
            raise self._empty()
        if version < expected:
            raise StateError(f"{self._found(database)}: start `{self._program}` on it once")

    def _empty(self) -> StateError:
        return StateError(f"cannot use {self.file}: damaged: it is empty: {self._advice}")

    def _found(self, database: sqlite3.Connection) -> str:
        return f"{self.file} has schema version {_version(database)}, expected {len(self._migrations)}"

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self.connection() as database:
            return database.execute(query, values).fetchall()

    def decode(self, text: str, kind: type[Value]) -> Value:
        """Return the value of a JSON text in the file; raises StateError if the disk has changed it."""
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise StateError(f"cannot use {self.file}: damaged contents: {error}: {self._advice}") from error

    def write(self, statement: str, *values: Any) -> None:
        """Execute one statement, durably, or as a part of the transaction that is open in this thread."""
        with self.connection() as database:
            database.execute(statement, values)

    @contextlib.contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Keep other threads out while several statements run."""
        with self._thread_lock, self._errors():
            yield self._db

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads of the body see the file as it is at the first of them, whatever other processes write."""
        with self.connection() as database, _transaction(database, "DEFERRED"):
            yield

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Make the changes of the body durable together at its end, or none of them if it raises.

        No other process can write in between.
        """
        # IMMEDIATE: what the body reads would be too old to write on if another process wrote first.
        with self.connection() as database, _transaction(database, "IMMEDIATE"):
            yield database

    def check_writable(self) -> None:
        """Write to the file without changing its contents, to find out whether the disk is full."""
        with self.transaction() as database:
            database.execute(f"PRAGMA user_version = {len(self._migrations)}")

    def check_file(self) -> None:
        """Raise StateError if what is written is lost: the file was deleted or replaced, or `check` found damage."""
        files = self._files()
        if any(files.get(path) != identity for path, identity in self._open_files.items()):
            raise StateError(
                f"cannot use {self.file}: it was deleted or replaced while `{self._program}` was running: stop "
                f"`{self._program}`, {self._advice}"
            )
        if self._damage:
            raise StateError(self._damage)

    def check(self) -> None:
        """Do what `check_file` does, after a search for damage in the file's structure.

        The file is read as a whole, by a connection that has nothing of it in memory.
        """
        self._damage = ""
        self.check_file()
        try:
            self._search_damage()
        except StateError as error:
            self._damage = str(error)
            raise

    def _search_damage(self) -> None:
        uri = f"file:{urllib.parse.quote(str(self.file))}?mode=ro"
        with self._errors(), contextlib.closing(sqlite3.connect(uri, uri=True, timeout=10)) as database:
            self._check_version(database)
            ((found,),) = database.execute("PRAGMA quick_check(1)")
        if found != "ok":
            raise StateError(f"cannot use {self.file}: {' '.join(found.split())}: {self._advice}")

    def _files(self) -> dict[Path, tuple[int, int]]:
        """Return device and inode of the file and its write-ahead log."""
        files = {}
        for path in (self.file, self.file.with_name(f"{self.file.name}-wal")):
            with contextlib.suppress(OSError):
                status = path.stat()
                files[path] = (status.st_dev, status.st_ino)
        return files

    def close(self) -> None:
        """Close the file and release the folder's lock."""
        self._db.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None and self._exclusive:
            self._lock.release()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise StateError(f"cannot use {self.file}: {error}") from error
            if not self._is_cache:
                raise StateError(f"cannot use {self.file}: {error}: {self._advice}") from error
            self._db.close()
            self._move_damaged()
            self._db = self._connect()
            raise StateError(f"{self.file} was damaged and has been created anew: start again") from error

    def _move_damaged(self) -> None:
        moved = self.file.with_suffix(".damaged")
        event(
            log, logging.WARNING, "damaged file renamed and created anew", file=self.file, renamed=moved.name
        )
        with state_errors(self.file):
            for suffix in ("-wal", "-shm"):
                self.file.with_name(self.file.name + suffix).unlink(missing_ok=True)
            self.file.replace(moved)


def _version(database: sqlite3.Connection) -> int:
    ((version,),) = database.execute("PRAGMA user_version")
    return int(version)


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[None]:
    database.execute(f"BEGIN {kind}")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")  # after some failures SQLite has done so itself
        raise


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        yield statement


def _drop_tables(database: sqlite3.Connection) -> None:
    tables = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    for (name,) in database.execute(tables).fetchall():
        database.execute(f'DROP TABLE "{name}"')


def _is_damage(error: sqlite3.Error) -> bool:
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
