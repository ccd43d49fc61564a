"""SQLite files that the threads of a program share: created, migrated, and written in durable transactions."""

import contextlib
import logging
import os
import sqlite3
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from protocol.errors import StateError, StateLocked, StateRefused
from protocol.log import event
from protocol.storage.blobstore import create_atomically, state_errors
from protocol.storage.folder_lock import FolderLock

log = logging.getLogger(__name__)

Value = TypeVar("Value")

_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_UNWRITABLE = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY}
"""Errors of SQLite where it cannot write the files beside a database."""

_PRAGMAS: dict[str, str | int] = {
    "journal_mode": "WAL",
    "synchronous": "FULL",
    "journal_size_limit": 2**20,
    "secure_delete": "ON",  # deleted contents are overwritten with zeros
}


class Database:
    """An open SQLite file. All methods raise StateError if SQLite cannot read or write it.

    Args:
        path: created if it does not exist, unless `read_only`.
        program: the command that writes the file, for error messages.
        migrations: SQL scripts that each bring the schema from one version to the next, beginning with an empty
            file; every statement ends its line.
        base: the schema version before the first of these, which `PRAGMA user_version` counts on from. A file of an
            earlier version is not carried over.
        read_only: open an existing file without changing it, even while another process writes it, or where nothing
            can be written.
        lock: the folder's lock, taken while the file is created or migrated, which another program that holds it
            prevents. None if no running program of another version can have the file open.
        holds_lock: take the lock before the file is opened, and hold it until `close`.
        is_cache: the contents can be computed again. A damaged file is renamed to `.damaged` and created anew; a
            file of a later schema version is emptied.
        advice: what to do if the file is damaged, for error messages.
        pragmas: set before or in place of WAL, synchronous FULL, 1 MiB for the log between transactions, and
            secure_delete.

    Raises:
        StateError: the file cannot be used, has another schema version, or another process holds the lock.
    """

    def __init__(  # noqa: PLR0913 - each has a default but three
        self,
        path: Path,
        *,
        program: str,
        migrations: Sequence[str],
        base: int = 0,
        read_only: bool = False,
        lock: FolderLock | None = None,
        holds_lock: bool = False,
        is_cache: bool = False,
        advice: str = "restore it from a backup, or use another --state",
        pragmas: Mapping[str, str | int] | None = None,
    ) -> None:
        self.path, self._program, self._migrations, self._advice = path, program, migrations, advice
        self._base, self._read_only, self._is_cache = base, read_only, is_cache
        # The caller's first: auto_vacuum has no effect once the file has pages.
        self._pragmas = {} if read_only else {**(pragmas or {}), **_PRAGMAS, **(pragmas or {})}
        self._lock = lock
        self._thread_lock = threading.RLock()
        if lock is not None and holds_lock and not lock.take():
            raise StateLocked(f"`{program}` already runs on {path.parent}: stop it, or use another --state")
        try:
            with self._errors():
                self._db = self._open()
        except BaseException:
            self._release()
            raise

    @property
    def _newest(self) -> int:
        """The schema version of this program."""
        return self._base + len(self._migrations)

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.connection() as database:
            return database.execute(query, values).fetchall()

    def decode(self, text: str, kind: type[Value]) -> Value:
        """Return the value of a JSON text in the file; raises StateError if the disk has changed it."""
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, TypeError) as error:  # damaged pages may hold NULL, or a number
            raise self._damaged(f"damaged contents: {error}") from error

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
    def transaction(
        self, kind: Literal["DEFERRED", "IMMEDIATE"] = "IMMEDIATE"
    ) -> Iterator[sqlite3.Connection]:
        """Make the changes of the body durable together at its end, or none of them if it raises.

        No other process can write in between. In a `DEFERRED` one, which only reads, others can: the body sees the
        file as it is at its first query. Within another transaction of this thread, the changes are a part of that one.
        """
        with self.connection() as database:
            if database.in_transaction:
                yield database
                return
            with _transaction(database, kind):
                yield database

    def in_transaction(self) -> bool:
        """Return True in a transaction, in which no other process can write."""
        with self._thread_lock:
            return self._db.in_transaction

    def data_version(self) -> int:
        """Return a number that changes when another process has written."""
        return int(self.read("PRAGMA data_version")[0][0])

    def check_writable(self) -> None:
        """Write to the file without changing its contents, to find out whether the disk is full."""
        with self.transaction() as database:
            database.execute(f"PRAGMA user_version = {self._newest}")

    def empty_log(self) -> None:
        """Move all transactions from the log into the file, so that the log has nothing that they have deleted.

        Nothing changes while another process reads, or if the disk is full: a later call, or `close`, does it.
        """
        with contextlib.suppress(StateError):
            self.read("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the file and release the folder's lock."""
        with self._thread_lock:
            self._db.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise StateError(f"cannot use {self.path}: {error}{self._disk_problem()}") from error
            if not self._is_cache:
                raise self._damaged(str(error)) from error
            self._db.close()
            self._move_damaged()
            self._db = self._connect()
            raise StateError(f"{self.path} was damaged and has been created anew: start again") from error

    def _damaged(self, reason: str) -> StateError:
        return StateError(f"cannot use {self.path}: {reason}: {self._advice}")

    def _disk_problem(self) -> str:
        with contextlib.suppress(OSError):
            disk = os.statvfs(self.path.parent)
            if disk.f_flag & os.ST_RDONLY:
                return ": the filesystem is read-only: check the disk, and mount it for writing"
            if not disk.f_bavail:
                return ": no space left on the disk: free space"
        return ""

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not (self._is_cache and _is_damage(error)):
                raise
        self._move_damaged()
        return self._connect()

    def _move_damaged(self) -> None:
        moved = self.path.with_suffix(".damaged")
        text = "damaged file renamed and created anew"
        event(log, logging.WARNING, text, file=self.path, renamed=moved.name)
        with state_errors(self.path):
            for suffix in ("-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            self.path.replace(moved)

    def _connect(self) -> sqlite3.Connection:
        self._create()
        try:
            return self._opened(self._uri("ro" if self._read_only else "rwc"))
        except sqlite3.OperationalError as error:
            if not self._read_only or error.sqlite_errorcode & 0xFF not in _UNWRITABLE or self._has_log():
                raise
            # Even a reader creates files beside this one, except for a file that SQLite takes for unchangeable.
            return self._opened(self._uri("ro") + "&immutable=1")

    def _uri(self, mode: Literal["ro", "rwc"]) -> str:
        return f"file:{urllib.parse.quote(str(self.path))}?mode={mode}"

    def _has_log(self) -> bool:
        """Return True if there are transactions that are not in the file itself yet."""
        log_file = self.path.with_name(f"{self.path.name}-wal")
        with state_errors(log_file):
            return log_file.exists() and log_file.stat().st_size > 0

    def _create(self) -> None:
        """Write a file that does not exist, whole or not at all: an empty one is damaged, and no new state.

        It is for its owner only, in a folder that other users may read too; SQLite's other files have the same mode.
        """
        with state_errors(self.path):
            size = self.path.stat().st_size if self.path.exists() else None
        if size == 0 and not self._is_cache:
            raise self._damaged("damaged: it is empty")
        if size is not None or self._read_only:
            return
        with self._locked():
            if not self.path.exists():  # another process may have written it meanwhile
                with contextlib.closing(self._opened(":memory:")) as database:
                    create_atomically(self.path, database.serialize(), mode=0o600)

    def _opened(self, uri: str) -> sqlite3.Connection:
        database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10, check_same_thread=False)
        try:
            for name, value in self._pragmas.items():
                database.execute(f"PRAGMA {name} = {value}")
            if not self._read_only and self._is_outdated(database):
                self._migrate(database)
            self._check_version(database)
        except BaseException:
            database.close()
            raise
        return database

    def _is_outdated(self, database: sqlite3.Connection) -> bool:
        version, expected = _version(database), self._newest
        return version < expected or (self._is_cache and version != expected)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the folder's lock; yields False if another program holds it."""
        if self._lock is None or self._lock.is_held:
            yield True
        elif self._lock.take():
            try:
                yield True
            finally:
                self._lock.release()
        else:
            yield False

    def _migrate(self, database: sqlite3.Connection) -> None:
        """Bring the schema to this version, but not under a running program of another one."""
        with self._locked() as is_free:
            if is_free:
                self._run_migrations(database)
            elif self._is_outdated(database):  # the running program has not migrated it meanwhile
                raise StateError(
                    f"{self._found(database)}, and `{self._program}` of an older protofleet runs on it: stop it, and "
                    "start it with this version"
                )

    def _run_migrations(self, database: sqlite3.Connection) -> None:
        with _transaction(database, "IMMEDIATE"):
            version = _version(database)  # again: another process may have migrated the file meanwhile
            if self._is_cache and not self._base < version <= self._newest:
                _drop_tables(database)
                version = 0
            if 0 < version <= self._base:
                raise self._not_carried_over(database)
            for script in self._migrations[max(0, version - self._base) :]:
                for statement in _statements(script):
                    database.execute(statement)
            database.execute(f"PRAGMA user_version = {max(version, self._newest)}")

    def _check_version(self, database: sqlite3.Connection) -> None:
        """Raise StateError unless the file has the current schema."""
        version = _version(database)
        if version > self._newest:
            raise StateRefused(f"{self._found(database)}: upgrade protofleet here, or use another --state")
        if not version:
            raise self._damaged("damaged: it is empty")
        if version <= self._base and self._lock is not None:  # a cache, which has no lock, is made anew
            raise self._not_carried_over(database)
        if self._is_outdated(database):
            raise StateError(f"{self._found(database)}: start `{self._program}` on it once")

    def _not_carried_over(self, database: sqlite3.Connection) -> StateRefused:
        return StateRefused(
            f"{self._found(database)}: the state of an earlier protofleet is not carried over: use another "
            f"--state; {self._advice}"
        )

    def _found(self, database: sqlite3.Connection) -> str:
        return f"{self.path} has schema version {_version(database)}, expected {self._newest}"


def _version(database: sqlite3.Connection) -> int:
    ((version,),) = database.execute("PRAGMA user_version")
    return int(version)


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection, kind: str) -> Iterator[None]:
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
    return code & 0xFF in _DAMAGE
