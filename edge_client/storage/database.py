"""A device's SQLite file: facts by name, and transactions, of which a power loss leaves all or nothing."""

import contextlib
import json
import sqlite3
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protocol.errors import StateError

SCHEMA_VERSION = 3

_FACTS = "CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT"
_OUTBOX = """
CREATE TABLE outbox (
    kind TEXT NOT NULL, received INTEGER NOT NULL, task BLOB NOT NULL, digest BLOB NOT NULL, about TEXT NOT NULL,
    size_bytes INTEGER NOT NULL, payload INTEGER NOT NULL, UNIQUE (kind, received)
) STRICT
"""
# Apart from the rest, which changes: a row is written as a whole.
_PAYLOADS = "CREATE TABLE payloads (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT"
_TOGETHER = """
CREATE TRIGGER payload_goes_with_item AFTER DELETE ON outbox
BEGIN DELETE FROM payloads WHERE id = OLD.payload; END
"""
# What was released under differential privacy, and the key of the newest release's noise.
_RELEASES = """
CREATE TABLE releases (
    number INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL, noise_multiplier REAL NOT NULL, key BLOB
) STRICT
"""
_MIGRATIONS = (
    (_FACTS,),
    # What was to be sent stood in files, which these facts named: it is made once more.
    (
        *(_OUTBOX, _PAYLOADS, _TOGETHER),
        "DELETE FROM facts WHERE key IN ('submission', 'received', 'evaluation', 'fingerprint', 'joined')",
    ),
    (_RELEASES,),
)
"""What brings a file from each schema to the next, beginning with none."""


class Database:
    """A device's SQLite file, for one thread at a time of those that share it.

    Args:
        file: made if it is not there, unless it is only read.
        read_only: for looking at it while the device program runs.

    Raises:
        StateError: it cannot be used, or another version wrote it.
    """

    def __init__(self, file: Path, *, read_only: bool = False) -> None:
        self._file = file
        self._turn = threading.Lock()
        mode = "ro" if read_only else "rwc"
        with self._errors():
            # `_turn` lets one thread at a time use it.
            self._db = sqlite3.connect(
                f"file:{urllib.parse.quote(str(file))}?mode={mode}",
                uri=True,
                isolation_level=None,
                timeout=10,
                check_same_thread=False,
            )
            if not read_only:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                # A submission goes through this log: its space is given back once it is in the file.
                self._db.execute("PRAGMA journal_size_limit = 1048576")
        if not read_only:
            self._migrate()
        version = self._version()
        if version != SCHEMA_VERSION:
            way_out = "use that version" if version > SCHEMA_VERSION else "start edge-client on it once"
            raise StateError(
                f"{file.parent} was written by another protofleet (schema {version}, expected {SCHEMA_VERSION}): "
                f"{way_out}, or use another --state"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """A fact, as the JSON value it was set to."""
        rows = self.read("SELECT value FROM facts WHERE key = ?", (key,))
        return json.loads(rows[0][0]) if rows else default

    def set(self, **facts: Any) -> None:
        """Keep facts, all of them or none."""
        with self.transaction() as database:
            write_facts(database, facts)

    def read(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """All rows that a query finds."""
        with self.reading() as database:
            return database.execute(query, values).fetchall()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Read more than once, and nobody else writes in between."""
        with self._errors(), self._turn:
            yield self._db

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Do all that the body does, durably, or nothing of it.

        Raises:
            StateError: the disk does not take it.
        """
        with self._errors(), self._turn:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _version(self) -> int:
        ((version,),) = self.read("PRAGMA user_version")
        return int(version)

    def _migrate(self) -> None:
        """Bring a new or an older file to our schema."""
        with self.transaction() as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version >= SCHEMA_VERSION:
                return
            for statements in _MIGRATIONS[version:]:
                for statement in statements:
                    database.execute(statement)
            database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StateError(
                f"cannot use {self._file}: {error}; take another --state, or delete it"
            ) from error


def write_facts(database: sqlite3.Connection, facts: Mapping[str, Any]) -> None:
    """Keep facts, as a part of a transaction."""
    rows = [(key, json.dumps(value)) for key, value in facts.items()]
    database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)
