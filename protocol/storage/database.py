"""SQLite files that the threads of a program share, written in durable transactions."""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from protocol.errors import StateError
from protocol.storage.database_file import DatabaseFile, is_damage, transaction
from protocol.storage.folder_lock import FolderLock

Value = TypeVar("Value")


class Database:
    """An open SQLite file.

    All methods raise StateError if SQLite cannot read or write the file.

    Args:
        file: opened, and created or migrated if necessary.
        held: the folder's lock, taken before the file is opened and held until `close`.

    Raises:
        StateError: the file cannot be used, has another schema version, or another process holds the lock.
    """

    def __init__(self, file: DatabaseFile, *, held: FolderLock | None = None) -> None:
        self.path = file.path
        self._file = file
        self._held = held
        self._thread_lock = threading.RLock()
        if held is not None and not held.take():
            raise StateError(
                f"`{file.program}` already runs on {file.path.parent}: stop it, or use another --state"
            )
        try:
            with self._errors():
                self._db = file.open()
            self._open_files, self._damage = self._files(), ""
        except BaseException:
            self._release()
            raise

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self.connection() as database:
            return database.execute(query, values).fetchall()

    def decode(self, text: str, kind: type[Value]) -> Value:
        """Return the value of a JSON text in the file; raises StateError if the disk has changed it."""
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, TypeError) as error:  # damaged pages may hold NULL, or a number
            raise StateError(
                f"cannot use {self.path}: damaged contents: {error}: {self._file.advice}"
            ) from error

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
        with self.connection() as database, transaction(database, "DEFERRED"):
            yield

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Make the changes of the body durable together at its end, or none of them if it raises.

        No other process can write in between.
        """
        # IMMEDIATE: what the body reads would be too old to write on if another process wrote first.
        with self.connection() as database, transaction(database, "IMMEDIATE"):
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
            database.execute(f"PRAGMA user_version = {len(self._file.migrations)}")

    def check_file(self) -> None:
        """Raise StateError if what is written is lost: the file was deleted or replaced, or `check` found damage."""
        files = self._files()
        if any(files.get(path) != identity for path, identity in self._open_files.items()):
            raise StateError(
                f"cannot use {self.path}: it was deleted or replaced while `{self._file.program}` was running: "
                f"stop `{self._file.program}`, {self._file.advice}"
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
            with self._errors():
                self._file.search_damage()
        except StateError as error:
            self._damage = str(error)
            raise

    def _files(self) -> dict[Path, tuple[int, int]]:
        """Return device and inode of the file and its write-ahead log."""
        files = {}
        for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            with contextlib.suppress(OSError):
                status = path.stat()
                files[path] = (status.st_dev, status.st_ino)
        return files

    def close(self) -> None:
        """Close the file and release the folder's lock."""
        with self._thread_lock:
            self._db.close()
        self._release()

    def _release(self) -> None:
        if self._held is not None:
            self._held.release()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if not is_damage(error):
                raise StateError(f"cannot use {self.path}: {error}{self._file.disk_problem()}") from error
            if not self._file.is_cache:
                raise StateError(f"cannot use {self.path}: {error}: {self._file.advice}") from error
            self._db.close()
            self._file.move_damaged()
            self._db = self._file.open()
            raise StateError(f"{self.path} was damaged and has been created anew: start again") from error
