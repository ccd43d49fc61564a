"""One aggregator of a fleet leads on PostgreSQL; standbys wait for its session's end, or end it when it is silent."""

import contextlib
import logging
import platform
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aggregator.coordination.round_state import Settings
from aggregator.messaging.manifest_signer import identity_of
from aggregator.security.key_rotation import require_fleet_key, rotate_key
from aggregator.server.standby import Standby
from aggregator.storage import postgresql_lead as lead
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask, SigningKey
from protocol.errors import ConfigError, NotLeader, StateError
from protocol.wire.signing import public_key
from tests.support.databases.postgresql import PostgreSQL

NEVER_S = 3600.0


class Waiting:
    """A store that is opened in a thread as soon as it leads."""

    def __init__(self, open_to_lead: Callable[[Callable[[str], None]], Store]) -> None:
        self._calls = threading.Semaphore(0)
        self._leaders: list[str] = []
        self._opened: list[Store] = []
        self._thread = threading.Thread(
            target=lambda: self._opened.append(open_to_lead(self._wait)), daemon=True
        )
        self._thread.start()

    def _wait(self, leader: str) -> None:
        self._leaders.append(leader)
        self._calls.release()

    def leader(self) -> str:
        """Wait until it waits once more, and return who leads."""
        while self._calls.acquire(blocking=False):
            pass
        self._calls.acquire()
        return self._leaders[-1]

    def store(self) -> Store:
        self._thread.join()
        return self._opened[0]


class Fleet:
    def __init__(self, folder: Path, server: PostgreSQL) -> None:
        self._folder, self._server = folder, server
        self.url = server.url
        self._stores = contextlib.ExitStack()

    def store(self, name: str, *, standby: Callable[[str], None] | None = None, lock: bool = True) -> Store:
        fleet = self._folder.name
        opened = open_store(
            self._folder / name, database=self._server.url, fleet=fleet, lock=lock, standby=standby
        )
        self._stores.callback(opened.close)
        return opened

    def waiting(self, name: str) -> Waiting:
        return Waiting(lambda standby: self.store(name, standby=standby))

    def close(self) -> None:
        self._stores.close()


@pytest.fixture
def fleet(tmp_path: Path, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lead, "STANDBY_S", 0.05)
    monkeypatch.setattr(lead, "HEARTBEAT_S", NEVER_S)  # without luck: only a test's own statements count
    monkeypatch.setattr(lead, "LEASE_S", NEVER_S)
    opened = Fleet(tmp_path, postgresql)
    yield opened
    opened.close()


def _database(store: Store) -> lead.LeadingDatabase:
    assert isinstance(store.database, lead.LeadingDatabase)
    return store.database


def _session(store: Store) -> Any:
    return _database(store)._db


def _cut(fleet: Fleet, store: Store) -> None:
    """End a store's session, and wait until its locks are free."""
    pid = _session(store).info.backend_pid
    with psycopg.connect(fleet.url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", [pid])
        while other.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone():
            time.sleep(0.01)


def test_a_standby_leads_when_the_leader_has_ended(fleet: Fleet) -> None:
    """It knows by name who leads, changes nothing before, and is no longer certain of it once it is replaced."""
    first = fleet.store("first")
    first.facts.put(SigningKey("1"))
    waiting = fleet.waiting("second")
    assert waiting.leader() == first.database.leader() == platform.node()[:30]
    assert first.database.leads()
    first.database.check_lead()
    first.close()
    second = waiting.store()
    assert second.database.leads()
    assert second.facts.get(SigningKey) == SigningKey("1")
    with pytest.raises(NotLeader):
        first.facts.put(SigningKey("2"))
    assert not first.database.leads()


def test_a_silent_leader_loses_its_lead_for_good(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within its transaction, of which nothing is stored, and after its successor has ended."""
    first = fleet.store("first")

    def put_and_lose() -> Store:
        with contextlib.suppress(StateError), first.transaction():
            first.facts.put(SigningKey("1"))
            waiting = fleet.waiting("second")
            waiting.leader()
            monkeypatch.setattr(lead, "LEASE_S", 0.0)
            second = waiting.store()
            monkeypatch.setattr(lead, "LEASE_S", NEVER_S)
            first.facts.put(SigningKey("2"))
        return second

    second = put_and_lose()
    with pytest.raises(NotLeader, match="another aggregator leads the fleet on "):
        first.database.check_lead()
    second.close()
    with pytest.raises(NotLeader):
        first.facts.put(SigningKey("3"))
    assert not first.database.leads()
    assert fleet.store("third").facts.get(SigningKey) is None


def test_a_leader_lives_as_long_as_its_heartbeat_also_in_a_transaction(fleet: Fleet) -> None:
    """Also in one in which a statement has failed, which stays failed."""
    first = fleet.store("first")

    def last_sign() -> str:
        with psycopg.connect(fleet.url) as other:
            query = "SELECT state_change::text FROM pg_stat_activity WHERE pid = %s"
            return str(other.execute(query, [_session(first).info.backend_pid]).fetchone())

    def beat_and_fail() -> None:
        with first.transaction():
            before = last_sign()
            _database(first)._beat()
            between = last_sign()
            with contextlib.suppress(StateError):
                first.database.write("SELECT no_such_column")
            failed = last_sign()
            _database(first)._beat()
            assert len({before, between, failed, last_sign()}) == 4
            assert first.database.leads()

    with pytest.raises(StateError, match="a statement of the transaction has failed"):
        beat_and_fail()
    first.database.check_lead()


def test_the_heartbeat_goes_on_while_a_transaction_takes_its_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead, "HEARTBEAT_S", 0.01)
    first = fleet.store("first")
    with first.transaction():
        answered = _database(first)._answered_s
        while _database(first)._answered_s == answered:
            time.sleep(0.01)


def test_no_heartbeat_keeps_a_transaction_open_for_ever(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fleet.store("first")
    monkeypatch.setattr(lead, "LEASE_S", 0.0)
    with first.transaction():
        monkeypatch.setattr(lead, "TRANSACTION_S", 0.0)
        _database(first)._beat()
        assert not first.database.leads()


def test_a_slow_statement_is_no_silence(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fleet.store("first")
    waiting = fleet.waiting("second")

    def execute() -> None:
        with contextlib.suppress(StateError):  # it is cancelled
            first.database.read("SELECT pg_sleep(3600)")

    statement = threading.Thread(target=execute)
    statement.start()
    with psycopg.connect(fleet.url, autocommit=True) as other:
        pid = _session(first).info.backend_pid
        active = (
            "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND state = 'active' AND query LIKE '%%pg_sleep%%'"
        )
        while other.execute(active, [pid]).fetchone() is None:
            time.sleep(0.01)
        monkeypatch.setattr(lead, "LEASE_S", 0.0)
        monkeypatch.setattr(lead, "STATEMENT_S", 0.0)
        for _ in range(3):
            waiting.leader()
        assert other.execute(active, [pid]).fetchone() is not None
        other.execute("SELECT pg_cancel_backend(%s)", [pid])
    statement.join()
    assert waiting.store().database.leads() is False  # as no lease lasts
    with pytest.raises(NotLeader):
        first.database.check_lead()


def test_a_leader_whose_connection_is_cut_leads_on(fleet: Fleet) -> None:
    """It ends its own earlier session if PostgreSQL has not noticed that end."""
    first = fleet.store("first")
    _cut(fleet, first)
    _database(first)._beat()
    assert not first.database.leads()
    first.database.check_lead()
    assert first.database.leads()
    unnoticed = _session(first)
    _database(first)._db = None
    first.database.check_lead()
    assert first.database.leads()
    with pytest.raises(psycopg.OperationalError):
        unnoticed.execute("SELECT 1")


def test_a_leader_that_others_have_followed_does_not_lead_again(fleet: Fleet) -> None:
    """Although the lock is free: what it knows is outdated."""
    first = fleet.store("first")
    _cut(fleet, first)
    fleet.store("second").close()
    with pytest.raises(NotLeader):
        first.database.check_lead()
    assert fleet.store("third").database.leads()


def test_a_standby_counts_as_started(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Service managers would end it otherwise; what it logs is there once."""
    fleet.store("second", lock=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, caplog.at_level(logging.INFO):
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        standby = Standby(tmp_path / "second")
        standby.wait("host")
        standby.wait("host")
        assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"WATCHDOG=1"]
    assert caplog.text.count("standby: another aggregator leads the fleet leader=host") == 1


def test_a_standby_outlives_postgresql(
    tmp_path: Path, postgresql: PostgreSQL, caplog: pytest.LogCaptureFixture
) -> None:
    """But a program that is started without it ends with an error."""
    standby, failures = Standby(tmp_path), [StateError("no server"), StateError("no server")]

    def open_to_lead() -> Store:
        if failures:
            raise failures.pop()
        return open_store(tmp_path, database=postgresql.url, fleet=tmp_path.name, lock=True)

    with pytest.raises(StateError, match="no server"):
        standby.open(open_to_lead)
    standby.wait("host")
    caplog.set_level("INFO")
    with contextlib.closing(standby.open(open_to_lead)) as store:
        assert store.database.leads()
    assert "this aggregator leads the fleet now" in caplog.text


def test_a_standby_outlives_a_failed_take_over(tmp_path: Path) -> None:
    """PostgreSQL or the object store may fail between the lock and the first message of the new leader."""
    standby, failures = Standby(tmp_path), [StateError("no server"), StateError("no server")]

    def lead() -> str:
        if failures:
            raise failures.pop()
        return "stopped"

    with pytest.raises(StateError, match="no server"):
        standby.repeat(lead)
    standby.wait("host")
    assert standby.repeat(lead) == "stopped"
    assert not failures


def test_commands_run_beside_a_leader(fleet: Fleet) -> None:
    first, command = fleet.store("first"), fleet.store("second", lock=False)
    command.facts.put(SigningKey("1"))
    command.database.check_lead()
    assert command.database.leads()
    assert first.facts.get(SigningKey) == SigningKey("1")


def test_only_an_aggregator_with_the_fleets_blobs_may_lead(fleet: Fleet, tmp_path: Path) -> None:
    """Otherwise it would count all submissions as lost; before the first task there is nothing to lose."""
    first = fleet.store("first")
    fleet.store("second", lock=False)
    shutil.rmtree(tmp_path / "second" / "blobs")
    standby = Standby(tmp_path / "second")
    standby.wait("host")
    first.facts.put(
        ServedTask(bytes(32), 1, tmp_path.name, "fedtc", ("apple",), Settings(quorum=1, deadline_s=1))
    )
    with pytest.raises(ConfigError, match="mount its folder blobs here"):
        Standby(tmp_path / "second").wait("host")
    first.close()
    with pytest.raises(ConfigError, match="mount its folder blobs here"):
        fleet.store("second")
    (tmp_path / "second" / "blobs").mkdir()
    assert fleet.store("second").database.leads()


def test_only_the_fleets_signing_key_may_lead(fleet: Fleet, tmp_path: Path) -> None:
    """A standby is refused at its start, and a missing key is not replaced by a new one."""
    first = fleet.store("first")
    key = identity_of(first.folder)
    require_fleet_key(first)
    first.facts.put(SigningKey(public_key(key).hex()))
    require_fleet_key(first)
    fleet.store("second", lock=False)
    standby = Standby(tmp_path / "second")
    with pytest.raises(ConfigError, match=r"is missing: copy the folder identity"):
        standby.wait("host")
    assert not (tmp_path / "second" / "identity").exists()
    identity_of(tmp_path / "second")
    with pytest.raises(ConfigError, match="is not the fleet's signing key"):
        standby.wait("host")
    shutil.rmtree(tmp_path / "second" / "identity")
    shutil.copytree(tmp_path / "first" / "identity", tmp_path / "second" / "identity")
    standby.wait("host")
    first.close()
    command = fleet.store("first", lock=False)
    rotate_key(command, fleet=tmp_path.name)
    require_fleet_key(command)
    with pytest.raises(ConfigError, match="is not the fleet's signing key"):
        Standby(tmp_path / "second").wait("host")
