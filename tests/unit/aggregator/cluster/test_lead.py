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

from aggregator.cluster import lead
from aggregator.cluster.postgresql import NotLeader
from aggregator.cluster.standby import Standby
from aggregator.coordination.round_state import Settings
from aggregator.messaging.manifest_signer import identity_of
from aggregator.security.key_rotation import rotate_key
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask, SigningKey, TaskPreparation
from protocol.errors import ConfigError, StateError
from protocol.wire.signing import public_key
from tests.support.databases.postgresql import PostgreSQL

NEVER_S = 3600.0


class Waiting:
    """A store that is opened in a thread as soon as it leads."""

    def __init__(self, open_to_lead: Callable[[], Store]) -> None:
        self._calls = threading.Semaphore(0)
        self._leaders: list[str] = []
        self._opened: list[Store] = []
        self._thread = threading.Thread(target=lambda: self._opened.append(open_to_lead()), daemon=True)
        self._thread.start()

    def wait(self, leader: str) -> None:
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
    def __init__(self, folder: Path, server: PostgreSQL, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._server, self._patch = folder, server, monkeypatch
        self.url = server.url
        self._stores = contextlib.ExitStack()

    def store(self, name: str, *, lock: bool = True) -> Store:
        opened = open_store(
            self._folder / name, database=self._server.url, fleet=self._folder.name, lock=lock
        )
        self._stores.callback(opened.close)
        return opened

    def waiting(self, name: str) -> Waiting:
        """Open the only store that waits."""
        waiting: Waiting
        ready = threading.Event()

        def open_to_lead() -> Store:
            ready.wait()
            return self.store(name)

        waiting = Waiting(open_to_lead)
        self._patch.setattr(Standby, "wait", lambda _, leader: waiting.wait(leader))
        ready.set()
        return waiting

    def close(self) -> None:
        self._stores.close()


@pytest.fixture
def fleet(tmp_path: Path, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lead, "STANDBY_S", 0.05)
    monkeypatch.setattr(lead, "HEARTBEAT_S", NEVER_S)  # without luck: only a test's own statements count
    monkeypatch.setattr(lead, "LEASE_S", NEVER_S)
    opened = Fleet(tmp_path, postgresql, monkeypatch)
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
    first.facts.put(TaskPreparation("1"))
    waiting = fleet.waiting("second")
    assert waiting.leader() == first.database.leader() == platform.node()[:30]
    assert first.database.may_connect()
    first.database.data_version()
    first.close()
    second = waiting.store()
    assert second.database.may_connect()
    assert second.facts.get(TaskPreparation) == TaskPreparation("1")
    with pytest.raises(NotLeader):
        first.facts.put(TaskPreparation("2"))
    assert not first.database.may_connect()


def test_a_silent_leader_loses_its_lead_for_good(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within its transaction, of which nothing is stored, and after its successor has ended."""
    first = fleet.store("first")

    def put_and_lose() -> Store:
        with contextlib.suppress(StateError), first.transaction():
            first.facts.put(TaskPreparation("1"))
            waiting = fleet.waiting("second")
            waiting.leader()
            monkeypatch.setattr(lead, "LEASE_S", 0.0)
            second = waiting.store()
            monkeypatch.setattr(lead, "LEASE_S", NEVER_S)
            first.facts.put(TaskPreparation("2"))
        return second

    second = put_and_lose()
    with pytest.raises(NotLeader, match="another aggregator leads the fleet on "):
        first.database.data_version()
    second.close()
    with pytest.raises(NotLeader):
        first.facts.put(TaskPreparation("3"))
    assert not first.database.may_connect()
    assert fleet.store("third").facts.get(TaskPreparation) is None


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
            assert first.database.may_connect()

    with pytest.raises(StateError, match="a statement of the transaction has failed"):
        beat_and_fail()
    first.database.data_version()


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
        assert not first.database.may_connect()


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
    assert waiting.store().database.may_connect() is False  # as no lease lasts
    with pytest.raises(NotLeader):
        first.database.data_version()


def test_a_leader_whose_connection_is_cut_leads_on(fleet: Fleet) -> None:
    """It ends its own earlier session if PostgreSQL has not noticed that end."""
    first = fleet.store("first")
    _cut(fleet, first)
    _database(first)._beat()
    assert not first.database.may_connect()
    first.database.data_version()
    assert first.database.may_connect()
    unnoticed = _session(first)
    _database(first)._db = None
    first.database.data_version()
    assert first.database.may_connect()
    with pytest.raises(psycopg.OperationalError):
        unnoticed.execute("SELECT 1")


def test_a_leader_that_others_have_followed_does_not_lead_again(fleet: Fleet) -> None:
    """Although the lock is free: what it knows is outdated."""
    first = fleet.store("first")
    _cut(fleet, first)
    fleet.store("second").close()
    with pytest.raises(NotLeader):
        first.database.data_version()
    assert fleet.store("third").database.may_connect()


def test_a_standby_counts_as_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Service managers would end it otherwise; what it logs is there once, and it is checked again later."""
    checks: list[bool] = []

    def check() -> bool:
        checks.append(True)
        return len(checks) > 1

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, caplog.at_level(logging.INFO):
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        standby = Standby(tmp_path, check)
        for _ in range(3):
            standby.wait("host")
        assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"WATCHDOG=1"]
    assert caplog.text.count("standby: another aggregator leads the fleet leader=host") == 1
    assert len(checks) == 2


def test_commands_run_beside_a_leader(fleet: Fleet) -> None:
    first, command = fleet.store("first"), fleet.store("second", lock=False)
    command.facts.put(TaskPreparation("1"))
    assert command.database.may_connect()
    assert first.facts.get(TaskPreparation) == TaskPreparation("1")


def test_only_an_aggregator_with_the_fleets_blobs_may_lead(fleet: Fleet, tmp_path: Path) -> None:
    """Otherwise it would count all submissions as lost; before the first task there is nothing to lose."""
    first, second = fleet.store("first"), fleet.store("second", lock=False)
    shutil.rmtree(tmp_path / "second" / "blobs")
    second.database.check_folder()
    first.facts.put(
        ServedTask(bytes(32), 1, tmp_path.name, "fedtc", ("apple",), Settings(quorum=1, deadline_s=1))
    )
    with pytest.raises(ConfigError, match="mount its folder blobs here"):
        fleet.store("second")  # a standby, at its start
    first.close()
    with pytest.raises(ConfigError, match="mount its folder blobs here"):
        fleet.store("second")
    (tmp_path / "second" / "blobs").mkdir()
    assert fleet.store("second").database.may_connect()


def test_only_the_fleets_signing_key_may_lead(fleet: Fleet, tmp_path: Path) -> None:
    """A standby is refused at its start, and a missing key is not replaced by a new one."""
    first = fleet.store("first")
    first.database.check_folder()
    first.facts.put(SigningKey(public_key(identity_of(first.folder)).hex()))
    first.database.check_folder()
    second = fleet.store("second", lock=False).database
    with pytest.raises(ConfigError, match=r"is missing: copy the folder identity"):
        fleet.store("second")
    assert not (tmp_path / "second" / "identity").exists()
    identity_of(tmp_path / "second")
    with pytest.raises(ConfigError, match="is not the fleet's signing key"):
        fleet.store("second")
    shutil.rmtree(tmp_path / "second" / "identity")
    shutil.copytree(tmp_path / "first" / "identity", tmp_path / "second" / "identity")
    second.check_folder()
    first.close()
    command = fleet.store("first", lock=False)
    rotate_key(command, fleet=tmp_path.name)
    command.database.check_folder()
    with pytest.raises(ConfigError, match="is not the fleet's signing key"):
        second.check_folder()
