"""The lead of a fleet on PostgreSQL: the lock of the session with which the leading aggregator writes.

A leader has one connection. When PostgreSQL ends its session, it loses the lock and can write nothing more, so that the
lock is the fence as well. A heartbeat keeps the session active; a standby ends one that is silent for `LEASE_S`.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from aggregator.storage.postgresql.schema import Holder, PostgresSchema
from protocol.errors import NotLeader, StateError
from protocol.log import event
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

Standby = Callable[[str], None]
"""Called about every `STANDBY_S` while another aggregator leads, with its machine's name; may raise."""


class Lead:
    """The lead of a fleet for one program, over all its connections.

    Args:
        schema: the fleet's schema.
        place: where the fleet's tables are, for messages.
        standby: wait while another aggregator leads, and call this; None to raise StateError.
    """

    def __init__(self, schema: PostgresSchema, *, place: str, standby: Standby | None) -> None:
        self._schema = schema
        self._place = place
        self._standby = standby
        self._term = 0
        self._lost = ""
        self._key: tuple[int, str] | None = None
        """Identifies this program's last session that had the lock."""
        self._session: Any = None
        self._answered_s = 0.0
        self.in_use = threading.Lock()
        """Held during a heartbeat, which may run within a transaction of another thread."""
        self.begun_s: float | None = None
        """When the open transaction was begun, by `elapsed_s`."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def lock(self, database: Any) -> None:
        """Take the fleet's lock on a new connection; wait while another aggregator has it.

        Raises:
            NotLeader: this program has led, and another one leads now.
            StateError: another aggregator leads, and there is no `standby`.
        """
        self.check()
        deadline_s = time.monotonic() + LOCK_S
        while not self._schema.lock(database):
            holder = self._schema.holder(database)
            pause_s = 0.1
            if holder is None:
                pass  # it has just ended
            elif self._term and holder.key != self._key:
                raise self._lose(holder.host)
            elif self._term:
                self._schema.end(database, holder)  # this program's own, whose end PostgreSQL has not noticed
            elif self._standby is not None:
                self._standby(holder.host)
                if _is_silent(holder):
                    text = "the leading aggregator does not answer: its session is ended"
                    event(log, logging.WARNING, text, leader=holder.host, seconds=round(holder.idle_s, 1))
                    self._schema.end(database, holder)
                else:
                    pause_s = STANDBY_S
            if (self._term or self._standby is None) and time.monotonic() > deadline_s:
                raise StateError(
                    f"`aggregator run` already runs on {self._place}: stop it, or use another --store"
                )
            time.sleep(pause_s)

    def begin(self, database: Any) -> None:
        """Lead with a connection that has the lock, once the schema is up to date.

        Raises NotLeader if another aggregator has led since this program's last connection.
        """
        sent_s = elapsed_s()
        if not self._term:
            self._term = self._schema.next_term(database)
        elif self._schema.term(database) != self._term:
            raise self._lose("")
        holder = self._schema.holder(database)
        self._key = None if holder is None else holder.key
        with self.in_use:
            self._session, self._answered_s = database, sent_s
        if self._thread is None:
            self._thread = start_thread(self._beat_until_closed, name="heartbeat", on_failure=lambda _: None)

    def end(self) -> None:
        """Let no heartbeat use the connection any more, which is about to be closed."""
        with self.in_use:
            self._session = None

    def close(self) -> None:
        """End the heartbeat's thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def is_certain(self) -> bool:
        """Return True if PostgreSQL has answered so recently that no other aggregator can lead yet."""
        return self._session is not None and elapsed_s() < self._answered_s + LEASE_S

    def check(self) -> None:
        """Raise NotLeader if another aggregator has taken the lead from this program."""
        if self._lost:
            raise NotLeader(self._lost)

    def beat(self) -> None:
        """Execute a statement on the leading session, if there is one."""
        import psycopg

        with self.in_use:
            session, sent_s = self._session, elapsed_s()
            is_overdue = self.begun_s is not None and sent_s > self.begun_s + TRANSACTION_S
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
            self.beat()

    def _lose(self, leader: str) -> NotLeader:
        return self.lose(f"another aggregator leads the fleet{leader and f' on {leader}'}")

    def lose(self, reason: str) -> NotLeader:
        """Give the lead up, for good; returns the error to raise, as `check` does from now on."""
        self._lost = reason
        return NotLeader(reason)


def _is_silent(holder: Holder) -> bool:
    """Return True if a leader's program gives no sign of life, rather than PostgreSQL is slow."""
    if holder.is_active:
        return holder.waits_for_client and holder.idle_s > STATEMENT_S
    return holder.idle_s > LEASE_S


def elapsed_s() -> float:
    """Return seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
