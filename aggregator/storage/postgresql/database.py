"""PostgreSQL in place of the aggregator's SQLite file: the same methods, in a schema for each fleet.

Writers of a fleet run one after the other, as on SQLite: each write transaction first raises the number in the table
`changes`, whose row stays locked until the transaction ends.
"""

import contextlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from aggregator.storage.postgresql.lead import Lead, Standby, elapsed_s
from aggregator.storage.postgresql.schema import PostgresSchema, connect, statement_of
from protocol.cli import require_packages
from protocol.errors import ConfigError, NoAnswer, NotLeader, StateError
from protocol.storage.folder_lock import FolderLock

Value = TypeVar("Value")

TRIAL_BYTES = 64 * 1024
"""More than fits into the free space of a page of a table: on a full disk it cannot be written."""

_RAISE = "UPDATE changes SET number = number + 1 RETURNING number"

_READ_CHANGES = "SELECT number FROM changes"


class PostgresDatabase:
    """A fleet's schema in a PostgreSQL database, created or migrated if necessary.

    The threads of a program share a connection. The call that finds it lost raises StateError, unless it reads
    outside of a transaction or begins one; the next call connects again. All methods raise StateError if PostgreSQL
    cannot be reached or refuses a statement.

    Args:
        url: `postgresql://[USER@]HOST[:PORT]/DATABASE`, without a password: libpq reads PGPASSWORD and `~/.pgpass`.
        fleet: the fleet's name.
        migrations: as of `DatabaseFile`, in SQLite's types.
        read_only: write nothing, and do not create the schema.
        held: the lock of the state directory, held until `close`, and with it the fleet's lock in PostgreSQL.
        standby: with `held`, wait while another aggregator leads the fleet, and call this.

    Raises:
        ConfigError: the URL cannot be used, or the fleet's name is missing.
        RuntimeMissing: psycopg is not installed.
        StateError: PostgreSQL cannot be used, has another schema version, or another aggregator holds a lock.
    """

    def __init__(
        self, url: str, *, fleet: str, migrations: Sequence[str], read_only: bool = False,
        held: FolderLock | None = None, standby: Standby | None = None,
    ) -> None:  # fmt: skip
        require_packages("psycopg", extras="cluster")
        if not fleet:
            raise ConfigError("expected the name of the fleet whose tables --store holds: give --fleet")
        check_url(url)
        self._url, self._read_only, self._held = url, read_only, held
        self._schema = PostgresSchema(fleet, migrations)
        self.path = f"{url}#{self._schema.name}"
        self._lead = None if held is None else Lead(self._schema, place=self.path, standby=standby)
        self._thread_lock = threading.RLock()
        self._db: Any = None
        self._is_open = False  # a transaction or snapshot
        self._own_changes = 0
        self.found = 0
        """The number of changes before this program's last connection, if it is the fleet's aggregator."""
        self.newest = 0
        """The greatest number of changes that this program has seen committed."""
        self._time: tuple[float, float] | None = None
        if held is not None and not held.take():
            raise StateError("`aggregator run` already runs on this --state: stop it, or use another")
        try:
            with self.connection():
                pass
        except BaseException:
            self.close()
            raise

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query, which may also write and return rows."""
        with self._thread_lock:
            if not self._is_open and not query.startswith("SELECT"):
                with self.transaction():
                    return self._execute(query, values)
            return self._execute(query, values)

    def decode(self, text: str, kind: type[Value]) -> Value:
        """Return the value of a JSON text; raises StateError if it is damaged."""
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise StateError(
                f"cannot use {self.path}: damaged contents: {error}: restore a backup of PostgreSQL"
            ) from error

    def write(self, statement: str, *values: Any) -> None:
        """Execute one statement, durably, or as a part of the transaction that is open in this thread."""
        with self._thread_lock:
            if self._is_open:
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
        if self._lead is not None:
            self._lead.check()
        try:
            with self._errors():
                program = "protofleet" if self._lead is None else "protofleet aggregator"
                self._db = connect(self._url, self._schema, read_only=self._read_only, program=program)
                if self._lead is not None:
                    self._lead.lock(self._db)
                if not self._read_only:
                    self._schema.migrate(self._db, is_locked=self._held is not None)
                self._schema.check_version(self._db)
                if self._lead is not None:
                    self.found = self._schema.number(self._db)
                    self._check_newer(self.found)
                    self.newest = self.found
                    self._lead.begin(self._db)
        except BaseException:
            self._drop()
            raise

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads of the body see the database as it is at the first of them, whatever others write."""
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
                self.newest = number
            except BaseException:
                # Also after a commit whose outcome is unknown: everything is read again.
                self._own_changes = before
                raise

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        with self._thread_lock:
            if self._is_open:
                raise StateError(f"cannot use {self.path}: a transaction is open in this thread")
            self._execute(begin, ())
            self._is_open = True
            if self._lead is not None:
                self._lead.begun_s = elapsed_s()
            try:
                yield
                self._commit()
            except BaseException:
                if self._db is not None:
                    with contextlib.suppress(StateError):
                        self._execute("ROLLBACK", ())
                raise
            finally:
                self._is_open = False
                if self._lead is not None:
                    self._lead.begun_s = None

    def _commit(self) -> None:
        with contextlib.nullcontext() if self._lead is None else self._lead.in_use:
            has_failed = self._db is not None and self._db.info.transaction_status.name == "INERROR"
        if has_failed:
            # PostgreSQL would roll it back, and report no error.
            raise StateError(f"cannot use {self.path}: a statement of the transaction has failed")
        self._execute("COMMIT", ())

    def in_transaction(self) -> bool:
        """Return True in a transaction, in which no other process can write."""
        with self._thread_lock:
            return self._is_open

    def data_version(self) -> int:
        """Return a number that changes when another process has written."""
        with self._thread_lock:
            ((number,),) = self.read(_READ_CHANGES)
            self._check_newer(number)
            if not self._is_open:  # a transaction's own number is not committed
                self.newest = number
            return int(number) - self._own_changes

    def _check_newer(self, number: int) -> None:
        """Raise NotLeader if the tables are older than before: what this program knows of them is not in them."""
        if number < self.newest:
            text = (
                f"{self.path} lacks its last {self.newest - number} changes, as after a restored backup or a failover "
                "to a server that was behind: repeat each `revoke` and `forget` since"
            )
            self.newest = number
            if self._lead is None:
                raise NotLeader(text)
            self._drop()
            raise self._lead.lose(text)

    def max_rows(self, table: str) -> int:
        """Return the number of rows of a table."""
        return int(self.read(f"SELECT count(*) FROM {table}")[0][0])  # noqa: S608 - of the schema

    def is_locked(self) -> bool:
        """Return True if an aggregator, on any machine, holds the fleet's lock."""
        with self.connection(), self._errors():
            return self._schema.is_locked(self._db)

    def leader(self) -> str:
        """Return the machine of the aggregator that holds the fleet's lock; empty if there is none."""
        with self.connection(), self._errors():
            holder = self._schema.holder(self._db)
        return "" if holder is None else holder.host

    def leads(self) -> bool:
        """Return False if another aggregator may have taken the fleet's lead from this program."""
        return self._lead is None or self._lead.is_certain()

    def check_lead(self) -> None:
        """Ask PostgreSQL whether this program still leads.

        Raises:
            NotLeader: another aggregator leads, and this program can write nothing more.
            StateError: PostgreSQL cannot be reached.
        """
        if self._lead is not None:
            self._lead.check()
            self.read(_READ_CHANGES)  # on a lost connection it takes the lock again
            if not self._lead.is_certain():
                self._lead.beat()

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
        self.read(_READ_CHANGES)

    def close(self) -> None:
        """Close the connection, which ends the fleet's lock, and release the state directory's."""
        with self._thread_lock:
            self._drop()
        if self._lead is not None:
            self._lead.close()
        if self._held is not None:
            self._held.release()

    def _drop(self) -> None:
        if self._lead is not None:
            self._lead.end()
        if self._db is not None:
            self._db.close()
            self._db = None

    def _execute(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        if self._is_open and self._db is None:
            raise StateError(f"cannot use {self.path}: the connection was lost in this transaction")
        was_connected = self._db is not None
        try:
            return self._execute_once(sql, values)
        except StateError:
            if self._is_open or self._db is not None or not was_connected:
                raise
        return self._execute_once(sql, values)  # a read or BEGIN: again, on another connection

    def _execute_once(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self.connection(), self._errors():
            cursor = self._db.execute(statement_of(sql), [_storable(each) for each in values] or None)
            return cursor.fetchall() if cursor.description else []

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        import psycopg

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


def _may_pass(reason: str) -> bool:
    """Return True if a connection may succeed later: its failure is no answer such as a wrong password."""
    is_busy = any(text in reason for text in ("the database system is", "too many", "connection slots"))
    return is_busy or not ("FATAL:" in reason or "no password supplied" in reason)


def _storable(value: Any) -> Any:
    """Return a value without NUL characters, which PostgreSQL's texts cannot hold, and devices may send."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(value, str) else value


def check_url(url: str) -> None:
    """Raise ConfigError unless a URL names a PostgreSQL database, without a password."""
    from urllib.parse import parse_qs, urlsplit

    try:
        parts = urlsplit(url)
        has_password = parts.password is not None or "password" in parse_qs(parts.query)
    except ValueError:
        raise ConfigError("expected postgresql://[USER@]HOST[:PORT]/DATABASE for --store") from None
    if has_password:
        raise ConfigError("the URL of --store has a password: set PGPASSWORD, or write it into ~/.pgpass")
    if parts.scheme not in {"postgresql", "postgres"}:
        raise ConfigError("expected postgresql://[USER@]HOST[:PORT]/DATABASE for --store")
