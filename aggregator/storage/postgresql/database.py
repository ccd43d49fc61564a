"""PostgreSQL in place of the aggregator's SQLite file: the same methods, in a schema for each fleet.

Writers of a fleet run one after the other, as on SQLite: each write transaction first raises the number in the table
`changes`, whose row stays locked until the transaction ends.
"""

import contextlib
import platform
import secrets
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import psycopg

from aggregator.storage.postgresql.fleet_schema import ON, FleetSchema
from aggregator.storage.schema import postgresql_statement
from protocol.errors import NoAnswer, NotLeader, StateError

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

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class PostgresDatabase:
    """A fleet's schema in a PostgreSQL database, created or migrated if necessary.

    The threads of a program share a connection. The call that finds it lost raises StateError, unless it reads
    outside of a transaction or begins one; the next call connects again. All methods raise StateError if PostgreSQL
    cannot be reached or refuses a statement.

    Args:
        url: `postgresql://[USER@]HOST[:PORT]/DATABASE`, without a password: libpq reads PGPASSWORD and `~/.pgpass`.
        fleet: the fleet's name.
        read_only: write nothing, and do not create the schema.

    Raises:
        StateError: PostgreSQL cannot be used, or has another schema version.
    """

    is_shared = True
    """True if aggregators on other machines can use the same tables."""

    _program = "protofleet"
    """PostgreSQL shows it to administrators."""

    def __init__(self, url: str, *, fleet: str, read_only: bool = False) -> None:
        self._url, self._read_only = url, read_only
        self._schema = FleetSchema(fleet)
        self.path = f"{url}#{self._schema.name}"
        self._thread_lock = threading.RLock()
        self._db: Any = None
        self._begun_s: float | None = None
        """When the open transaction or snapshot was begun, by `elapsed_s`; None if there is none."""
        self._own_changes = 0
        self._newest = 0
        """The greatest number of changes that this program has seen committed."""
        self._time: tuple[float, float] | None = None
        try:
            with self.connection():
                pass
        except BaseException:
            self.close()
            raise

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query, which may also write and return rows."""
        with self._thread_lock:
            if not self._is_open() and not query.startswith("SELECT"):
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
        with self._thread_lock:
            if self._is_open():
                self._execute(statement, values)
                return
            with self.transaction():
                self._execute(statement, values)

    @contextlib.contextmanager
    def connection(self) -> Iterator[None]:
        """Keep other threads out while several statements run, on a connection that is opened if necessary."""
        with self._thread_lock:
            if self._db is None:
                self._connect()
            yield

    def _connect(self) -> None:
        try:
            with self._errors():
                self._db = _connection(
                    self._url, self._schema, program=self._program, read_only=self._read_only
                )
                self._prepare()
        except BaseException:
            self._drop()
            raise

    def _prepare(self) -> None:
        if not self._read_only:
            self._schema.migrate(self._db, is_locked=False)
        self._schema.check_version(self._db)

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
            before = self._own_changes
            try:
                with self._transaction("BEGIN"):
                    ((number,),) = self._execute(_RAISE, ())
                    self._check_newer(number - 1)
                    self._own_changes += 1
                    yield
                self._newest = number
            except BaseException:
                # Also after a commit whose outcome is unknown: everything is read again.
                self._own_changes = before
                raise

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        with self._thread_lock:
            if self._is_open():
                raise StateError(f"cannot use {self.path}: a transaction is open in this thread")
            self._execute(begin, ())
            self._begun_s = elapsed_s()
            try:
                yield
                self._commit()
            except BaseException:
                if self._db is not None:
                    with contextlib.suppress(StateError):
                        self._execute("ROLLBACK", ())
                raise
            finally:
                self._begun_s = None

    def _commit(self) -> None:
        if self._has_failed():
            # PostgreSQL would roll it back, and report no error.
            raise StateError(f"cannot use {self.path}: a statement of the transaction has failed")
        self._execute("COMMIT", ())

    def _has_failed(self) -> bool:
        return self._db is not None and self._db.info.transaction_status.name == "INERROR"

    def in_transaction(self) -> bool:
        with self._thread_lock:
            return self._is_open()

    def _is_open(self) -> bool:
        return self._begun_s is not None

    def data_version(self) -> int:
        with self._thread_lock:
            ((number,),) = self.read(READ_CHANGES)
            self._check_newer(number)
            if not self._is_open():  # a transaction's own number is not committed
                self._newest = number
            return int(number) - self._own_changes

    def _check_newer(self, number: int) -> None:
        """Raise NotLeader if the tables are older than before: what this program knows of them is not in them."""
        if number < self._newest:
            text = (
                f"{self.path} lacks its last {self._newest - number} changes, as after a restored backup or a failover "
                "to a server that was behind: repeat each `revoke` and `forget` since"
            )
            self._newest = number
            raise self._older(text)

    def _older(self, text: str) -> NotLeader:
        return NotLeader(text)

    def is_locked(self) -> bool:
        with self.connection(), self._errors():
            return self._schema.is_locked(self._db)

    def leader(self) -> str:
        with self.connection(), self._errors():
            holder = self._schema.holder(self._db)
        return "" if holder is None else holder.host

    def leads(self) -> bool:
        """Return False if another aggregator may have taken the fleet's lead from this program."""
        return True

    def check_lead(self) -> None:
        """Raise NotLeader if another aggregator has taken the lead, and StateError if that cannot be found out."""

    def machine_time(self) -> tuple[str, float]:
        """Return the seconds of the database's clock, for `ElapsedClock`, which all machines agree on.

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

    def check(self) -> None:
        """Raise StateError if the tables cannot be read; damage within them is PostgreSQL's to find."""
        self.read(READ_CHANGES)

    def close(self) -> None:
        with self._thread_lock:
            self._drop()

    def _drop(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _execute(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        if self._is_open() and self._db is None:
            raise StateError(f"cannot use {self.path}: the connection was lost in this transaction")
        was_connected = self._db is not None
        try:
            return self._execute_once(sql, values)
        except StateError:
            if self._is_open() or self._db is not None or not was_connected:
                raise
        return self._execute_once(sql, values)  # a read or BEGIN: again, on another connection

    def _execute_once(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self.connection(), self._errors():
            cursor = self._db.execute(postgresql_statement(sql), [_storable(each) for each in values] or None)
            return cursor.fetchall() if cursor.description else []

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
            kind = NoAnswer if isinstance(error, psycopg.OperationalError) and _may_pass(text) else StateError
            raise kind(f"cannot use {self.path}: {text}{todo}") from error


class Connection(psycopg.Connection[Any]):
    """A connection that is closed, with an OperationalError, if the server does not answer."""

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """Return the result of a generator of psycopg, which calls this for each communication with the server."""
        try:
            return super().wait(_within(gen, ANSWER_S), *arguments, **options)
        except _NoAnswer:
            self.close()
            raise


class _NoAnswer(psycopg.OperationalError):
    pass


def _within(gen: Any, seconds: float) -> Generator[Any, Any, Any]:
    """Wrap a generator that yields what it waits for, and is sent what is ready: nothing, every tenth of a second."""
    wanted, deadline = next(gen), time.monotonic() + seconds
    while True:
        ready = yield wanted
        if ready:
            deadline = time.monotonic() + seconds
        elif time.monotonic() > deadline:
            raise _NoAnswer(f"PostgreSQL has not answered for {seconds:.0f} s")
        try:
            wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


def _connection(url: str, schema: FleetSchema, *, program: str, read_only: bool) -> Connection:
    """Return a connection to a database, on which each statement is a transaction unless one is begun."""
    name = f"{program}{ON}{platform.node()[:30]}"
    database = Connection.connect(url, autocommit=True, application_name=name, **_OPTIONS)  # type: ignore[arg-type]
    settings = {**_SETTINGS, "search_path": schema.quoted}
    if read_only:
        settings["default_transaction_read_only"] = "on"
    try:
        each = ", ".join(["set_config(%s, %s, false)"] * len(settings))
        database.execute(f"SELECT {each}", [text for setting in settings.items() for text in setting])
    except BaseException:
        database.close()
        raise
    return database


def _may_pass(reason: str) -> bool:
    """Return True if a connection may succeed later: its failure is no answer such as a wrong password."""
    is_busy = any(text in reason for text in ("the database system is", "too many", "connection slots"))
    return is_busy or not ("FATAL:" in reason or "no password supplied" in reason)


def _storable(value: Any) -> Any:
    """Return a value without NUL characters, which PostgreSQL's texts cannot hold, and devices may send."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(value, str) else value


def elapsed_s() -> float:
    """Return seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(_CLOCK)
