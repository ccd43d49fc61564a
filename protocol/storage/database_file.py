"""SQLite files: created, migrated to the current schema, opened in WAL mode, and checked."""

import contextlib
import logging
import os
import sqlite3
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from protocol.errors import StateError
from protocol.log import event
from protocol.storage.blobstore import create_atomically, state_errors
from protocol.storage.folder_lock import FolderLock

log = logging.getLogger(__name__)

_UNWRITABLE = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY}
"""Errors of SQLite where it cannot write the files beside a database."""

_PRAGMAS: dict[str, str | int] = {"journal_mode": "WAL", "synchronous": "FULL", "journal_size_limit": 2**20}


@dataclass(frozen=True, kw_only=True)
class DatabaseFile:
    """An SQLite file and its schema.

    Attributes:
        path: created if it does not exist, unless `read_only`.
        program: the command that writes the file, for error messages.
        migrations: SQL scripts that each bring the schema from one version to the next, beginning with an empty
            file; every statement ends its line. `PRAGMA user_version` holds how many of them have run.
        read_only: open an existing file without changing it, even while another process writes it, or where nothing
            can be written.
        lock: the folder's lock, taken while the file is created or migrated, which another program that holds it
            prevents. None if this program holds it, or if no running program of another version can have the file open.
        is_cache: the contents can be computed again. A damaged file is renamed to `.damaged` and created anew; a
            file of another schema version is deleted and created anew.
        advice: what to do if the file is damaged, for error messages.
        pragmas: set before or in place of WAL, synchronous FULL, and 1 MiB for the log between transactions.
    """

    path: Path
    program: str
    migrations: Sequence[str]
    read_only: bool = False
    lock: FolderLock | None = None
    is_cache: bool = False
    advice: str = "restore it from a backup, or use another --state"
    pragmas: Mapping[str, str | int] = field(default_factory=dict)

    def open(self) -> sqlite3.Connection:
        """Open the file with the current schema.

        Raises:
            StateError: it cannot be used, or has another schema version.
            sqlite3.Error: SQLite cannot read or write it.
        """
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not (self.is_cache and is_damage(error)):
                raise
        self.move_damaged()
        return self._connect()

    def _connect(self) -> sqlite3.Connection:
        self._create_whole()
        try:
            return self._opened(self.uri("ro" if self.read_only else "rwc"))
        except sqlite3.OperationalError as error:
            if not self.read_only or error.sqlite_errorcode & 0xFF not in _UNWRITABLE or self._has_log():
                raise
            # Even a reader creates files beside this one, except for a file that SQLite takes for unchangeable.
            return self._opened(self.uri("ro") + "&immutable=1")

    def _has_log(self) -> bool:
        """Return True if there are transactions that are not in the file itself yet."""
        log_file = self.path.with_name(f"{self.path.name}-wal")
        with state_errors(log_file):
            return log_file.exists() and log_file.stat().st_size > 0

    def _opened(self, uri: str) -> sqlite3.Connection:
        database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10, check_same_thread=False)
        try:
            for name, value in self._all_pragmas().items():
                database.execute(f"PRAGMA {name} = {value}")
            if not self.read_only and self._is_outdated(database):
                with self._migration_lock(database):
                    self._migrate(database)
            self.check_version(database)
        except BaseException:
            database.close()
            raise
        return database

    def _create_whole(self) -> None:
        """Write a file that does not exist, whole or not at all: an empty one is damaged, and no new state.

        It is for its owner only, in a folder that other users may read too; SQLite's other files have the same mode.
        """
        with state_errors(self.path):
            size = self.path.stat().st_size if self.path.exists() else None
        if size == 0 and not self.is_cache:
            raise self._empty()
        if size is not None or self.read_only:
            return
        is_held = self.lock is not None and self.lock.take()
        try:
            if not self.path.exists():  # another process may have written it meanwhile
                create_atomically(self.path, self._new_contents(), mode=0o600)
        finally:
            if is_held and self.lock is not None:
                self.lock.release()

    def _new_contents(self) -> bytes:
        with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
            for name, value in self._all_pragmas().items():
                database.execute(f"PRAGMA {name} = {value}")
            self._migrate(database)
            return database.serialize()

    def _is_outdated(self, database: sqlite3.Connection) -> bool:
        version, expected = _version(database), len(self.migrations)
        return version < expected or (self.is_cache and version != expected)

    @contextlib.contextmanager
    def _migration_lock(self, database: sqlite3.Connection) -> Iterator[None]:
        """Hold the folder's lock, so that the schema does not change under a running program of another version."""
        if self.lock is None:
            yield
        elif self.lock.take():
            try:
                yield
            finally:
                self.lock.release()
        elif self._is_outdated(database):
            raise StateError(
                f"{self._found(database)}, and `{self.program}` of an older protofleet runs on it: stop it, and start "
                "it with this version"
            )
        else:
            yield  # the running program has migrated it meanwhile

    def _migrate(self, database: sqlite3.Connection) -> None:
        expected = len(self.migrations)
        with transaction(database, "IMMEDIATE"):
            version = _version(database)  # again: another process may have migrated the file meanwhile
            if self.is_cache and self._is_outdated(database):
                _drop_tables(database)
                version = 0
            for script in self.migrations[version:]:
                for statement in _statements(script):
                    database.execute(statement)
            database.execute(f"PRAGMA user_version = {max(version, expected)}")

    def check_version(self, database: sqlite3.Connection) -> None:
        """Raise StateError unless the file has the current schema."""
        version, expected = _version(database), len(self.migrations)
        if version > expected:
            raise StateError(f"{self._found(database)}: upgrade protofleet here, or use another --state")
        if not version:
            raise self._empty()
        if self._is_outdated(database):
            raise StateError(f"{self._found(database)}: start `{self.program}` on it once")

    def _empty(self) -> StateError:
        return StateError(f"cannot use {self.path}: damaged: it is empty: {self.advice}")

    def _found(self, database: sqlite3.Connection) -> str:
        return f"{self.path} has schema version {_version(database)}, expected {len(self.migrations)}"

    def _all_pragmas(self) -> dict[str, str | int]:
        # The caller's first: auto_vacuum has no effect once the file has pages.
        return {} if self.read_only else {**self.pragmas, **_PRAGMAS, **self.pragmas}

    def uri(self, mode: Literal["ro", "rwc"]) -> str:
        """Return the URI of the file in a mode of SQLite."""
        return f"file:{urllib.parse.quote(str(self.path))}?mode={mode}"

    def disk_problem(self) -> str:
        """Return why nothing can be written beside the file, for error messages; empty if it can."""
        with contextlib.suppress(OSError):
            disk = os.statvfs(self.path.parent)
            if disk.f_flag & os.ST_RDONLY:
                return ": the filesystem is read-only: check the disk, and mount it for writing"
            if not disk.f_bavail:
                return ": no space left on the disk: free space"
        return ""

    def search_damage(self) -> None:
        """Read the whole file by a connection that has nothing of it in memory.

        Raises:
            StateError: it is damaged, or has another schema version.
            sqlite3.Error: SQLite cannot read it.
        """
        with contextlib.closing(sqlite3.connect(self.uri("ro"), uri=True, timeout=10)) as database:
            self.check_version(database)
            ((found,),) = database.execute("PRAGMA quick_check(1)")
        if found != "ok":
            raise StateError(f"cannot use {self.path}: {' '.join(found.split())}: {self.advice}")

    def move_damaged(self) -> None:
        """Rename a damaged file, so that `open` creates it anew."""
        moved = self.path.with_suffix(".damaged")
        event(
            log, logging.WARNING, "damaged file renamed and created anew", file=self.path, renamed=moved.name
        )
        with state_errors(self.path):
            for suffix in ("-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            self.path.replace(moved)


def _version(database: sqlite3.Connection) -> int:
    ((version,),) = database.execute("PRAGMA user_version")
    return int(version)


@contextlib.contextmanager
def transaction(database: sqlite3.Connection, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[None]:
    """Commit the statements of the body together, or roll them back if it raises."""
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


def is_damage(error: sqlite3.Error) -> bool:
    """Return True if SQLite has found the file damaged."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
