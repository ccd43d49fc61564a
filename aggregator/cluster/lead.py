"""The lead of a fleet on PostgreSQL: the lock of the session with which the leading aggregator writes.

A leader has one connection. When PostgreSQL ends its session, it loses the lock and can write nothing more, so that the
lock is the fence as well. A heartbeat keeps the session active; a standby ends one that is silent for `LEASE_S`.
"""

import contextlib
import logging
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from aggregator.cluster.postgresql import READ_CHANGES, Holder, NotLeader, PostgresDatabase, elapsed_s
from aggregator.cluster.standby import Standby
from protocol.errors import StateError, StateLocked
from protocol.log import event
from protocol.storage.folder_lock import FolderLock
from protocol.threads import start_thread

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""Seconds without a statement after which a standby ends the leader's session: its program or machine is paused."""

HEARTBEAT_S = 2.0
"""Seconds between the statements of a leader, also within a transaction."""

STATEMENT_S = 60.0
"""Seconds after which a standby ends a session whose program does not read a statement's results."""

TRANSACTION_S = 60.0
"""Seconds after which the heartbeat no longer keeps a transaction open."""

STANDBY_S = 1.0
"""Seconds between a standby's attempts to take the lock."""

LOCK_S = 5.0
"""Seconds in which PostgreSQL should notice that an earlier connection of this program has ended."""


_END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start::text = %s"


class Leader(msgspec.Struct, frozen=True):
    """Which aggregator of the fleet leads: the number of times that one has taken the lead."""

    term: int


class LeadingDatabase(PostgresDatabase):
    """A fleet's schema for the aggregator that leads the fleet, over all its connections.

    It waits as long as another aggregator leads. From then on the locks of the state directory and, in PostgreSQL, of
    the fleet are held until `close`; NotLeader is raised by whatever uses the tables once the lead is lost.

    Args:
        url: as of `PostgresDatabase`.
        fleet: the fleet's name.
        folder: the program's state directory.

    Raises:
        ConfigError: the state directory has another signing key than the fleet, or lacks its blobs.
        StateError: PostgreSQL cannot be used, has another schema version, or the state directory is locked.
    """

    _program = "protofleet aggregator"

    def __init__(self, url: str, *, fleet: str, folder: Path) -> None:
        self._folder_lock = FolderLock(folder)
        if not self._folder_lock.take():
            raise StateLocked("`aggregator run` already runs on this --state: stop it, or use another")
        self._fleet = fleet
        self._standby = Standby(folder, self._could_lead)
        self._term = 0
        self._lost = ""
        self._key: tuple[int, str] | None = None
        """Identifies this program's last session that had the lock."""
        self._session: Any = None
        """The connection that leads."""
        self._answered_s = 0.0
        self._in_use = threading.Lock()
        """Held during a heartbeat, which may run within a transaction of another thread."""
        self._stop = threading.Event()
        self._heartbeat: threading.Thread | None = None
        super().__init__(url, fleet=fleet, folder=folder)
        try:
            self.check_folder()
        except BaseException:
            self.close()
            raise

    def may_connect(self) -> bool:
        """Return True if PostgreSQL has answered so recently that no other aggregator can lead yet."""
        return self._session is not None and elapsed_s() < self._answered_s + LEASE_S

    def close(self) -> None:
        """Close the connection, which ends the fleet's lock, and release the state directory's."""
        super().close()
        self._stop.set()
        if self._heartbeat is not None:
            self._heartbeat.join()
        self._folder_lock.release()

    def _connect(self) -> None:
        self._check_lost()
        super()._connect()

    def _prepare(self) -> None:
        self._take_lock()
        self._migrate(is_locked=True)
        self._check_version()
        number = self._cell(READ_CHANGES)
        self._check_newer(number)
        self._newest = number
        self._begin()

    def _has_failed(self) -> bool:
        with self._in_use:
            return super()._has_failed()

    def _drop(self) -> None:
        with self._in_use:
            self._session = None
        super()._drop()

    def _take_lock(self) -> None:
        """Take the fleet's lock on a new connection; wait while another aggregator has it.

        Raises NotLeader if this program has led before.
        """
        deadline_s = time.monotonic() + LOCK_S
        while not self._cell("SELECT pg_try_advisory_lock(%s)", self._lock_number):
            holder = self._holder()
            pause_s = 0.1
            if holder is None:
                pass  # it has just ended
            elif self._term and holder.key != self._key:
                raise self._replaced(holder.host)
            elif self._term:
                # This program's own earlier session, whose end PostgreSQL has not noticed.
                self._end(holder)
            else:
                self._standby.wait(holder.host)
                pause_s = self._end_if_silent(holder)
            if self._term and time.monotonic() > deadline_s:
                raise StateError(
                    f"cannot use {self.path}: PostgreSQL does not end this program's earlier session"
                )
            time.sleep(pause_s)

    def _could_lead(self) -> bool:
        """Check the state directory, as `Standby` says."""
        with (
            contextlib.suppress(StateError),
            contextlib.closing(
                PostgresDatabase(self._url, fleet=self._fleet, folder=self._folder, read_only=True)
            ) as tables,
        ):
            tables.check_folder()
            return True
        return False

    def _end_if_silent(self, holder: Holder) -> float:
        """End the session of a leader that gives no sign of life; return the seconds before the next attempt."""
        if not _is_silent(holder):
            return STANDBY_S
        text = "the leading aggregator does not answer: its session is ended"
        event(log, logging.WARNING, text, leader=holder.host, seconds=round(holder.idle_s, 1))
        self._end(holder)
        return 0.1

    def _begin(self) -> None:
        """Lead with a connection that has the lock, once the schema is up to date.

        Raises NotLeader if another aggregator has led since this program's last connection.
        """
        sent_s = elapsed_s()
        if not self._term:
            self._term = self._next_term()
            event(log, logging.INFO, "this aggregator leads the fleet now", term=self._term)
        elif self._stored_term() != self._term:
            raise self._replaced("")
        holder = self._holder()
        self._key = None if holder is None else holder.key
        with self._in_use:
            self._session, self._answered_s = self._db, sent_s
        if self._heartbeat is None:
            self._heartbeat = start_thread(
                self._beat_until_closed, name="heartbeat", on_failure=lambda _: None
            )

    def _stored_term(self) -> int:
        """Return how many aggregators have taken the lead of the fleet so far."""
        row = self._db.execute("SELECT value FROM facts WHERE name = %s", [Leader.__name__]).fetchone()
        return 0 if row is None else self.decode(row[0], Leader).term

    def _next_term(self) -> int:
        """Count and name this program as the one that leads; returns the number."""
        with self._db.transaction():
            self._db.execute("UPDATE changes SET number = number + 1")
            leader = Leader(self._stored_term() + 1)
            self._db.execute(
                "INSERT INTO facts VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                [Leader.__name__, msgspec.json.encode(leader).decode()],
            )
        return leader.term

    def _end(self, holder: Holder) -> None:
        """End a session, and with it its transaction and its locks."""
        self._db.execute(_END, list(holder.key))

    def _check_lost(self) -> None:
        if self._lost:
            raise NotLeader(self._lost)

    def _beat(self) -> None:
        with self._in_use:
            session, sent_s, begun_s = self._session, elapsed_s(), self._begun_s
            is_overdue = begun_s is not None and sent_s > begun_s + TRANSACTION_S
            if session is None or is_overdue:
                return
            try:
                session.execute("SELECT 1")
            except psycopg.Error:  # an answer, if the connection is open: the transaction has failed before
                if session.closed:
                    self._session = None
                    return
            self._answered_s = sent_s

    def _beat_until_closed(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self._beat()

    def _replaced(self, leader: str) -> NotLeader:
        return self._lose(f"another aggregator leads the fleet{leader and f' on {leader}'}")

    def _lose(self, reason: str) -> NotLeader:
        """Give the lead up, for good; return the error to raise, as `check_lead` does from now on."""
        self._drop()
        self._lost = reason
        return NotLeader(reason)


def _is_silent(holder: Holder) -> bool:
    """Return True if a leader's program gives no sign of life, rather than PostgreSQL is slow."""
    if holder.is_active:
        return holder.waits_for_client and holder.idle_s > STATEMENT_S
    return holder.idle_s > LEASE_S
