"""PostgreSQL in place of the aggregator's SQLite file: the same methods, in a schema for each fleet.

Writers of a fleet run one after the other, as on SQLite: each write transaction first raises the number in the table
`changes`, whose row stays locked until the transaction ends.
"""

import contextlib
import hashlib
import platform
import secrets
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psycopg

from aggregator.cluster.dialect import postgresql_script, postgresql_statement
from aggregator.cluster.state_folder import check_state_folder
from aggregator.storage import schema
from protocol.errors import NoStateError, ProtofleetError, StateError
from protocol.storage.elapsed_clock import ElapsedClock, machine_time
from protocol.storage.facts import Facts

Value = TypeVar("Value")

ANSWER_S = 20.0
"""Seconds without a byte after which a server that owes an answer counts as gone.

TCP notices within the same time that a machine is gone, but not that a server, or a proxy before it, is stuck.
"""

TRIAL_BYTES = 64 * 1024
"""More than fits into the free space of a page of a table: on a full disk it cannot be written."""

_OPTIONS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Options of libpq: a server that is gone without a word is noticed within 25 seconds."""

_SETTINGS = {
    "idle_in_transaction_session_timeout": "60s",
    "lock_timeout": "10s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
"""Settings of a connection: transactions and locks of a client that is gone without a word end."""

_RAISE = "UPDATE changes SET number = number + 1 RETURNING number"

READ_CHANGES = "SELECT number FROM changes"


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


class NotLeader(ProtofleetError):
    """Another aggregator leads the fleet, or the tables went back in time: this one can write nothing more."""


class PostgresDatabase:
    """A fleet's schema in a PostgreSQL database, created or migrated if necessary.

    The threads of a program share a connection. The call that finds it lost raises StateError, unless it reads
    outside of a transaction or begins one; the next call connects again. All methods raise StateError if PostgreSQL
    cannot be reached or refuses a statement.

    Args:
        url: `postgresql://[USER@]HOST[:PORT]/DATABASE`, without a password: libpq reads PGPASSWORD and `~/.pgpass`.
        fleet: the fleet's name.
        folder: the program's state directory.
        read_only: write nothing, and do not create the schema.

    Raises:
        StateError: PostgreSQL cannot be used, or has another schema version.
    """

    _program = "protofleet"
    """PostgreSQL shows it to administrators."""

    def __init__(self, url: str, *, fleet: str, folder: Path, read_only: bool = False) -> None:
        self._url, self._folder, self._read_only = url, folder, read_only
        self._schema = schema_name(fleet)
        self._quoted = quoted(self._schema)
        self.path = f"{url}#{self._schema}"
        digest = _digest(fleet)
        self._lock_number = int.from_bytes(digest[:8]) >> 1  # below 2**63
        self._migration_lock = int.from_bytes(digest[8:16]) >> 1
        self._thread_lock = threading.RLock()
        self._db: Any = None
        self._begun_s: float | None = None
        """When the open transaction or snapshot was begun, by `elapsed_s`; None if there is none."""
        self._newest = 0
        """The greatest number of changes that this program has seen committed."""
        self._time: tuple[float, float] | None = None
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query, which may also write and return rows."""
        with self._thread_lock:
            if not self.in_transaction() and not query.startswith("SELECT"):
                with self.transaction():
                    return self._execute(query, values)
            return self._execute(query, values)

    def decode(self, text: str, kind: type[Value]) -> Value:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise StateError(
                f"cannot use {self.path}: damaged contents: {error}: restore a backup of PostgreSQL"
            ) from error

    def write(self, statement: str, *values: Any) -> None:
        self.read(statement, *values)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        """Keep other threads out while statements run, on a connection that is opened if necessary."""
        with self._thread_lock:
            if self._db is None:
                self._connect()
            with self._errors():
                yield

    def _connect(self) -> None:
        """Open a connection, on which each statement is a transaction unless one is begun."""
        name = f"{self._program}{ON}{platform.node()[:30]}"
        settings = {**_SETTINGS, "search_path": self._quoted}
        if self._read_only:
            settings["default_transaction_read_only"] = "on"
        each = ", ".join(["set_config(%s, %s, false)"] * len(settings))
        try:
            with self._errors():
                self._db = Connection.connect(self._url, autocommit=True, application_name=name, **_OPTIONS)  # type: ignore[arg-type]
                self._db.execute(f"SELECT {each}", [text for setting in settings.items() for text in setting])
                self._prepare()
        except BaseException:
            self._drop()
            raise

    def _prepare(self) -> None:
        if not self._read_only:
            self._migrate(is_locked=False)
        self._check_version()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        with self._transaction("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"):
            yield

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make the changes of the body durable together at its end, or none of them if it raises.

        No other process can write in between.
        """
        with self._thread_lock:
            with self._transaction("BEGIN"):
                ((number,),) = self._execute(_RAISE, ())
                self._check_newer(number - 1)
                yield
            self._newest = number

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        with self._thread_lock:
            if self.in_transaction():
                raise StateError(f"cannot use {self.path}: a transaction is open in this thread")
            self._execute(begin, ())
            self._begun_s = elapsed_s()
            try:
                yield
                if self._has_failed():
                    # PostgreSQL would roll it back, and report no error.
                    raise StateError(f"cannot use {self.path}: a statement of the transaction has failed")
                self._execute("COMMIT", ())
            except BaseException:
                if self._db is not None:
                    with contextlib.suppress(StateError):
                        self._execute("ROLLBACK", ())
                raise
            finally:
                self._begun_s = None

    def _has_failed(self) -> bool:
        return self._db is not None and self._db.info.transaction_status.name == "INERROR"

    def in_transaction(self) -> bool:
        with self._thread_lock:
            return self._begun_s is not None

    def data_version(self) -> int:
        with self._thread_lock:
            ((number,),) = self.read(READ_CHANGES)
            self._check_newer(number)
            if not self.in_transaction():  # a transaction's own number is not committed
                self._newest = number
            return int(number)

    def _check_newer(self, number: int) -> None:
        """Raise NotLeader if the tables are older than before: what this program knows of them is not in them."""
        if number < self._newest:
            text = (
                f"{self.path} lacks its last {self._newest - number} changes, as after a restored backup or a failover "
                "to a server that was behind: repeat each `revoke` and `forget` since"
            )
            self._newest = number
            raise self._lose(text)

    def _lose(self, reason: str) -> NotLeader:
        return NotLeader(reason)

    def is_locked(self) -> bool:
        with self._connection():
            return self._holder() is not None

    def leader(self) -> str:
        with self._connection():
            holder = self._holder()
        return "" if holder is None else holder.host

    def may_connect(self) -> bool:
        return True

    def check_folder(self) -> None:
        check_state_folder(self._folder, Facts(self))

    def clock(self, facts: Facts) -> ElapsedClock:
        return ElapsedClock(facts, read_only=self._read_only, machine=self._server_time)

    def _server_time(self) -> tuple[str, float]:
        """Return the seconds of the database's clock, which all machines agree on.

        It is read once; from then on this machine's clock adds the seconds that pass, and nothing sets it back.
        """
        if self._time is None:
            ((now_s,),) = self.read("SELECT extract(epoch FROM clock_timestamp())::float8")
            self._time = now_s, elapsed_s()
        now_s, read_s = self._time
        return "postgresql", now_s + elapsed_s() - read_s

    def check_writable(self) -> None:
        """Write TRIAL_BYTES and delete them, to find out whether PostgreSQL can."""
        with self.transaction():
            trial = secrets.token_hex(TRIAL_BYTES // 2)
            self._execute("INSERT INTO facts VALUES ('trial', ?)", (trial,))
            self._execute("DELETE FROM facts WHERE name = 'trial'", ())

    def check_file(self) -> None:
        """Do nothing: a connection that answers is one to the tables, which are not a file to delete."""

    def search_damage(self) -> None:
        """Do nothing: damage is PostgreSQL's to find."""

    def close(self) -> None:
        with self._thread_lock:
            self._drop()

    def _drop(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _execute(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        if self.in_transaction() and self._db is None:
            raise StateError(f"cannot use {self.path}: the connection was lost in this transaction")
        was_connected = self._db is not None
        try:
            return self._execute_once(sql, values)
        except StateError:
            if self.in_transaction() or self._db is not None or not was_connected:
                raise
        return self._execute_once(sql, values)  # a read or BEGIN: again, on another connection

    def _execute_once(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._connection():
            cursor = self._db.execute(postgresql_statement(sql), [_storable(each) for each in values] or None)
            return cursor.fetchall() if cursor.description else []

    def _holder(self) -> Holder | None:
        """Return the session that holds the lock of the fleet's aggregator; None if it is free."""
        values = [self._lock_number >> 32, self._lock_number & 0xFFFFFFFF]
        row = self._db.execute(_HOLDER, values).fetchone()
        if row is None:
            return None
        pid, start, name, is_active, waits_for_client, idle_s = row
        host = (name or "").rpartition(ON)[2]
        return Holder((pid, start), host, bool(is_active), bool(waits_for_client), idle_s or 0.0)

    def _migrate(self, *, is_locked: bool) -> None:
        """Bring the schema to this version, created if missing, in one transaction.

        `is_locked` tells whether this program holds the fleet's lock. Raises StateError if an aggregator of another
        version runs.
        """
        expected = schema.newest_version()
        if self._version() >= expected:
            return
        with self._db.transaction():
            self._db.execute("SELECT pg_advisory_xact_lock(%s)", [self._migration_lock])
            version = self._version()
            if 0 <= version < expected and not is_locked and self.is_locked():
                raise StateError(
                    f"{self._schema} has schema version {version}, expected {expected}, and `aggregator run` "
                    "of an older protofleet runs on it: stop it, and start it with this version"
                )
            if 0 <= version <= schema.BASE_VERSION:
                raise StateError(
                    f"{self._schema} has schema version {version}, of an earlier protofleet, which this one cannot "
                    "use: drop the schema, or use that protofleet"
                )
            if version < 0:
                # It may be there, made for a role that may not create any.
                if self._cell("SELECT to_regnamespace(%s)", self._quoted) is None:
                    self._db.execute(f"CREATE SCHEMA {self._quoted}")
                self._db.execute(_CHANGES)
            for script in schema.MIGRATIONS[max(version - schema.BASE_VERSION, 0) :]:
                self._db.execute(postgresql_script(script))
            self._db.execute("UPDATE changes SET version = GREATEST(version, %s)", [expected])

    def _check_version(self) -> None:
        """Raise StateError unless the schema is there, in this version."""
        version, expected = self._version(), schema.newest_version()
        if version < 0:
            raise NoStateError(
                f"no aggregator state in {self._schema} of this database: start `aggregator run` first, or give the "
                "`fleet` of its task file as --fleet"
            )
        if version != expected:
            todo = "upgrade protofleet here" if version > expected else "start `aggregator run` on it once"
            raise StateError(f"{self._schema} has schema version {version}, expected {expected}: {todo}")

    def _version(self) -> int:
        """Return the number of migrations that have run; -1 if there are no tables."""
        is_there = self._cell("SELECT to_regclass(%s)::text", f"{self._quoted}.changes") is not None
        return self._cell("SELECT version FROM changes") if is_there else -1

    def _cell(self, query: str, *values: Any) -> Any:
        """Return the one value of a query, on the connection that is open."""
        return self._db.execute(query, values or None).fetchone()[0]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            # A server that has become read-only has perhaps been replaced, and another one is at its address now.
            is_replaced = isinstance(error, psycopg.errors.ReadOnlySqlTransaction) and not self._read_only
            if self._db is not None and (self._db.closed or is_replaced):
                self._drop()
            text = " ".join(str(error).split())
            todo = (
                ": set PGPASSWORD, or write the password into ~/.pgpass"
                if "no password supplied" in text
                else ""
            )
            raise StateError(f"cannot use {self.path}: {text}{todo}") from error


class Connection(psycopg.Connection[Any]):
    """A connection that is closed, with an OperationalError, if the server does not answer."""

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """Return the result of a generator of psycopg, which calls this for each communication with the server."""
        return super().wait(self._within_time(gen), *arguments, **options)

    def _within_time(self, gen: Any) -> Generator[Any, Any, Any]:
        """Wrap a generator that yields what it waits for, and is sent what is ready, or nothing every 0.1 s."""
        wanted, deadline = next(gen), time.monotonic() + ANSWER_S
        while True:
            ready = yield wanted
            if ready:
                deadline = time.monotonic() + ANSWER_S
            elif time.monotonic() > deadline:
                self.close()
                raise psycopg.OperationalError(f"PostgreSQL has not answered for {ANSWER_S:.0f} s")
            try:
                wanted = gen.send(ready)
            except StopIteration as end:
                return end.value


def _storable(value: Any) -> Any:
    """Return a value without NUL characters, which PostgreSQL's texts cannot hold, and devices may send."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(value, str) else value


def elapsed_s() -> float:
    """Return seconds of a clock that goes on while the machine is suspended."""
    return machine_time()[1]


def schema_name(fleet: str) -> str:
    # A period is in no fleet's name: no short name is that of a long one's schema.
    return f"fleet_{fleet}" if len(fleet) <= MAX_NAME else f"fleet.{fleet[:30]}-{_digest(fleet).hex()[:16]}"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _digest(fleet: str) -> bytes:
    return hashlib.sha256(fleet.encode()).digest()
