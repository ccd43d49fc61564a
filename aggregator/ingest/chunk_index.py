"""Unfinished transfers on the disk: what has come of them survives a restart, and is gone once they are done.

Their bytes are in files of their own, and `incoming.sqlite` says which of them count: it is told once they are durable,
so that it never says too much. It is a file of its own because it is written with every handful of frames. All of it
may always be deleted, and then devices send again what was in it.
"""

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from aggregator.ingest.chunk_files import Partials, runs_of
from aggregator.ingest.reassembly import Arrived, Changes, Key, Pieces, Stored
from protocol.errors import StateError
from protocol.wire.transfer import Coverage, Ranges

log = logging.getLogger(__name__)

SCHEMA_VERSION = 2
_OFFSETS = 2**32
"""Keys of one transfer."""
_SPARE_PAGES = 256
_BROKEN = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


class Incoming:
    """The file `incoming.sqlite` and the folder `incoming` in the aggregator's state folder.

    Args:
        folder: the state folder. A file in it that cannot be understood is begun anew.

    Raises:
        StateError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "incoming.sqlite"
        self._ids: dict[Key, int] = {}
        self._partials = Partials(folder / "incoming")
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
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA_VERSION:
            database.executescript(
                f"""
                BEGIN;
                DROP TABLE IF EXISTS transfers;
                DROP TABLE IF EXISTS frames;
                DROP TABLE IF EXISTS runs;
                CREATE TABLE transfers (
                    id INTEGER PRIMARY KEY, device TEXT NOT NULL, digest BLOB NOT NULL,
                    size_bytes INTEGER NOT NULL, seen_s REAL NOT NULL
                ) STRICT;
                CREATE TABLE runs (key INTEGER PRIMARY KEY, size_bytes INTEGER NOT NULL) STRICT;
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
        self._partials.close()
        self._db.close()

    def transfers(self) -> list[Stored]:
        """Every unfinished transfer; what has lost its bytes is forgotten, and so are bytes that belong to none.

        Raises:
            StateError: the disk cannot be read or written.
        """
        with self._errors():
            rows = self._db.execute("SELECT id, device, digest, size_bytes, seen_s FROM transfers").fetchall()
            self._ids = {(device, digest): number for number, device, digest, _, _ in rows}
            known = [
                Stored((device, digest), size_bytes, seen_s, self._ranges(number, size_bytes))
                for number, device, digest, size_bytes, seen_s in rows
            ]
        found = [
            each for each in known if each.ranges and self._partials.reaches(each.key, each.ranges[-1][1])
        ]
        if lost := [each.key for each in known if each not in found]:
            log.warning("%d unfinished transfers have lost their files: devices will send again", len(lost))
            self.commit(Changes([], lost))
        self._partials.keep_only(self._ids)
        return found

    def _ranges(self, number: int, size_bytes: int) -> Ranges:
        there = Coverage(size_bytes)
        rows = self._db.execute("SELECT key, size_bytes FROM runs WHERE key BETWEEN ? AND ?", _keys(number))
        for key, length in rows:
            there.add(key % _OFFSETS, key % _OFFSETS + length)
        return there.ranges()

    def read(self, device: str, digest: bytes) -> Pieces:
        """The bytes there are of a transfer, in order.

        Raises:
            StateError: they cannot be read.
        """
        key = device, digest
        with self._errors():
            ranges = self._ranges(self._ids[key], _OFFSETS)
        return self._partials.read(key, ranges)

    def commit(self, changes: Changes) -> None:
        """Store what has arrived and forget what has ended: durable when this returns, or else as it was before.

        Raises:
            StateError: it cannot be written.
        """
        self._partials.write(changes.arrived)
        ids = self._ids.copy()
        with self._transaction():
            for key in changes.ended:
                self._forget(ids.pop(key))
            for arrived in changes.arrived:
                number = ids.setdefault(arrived.key, max(ids.values(), default=0) + 1)
                self._keep(number, arrived)
        self._ids = ids
        self._partials.delete([key for key in changes.ended if key not in ids])

    def _forget(self, number: int) -> None:
        self._db.execute("DELETE FROM runs WHERE key BETWEEN ? AND ?", _keys(number))
        self._db.execute("DELETE FROM transfers WHERE id = ?", (number,))

    def _keep(self, number: int, arrived: Arrived) -> None:
        self._db.execute(
            "INSERT INTO transfers VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET seen_s = excluded.seen_s",
            (number, *arrived.key, arrived.size_bytes, arrived.seen_s),
        )
        first, _ = _keys(number)
        self._db.executemany(
            "INSERT INTO runs VALUES (?, ?)",
            [(first + offset, sum(map(len, run))) for offset, run in runs_of(arrived.pieces)],
        )

    def try_to_write(self, size_bytes: int) -> None:
        """See whether there is room for so many bytes.

        Raises:
            StateError: there is not.
        """
        self._partials.try_to_write(size_bytes)
        with self._transaction():
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def shrink(self) -> None:
        """Give the room that the file does not need back to the disk, if nothing is in it.

        Raises:
            StateError: it cannot be written.
        """
        with self._errors():
            (pages,) = self._db.execute("PRAGMA page_count").fetchone()
            if not self._ids and pages > _SPARE_PAGES:
                self._db.execute("VACUUM")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _keys(number: int) -> tuple[int, int]:
    """The first and the last key of a transfer's runs."""
    return number * _OFFSETS, number * _OFFSETS + _OFFSETS - 1
