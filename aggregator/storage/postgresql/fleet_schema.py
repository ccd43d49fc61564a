"""The schema of a fleet in PostgreSQL: its name, its migrations, and the lock of the aggregator that leads."""

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from aggregator.storage import schema
from aggregator.storage.stored_values import Leader
from protocol.errors import NoStateError, StateError

MAX_NAME = 50
"""Characters of a fleet's name in the name of its schema, of which PostgreSQL keeps 63."""

_CHANGES = """
CREATE TABLE changes (version BIGINT NOT NULL, number BIGINT NOT NULL);
INSERT INTO changes VALUES (0, 0);
"""
"""One row: the number of migrations that have run, and the number of write transactions."""

_HOLDER = """
SELECT pid, backend_start::text, application_name, state = 'active', wait_event_type = 'Client',
    extract(epoch FROM clock_timestamp() - state_change)::float8
FROM pg_stat_activity WHERE pid IN (
    SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND classid::bigint = %s AND objid::bigint = %s
)
"""

ON = " on "
"""Between program and machine in the application name of a connection."""

_END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start::text = %s"


@dataclass(frozen=True)
class Holder:
    """The session that holds the lock of a fleet's aggregator."""

    key: tuple[int, str]
    """Process id and start, which identify the session."""
    host: str
    """The machine's name, from the application name."""
    is_active: bool
    """It executes a statement."""
    waits_for_client: bool
    """Its program reads no results, or sends nothing."""
    idle_s: float
    """Seconds since the beginning or end of its last statement; 0 if another role may not see it."""


class FleetSchema:
    """The tables of a fleet, whose statements run on connections of the caller."""

    def __init__(self, fleet: str) -> None:
        digest = hashlib.sha256(fleet.encode()).digest()
        # A period is in no fleet's name: no short name is that of a long one's schema.
        self.name = f"fleet_{fleet}" if len(fleet) <= MAX_NAME else f"fleet.{fleet[:30]}-{digest.hex()[:16]}"
        self.quoted = '"' + self.name.replace('"', '""') + '"'
        self._migrations = schema.MIGRATIONS
        self._lock = int.from_bytes(digest[:8]) >> 1  # below 2**63
        self._migration_lock = int.from_bytes(digest[8:16]) >> 1

    def lock(self, database: Any) -> bool:
        """Take the lock of the fleet's aggregator, until the connection ends; returns whether it was free."""
        return bool(database.execute("SELECT pg_try_advisory_lock(%s)", [self._lock]).fetchone()[0])

    def is_locked(self, database: Any) -> bool:
        return self.holder(database) is not None

    def holder(self, database: Any) -> Holder | None:
        """Return the session that holds the lock of the fleet's aggregator; None if it is free."""
        values = [self._lock >> 32, self._lock & 0xFFFFFFFF]
        row = database.execute(_HOLDER, values).fetchone()
        if row is None:
            return None
        pid, start, name, is_active, waits_for_client, idle_s = row
        host = (name or "").rpartition(ON)[2]
        return Holder((pid, start), host, bool(is_active), bool(waits_for_client), idle_s or 0.0)

    def end(self, database: Any, holder: Holder) -> None:
        """End a session, and with it its transaction and its locks."""
        database.execute(_END, list(holder.key))

    def term(self, database: Any) -> int:
        """Return how many aggregators have taken the lead of the fleet so far."""
        row = database.execute("SELECT value FROM facts WHERE name = %s", [Leader.__name__]).fetchone()
        try:
            return 0 if row is None else msgspec.json.decode(row[0], type=Leader).term
        except msgspec.MsgspecError as error:
            raise StateError(f"cannot use {self.name}: damaged contents: {error}") from error

    def next_term(self, database: Any) -> int:
        """Count and name this program as the one that leads; returns the number."""
        with database.transaction():
            database.execute("UPDATE changes SET number = number + 1")
            leader = Leader(self.term(database) + 1)
            database.execute(
                "INSERT INTO facts VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                [Leader.__name__, msgspec.json.encode(leader).decode()],
            )
        return leader.term

    def migrate(self, database: Any, *, is_locked: bool) -> None:
        """Bring the schema to this version, created if missing, in one transaction.

        `is_locked` tells whether this program holds the fleet's lock. Raises StateError if an aggregator of another
        version runs.
        """
        if self._version(database) >= len(self._migrations):
            return
        with database.transaction():
            database.execute("SELECT pg_advisory_xact_lock(%s)", [self._migration_lock])
            version = self._version(database)
            if 0 <= version < len(self._migrations) and not is_locked and self.is_locked(database):
                raise StateError(
                    f"{self.name} has schema version {version}, expected {len(self._migrations)}, and `aggregator run` "
                    "of an older protofleet runs on it: stop it, and start it with this version"
                )
            if version < 0:
                # It may be there, made for a role that may not create any.
                if database.execute("SELECT to_regnamespace(%s)", [self.quoted]).fetchone() == (None,):
                    database.execute(f"CREATE SCHEMA {self.quoted}")
                database.execute(_CHANGES)
            for script in self._migrations[max(version, 0) :]:
                database.execute(schema.postgresql_script(script))
            database.execute("UPDATE changes SET version = GREATEST(version, %s)", [len(self._migrations)])

    def check_version(self, database: Any) -> None:
        """Raise StateError unless the schema is there, in this version."""
        version, expected = self._version(database), len(self._migrations)
        if version < 0:
            raise NoStateError(
                f"no aggregator state in {self.name} of this database: start `aggregator run` first, or give the "
                "`fleet` of its task file as --fleet"
            )
        if version != expected:
            todo = "upgrade protofleet here" if version > expected else "start `aggregator run` on it once"
            raise StateError(f"{self.name} has schema version {version}, expected {expected}: {todo}")

    def number(self, database: Any) -> int:
        return int(database.execute("SELECT number FROM changes").fetchone()[0])

    def _version(self, database: Any) -> int:
        """Return the number of migrations that have run; -1 if there are no tables."""
        (found,) = database.execute("SELECT to_regclass(%s)::text", [f"{self.quoted}.changes"]).fetchone()
        if found is None:
            return -1
        return int(database.execute("SELECT version FROM changes").fetchone()[0])
