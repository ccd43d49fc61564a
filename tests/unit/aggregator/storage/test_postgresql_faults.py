"""Faults of PostgreSQL and of the network before it: what was committed stays, and everything else can be repeated."""

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.storage import postgresql as database
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import SigningKey
from protocol.errors import NotLeader, StateError
from tests.support.databases.postgresql import PostgreSQL
from tests.support.databases.proxy import DatabaseProxy, Fault
from tests.support.machine_faults import fill, small_disk

SESSIONS = "SELECT pid FROM pg_locks WHERE locktype = 'advisory'"
"""Those of aggregators."""


@pytest.fixture
def proxy(postgresql: PostgreSQL) -> Iterator[DatabaseProxy]:
    with contextlib.closing(DatabaseProxy(postgresql.port)) as opened:
        yield opened


@pytest.fixture
def through(proxy: DatabaseProxy, tmp_path: Path) -> Iterator[Store]:
    """A store whose connections go through the proxy, as the fleet's aggregator."""
    opened = open_store(tmp_path / "a", database=proxy.url, fleet=tmp_path.name, lock=True)
    with contextlib.closing(opened):
        opened.facts.put(SigningKey("before"))
        yield opened


@pytest.fixture
def direct(postgresql: PostgreSQL, through: Store, tmp_path: Path) -> Iterator[Store]:
    """Another program's store of the same fleet."""
    del through
    with contextlib.closing(
        open_store(tmp_path / "b", database=postgresql.url, fleet=tmp_path.name)
    ) as opened:
        yield opened


@pytest.mark.parametrize("fault", ["request lost", "answer lost", "silent"])
@pytest.mark.parametrize("marker", ["SELECT value", "BEGIN", "INSERT INTO facts", "COMMIT"])
def test_lost_connection(
    through: Store,
    direct: Store,
    proxy: DatabaseProxy,
    fault: Fault,
    marker: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read is repeated; a transaction is an error and can be repeated, also if its COMMIT has reached the server."""
    monkeypatch.setattr(database, "ANSWER_S", 0.3)
    version = through.database.data_version()
    proxy.provoke(fault, marker)
    if marker == "SELECT value":
        assert through.facts.get(SigningKey) == SigningKey("before")
    elif marker == "BEGIN":
        through.facts.put(SigningKey("after"))
    else:
        with pytest.raises(StateError, match="cannot use postgresql://"):
            through.facts.put(SigningKey("after"))
        is_stored = (fault, marker) == ("answer lost", "COMMIT")
        assert direct.facts.get(SigningKey) == SigningKey("after" if is_stored else "before")
        assert (
            through.database.data_version() != version
        ) == is_stored  # so that nothing of it is read from a cache
        through.facts.put(SigningKey("after"))
    assert proxy.faults == 1
    assert direct.facts.get(SigningKey) == through.facts.get(SigningKey)
    assert direct.database.is_locked()


def test_session_that_an_administrator_ends(through: Store, direct: Store, postgresql: PostgreSQL) -> None:
    """Only what is in a transaction is an error; the next call connects and locks the fleet again."""
    end = SESSIONS.replace("pid", "pg_terminate_backend(pid)")

    def put_and_end() -> None:
        with through.transaction():
            through.facts.put(SigningKey("lost"))
            postgresql.execute(end)
            through.facts.put(SigningKey("lost"))

    assert postgresql.execute(end) == [(True,)]
    through.facts.put(SigningKey("after"))
    with pytest.raises(StateError, match="terminating connection"):
        put_and_end()
    assert direct.facts.get(SigningKey) == through.facts.get(SigningKey) == SigningKey("after")
    assert direct.database.is_locked()


def test_server_that_has_become_read_only(through: Store, direct: Store, postgresql: PostgreSQL) -> None:
    """Each write is an error, after which the next one connects again: another server may be at the address by then."""
    before = postgresql.execute(SESSIONS)
    reload = "SELECT pg_reload_conf()"
    try:
        postgresql.execute("ALTER SYSTEM SET default_transaction_read_only = on", reload)
        with pytest.raises(StateError, match="read-only transaction"):
            _write_until_it_fails(through)
        assert through.facts.get(SigningKey) == SigningKey("before")
        assert postgresql.execute(SESSIONS) != before
    finally:
        postgresql.execute("ALTER SYSTEM RESET default_transaction_read_only", reload)
    while direct.facts.get(SigningKey) != SigningKey("after"):
        with contextlib.suppress(StateError):
            through.facts.put(SigningKey("after"))


def _write_until_it_fails(store: Store) -> None:
    while True:  # until the server has read its settings
        store.database.check_writable()


def test_full_disk(tmp_path: Path) -> None:
    """A write that does not fit is an error, as is a trial; once there is room, both succeed."""
    with small_disk(size_bytes=64 * 1024**2) as disk, contextlib.closing(PostgreSQL(disk)) as server:
        server.start()
        with contextlib.closing(
            open_store(tmp_path / "a", database=server.url, fleet="f", lock=True)
        ) as store:
            store.facts.put(SigningKey("before"))
            fill(disk)
            with pytest.raises(StateError, match="No space left on device"):
                store.database.check_writable()
            with pytest.raises(StateError, match="No space left on device"):
                store.refusals.count("a", reason="shape", detail=secrets.token_hex(2**20), now_s=1.0)
            assert store.facts.get(SigningKey) == SigningKey("before")
            (disk / "filler").unlink()
            store.database.check_writable()
            store.refusals.count("a", reason="shape", detail="", now_s=1.0)
            assert [each.count for each in store.refusals.all()] == [1]


def test_tables_that_went_back_in_time(through: Store, direct: Store, postgresql: PostgreSQL) -> None:
    """A program that knows what is no longer in them ends; the next one goes on."""
    direct.database.data_version()
    back = f'UPDATE "fleet_{through.folder.parent.name}".changes SET number = number - 1'  # noqa: S608
    through.database.data_version()
    postgresql.execute(back)
    with pytest.raises(NotLeader, match="lacks its last 1 changes"):
        through.database.data_version()
    with pytest.raises(NotLeader):
        through.facts.put(SigningKey("after"))
    with pytest.raises(NotLeader):
        direct.facts.put(SigningKey("of a receiver"))
    through.close()
    with contextlib.closing(open_store(through.folder, lock=True)) as store:
        store.facts.put(SigningKey("again"))


def test_failover_to_a_replica(tmp_path: Path) -> None:
    """A URL with both servers finds the one that can be written; meanwhile nothing can."""
    with contextlib.closing(PostgreSQL()) as primary:
        primary.start()
        with contextlib.closing(primary.replica()) as replica:
            replica.start()
            hosts = f"127.0.0.1:{primary.port},127.0.0.1:{replica.port}"
            url = f"postgresql://fleet@{hosts}/postgres?target_session_attrs=read-write"
            with contextlib.closing(open_store(tmp_path / "a", database=url, fleet="f", lock=True)) as store:
                store.facts.put(SigningKey("before"))
                _wait_for_replica(primary)
                primary.kill()
                with pytest.raises(StateError, match="session is read-only"):
                    store.database.check_writable()
                replica.promote()
                assert store.facts.get(SigningKey) == SigningKey("before")
                store.facts.put(SigningKey("after"))
                assert store.database.is_locked()


def _wait_for_replica(primary: PostgreSQL) -> None:
    behind = "SELECT 1 FROM pg_stat_replication WHERE replay_lsn = pg_current_wal_lsn()"
    while not primary.execute(behind):
        time.sleep(0.05)
