"""Unfinished transfers on the disk: what has come of them survives a restart, and is gone once they are done.

A SQLite file of its own, because it is written with every handful of frames: it may always be deleted, and then
devices send again what was in it. Of a frame its transfer and its offset make the key, so that it is written once,
next to its neighbours, without an index beside it.
"""

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from aggregator.uplink import Arrived, Changes, Key, Pieces, Stored
from protocol.errors import StateError
from protocol.transfer import Coverage

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_PAGE_BYTES = 65536  # holds a whole frame
_OFFSETS = 2**32
"""Keys of one transfer."""
_TRIAL = -1
"""The key of what is written to see whether it can be."""
_SPARE_PAGES = 16
_BROKEN = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


class Incoming:
    """The file `incoming.sqlite` in the aggregator's state folder.

    Args:
        folder: the state folder. A file in it that cannot be understood is begun anew.

    Raises:
        StateError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "incoming.sqlite"
        self._ids: dict[Key, int] = {}
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            with self._errors():
                if getattr(error, "sqlite_errorcode", None) not in _BROKEN:
                    raise
                log.warning("%s cannot be read and is begun anew: devices will send again", self._path)
                self._delete()
                self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None, timeout=10)
        database.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA cache_size = -8192")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA_VERSION:
            database.executescript(
                f"""
                BEGIN;
                DROP TABLE IF EXISTS transfers;
                DROP TABLE IF EXISTS frames;
                CREATE TABLE transfers (
                    id INTEGER PRIMARY KEY, device TEXT NOT NULL, digest BLOB NOT NULL,
                    size_bytes INTEGER NOT NULL, seen_s REAL NOT NULL
                ) STRICT;
                CREATE TABLE frames (key INTEGER PRIMARY KEY, data BLOB NOT NULL) STRICT;
                PRAGMA user_version = {SCHEMA_VERSION};
                COMMIT;
                """
            )
        return database

    def _delete(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StateError(f"cannot use {self._path}: {error}") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write all of it, durably, or nothing.

        Raises:
            StateError: it cannot be written.
        """
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")  # some failures have done so themselves
                raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def transfers(self) -> list[Stored]:
        """Every unfinished transfer.

        Raises:
            StateError: the file cannot be read.
        """
        found = []
        with self._errors():
            rows = self._db.execute("SELECT id, device, digest, size_bytes, seen_s FROM transfers").fetchall()
            self._ids = {(device, digest): number for number, device, digest, _, _ in rows}
            for number, device, digest, size_bytes, seen_s in rows:
                there = Coverage(size_bytes)
                for key, length in self._db.execute(
                    "SELECT key, length(data) FROM frames WHERE key BETWEEN ? AND ?", _keys(number)
                ):
                    there.add(key % _OFFSETS, key % _OFFSETS + length)
                found.append(Stored((device, digest), size_bytes, seen_s, there.ranges()))
        return found

    def read(self, device: str, digest: bytes) -> Pieces:
        """The bytes there are of a transfer, in order.

        Raises:
            StateError: the file cannot be read.
        """
        with self._errors():
            rows = self._db.execute(
                "SELECT key, data FROM frames WHERE key BETWEEN ? AND ? ORDER BY key",
                _keys(self._ids[device, digest]),
            )
            return [(key % _OFFSETS, data) for key, data in rows]

    def commit(self, changes: Changes) -> None:
        """Store what has arrived and forget what has ended: durable when this returns, or else as it was before.

        Raises:
            StateError: it cannot be written.
        """
        ids = self._ids.copy()
        with self._transaction():
            for key in changes.ended:
                self._forget(ids.pop(key))
            for arrived in changes.arrived:
                number = ids.setdefault(arrived.key, max(ids.values(), default=0) + 1)
                self._keep(number, arrived)
        self._ids = ids

    def _forget(self, number: int) -> None:
        self._db.execute("DELETE FROM frames WHERE key BETWEEN ? AND ?", _keys(number))
        self._db.execute("DELETE FROM transfers WHERE id = ?", (number,))

    def _keep(self, number: int, arrived: Arrived) -> None:
        self._db.execute(
            "INSERT INTO transfers VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET seen_s = excluded.seen_s",
            (number, *arrived.key, arrived.size_bytes, arrived.seen_s),
        )
        first, _ = _keys(number)
        self._db.executemany(
            "INSERT INTO frames VALUES (?, ?)", [(first + offset, data) for offset, data in arrived.pieces]
        )

    def try_to_write(self, size_bytes: int) -> None:
        """See whether there is room for so many bytes.

        Raises:
            StateError: there is not.
        """
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO frames VALUES (?, zeroblob(?))", (_TRIAL, size_bytes))
        with self._transaction():
            self._db.execute("DELETE FROM frames WHERE key = ?", (_TRIAL,))

    def shrink(self) -> None:
        """Give the room that the file does not need back to the disk, if nothing is in it.

        Raises:
            StateError: it cannot be written.
        """
        with self._errors():
            (pages,) = self._db.execute("PRAGMA page_count").fetchone()
            if not self._ids and pages > _SPARE_PAGES:
                self._db.execute("DELETE FROM frames")  # a trial that was cut off
                self._db.execute("VACUUM")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _keys(number: int) -> tuple[int, int]:
    """The first and the last key of a transfer's frames."""
    return number * _OFFSETS, number * _OFFSETS + _OFFSETS - 1
