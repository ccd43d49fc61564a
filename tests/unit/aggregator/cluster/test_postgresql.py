"""PostgreSQL in place of the SQLite file: fleets, locks, migrations, and faults, after which all can be repeated."""

import contextlib
import platform
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.cluster import postgresql as database
from aggregator.commands.arguments import DeviceArguments
from aggregator.commands.session import open_session
from aggregator.storage import schema
from aggregator.storage.open_store import open_store
from aggregator.storage.schema import MIGRATIONS
from aggregator.storage.store import Store
from aggregator.storage.stored_values import TaskPreparation
from protocol.errors import ConfigError, StateError
from tests.support.databases.postgresql import DatabaseProxy, Fault, PostgreSQL
from tests.support.machine_faults import fill, small_disk
from tests.support.messages.submissions import SERVED


def _open(folder: Path, server: PostgreSQL, *, lock: bool = False) -> "contextlib.closing[Store]":
    return contextlib.closing(open_store(folder, database=server.url, fleet=folder.parent.name, lock=lock))


def test_state_directory_remembers_its_database(tmp_path: Path, postgresql: PostgreSQL) -> None:
    """For the other commands; another fleet of the same database sees nothing of it."""
    with _open(tmp_path / "a", postgresql) as store:
        store.facts.put(TaskPreparation("1"))
    with contextlib.closing(open_store(tmp_path / "a", read_only=True)) as reader:
        assert reader.facts.get(TaskPreparation) == TaskPreparation("1")
        with pytest.raises(StateError, match="read-only"):
            reader.facts.put(TaskPreparation("2"))
    with contextlib.closing(open_store(tmp_path / "b", database=postgresql.url, fleet="x" * 64)) as other:
        assert other.facts.get(TaskPreparation) is None
    open_store(tmp_path / "file").close()
    with pytest.raises(ConfigError, match="give --store with another --state"):
        open_store(tmp_path / "file", database=postgresql.url, fleet="f")


def test_program_with_another_state_directory_needs_an_object_store(
    tmp_path: Path, postgresql: PostgreSQL
) -> None:
    """It would look for the blobs in its own folder, in which they are not."""
    first, second = tmp_path / "a", tmp_path / "b"
    with _open(first, postgresql, lock=True) as running:
        running.facts.put(SERVED)
    shutil.copytree(first, second, ignore=shutil.ignore_patterns("blobs"))
    with (
        pytest.raises(ConfigError, match="start `aggregator run` there with --blobs"),
        open_session(second),
    ):
        pass
    assert not (second / "blobs").exists()
    with open_session(first) as session:
        assert session.store.blobs.put(b"")
    with pytest.raises(StateError, match="no aggregator state"), open_session(tmp_path / "c"):
        pass


def test_command_beside_a_leader_elsewhere_names_its_machine(
    tmp_path: Path, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a leader, the command leads until it ends."""
    first, second = tmp_path / "a", tmp_path / "b"
    with _open(first, postgresql, lock=True) as leader:
        leader.facts.put(SERVED)
        shutil.copytree(first, second)
        error = f"leads the fleet runs on {platform.node()[:30]}: run the command with its --state"
        with pytest.raises(ConfigError, match=error), open_session(second):
            pass
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(platform, "node", lambda: "another machine")
            for folder in (first, second):  # the lock of a standby's folder is taken, too
                with pytest.raises(ConfigError, match="run the command there"), open_session(folder):
                    pass
    for folder in (first, second):
        with open_session(folder) as session:
            assert session.store.database.is_locked()
            session.store.keys.pin("a", bytes(32), now_s=1.0)
            session.carry_out("reset-key", DeviceArguments("a"))
            assert session.store.keys.get("a") is None


def test_schema_is_not_migrated_while_an_aggregator_runs(
    tmp_path: Path, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another machine may run on the same fleet."""
    with _open(tmp_path / "a", postgresql, lock=True), _open(tmp_path / "b", postgresql) as other:
        assert other.database.is_locked()
        monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, "ALTER TABLE heads ADD COLUMN n TEXT;"))
        with pytest.raises(StateError, match="of an older protofleet runs on it"):
            open_store(tmp_path / "b")
    with _open(tmp_path / "b", postgresql, lock=True) as store:
        assert store.database.read("SELECT n FROM heads") == []


def test_writes_of_other_processes_are_noticed(tmp_path: Path, postgresql: PostgreSQL) -> None:
    """No other process sees a transaction before its end."""
    with _open(tmp_path / "a", postgresql) as one, _open(tmp_path / "b", postgresql) as other:
        before = other.database.data_version()
        with one.transaction():
            one.facts.put(TaskPreparation("1"))
            assert other.facts.get(TaskPreparation) is None
        assert other.database.data_version() != before


def test_failed_statement_undoes_its_transaction(tmp_path: Path, postgresql: PostgreSQL) -> None:
    """Also where its error was caught: PostgreSQL alone would roll back and report success."""
    with _open(tmp_path / "a", postgresql) as store:
        with pytest.raises(StateError, match="a statement of the transaction has failed"):
            _put_and_fail(store)
        assert store.facts.get(TaskPreparation) is None
        store.facts.put(TaskPreparation("2"))
        store.refusals.count("a", reason="shape", detail="a\0b % ?", now_s=1.0)
        assert store.refusals.all()[0].detail == "a\N{REPLACEMENT CHARACTER}b % ?"


def test_killed_server_is_an_error_until_it_runs_again(tmp_path: Path) -> None:
    """The open transaction is undone, what was committed stays, and time does not go back."""
    server = PostgreSQL()
    try:
        server.start()
        with _open(tmp_path / "a", server, lock=True) as store:
            store.facts.put(TaskPreparation("1"))
            now_s = store.clock.now_s()
            with pytest.raises(StateError, match="cannot use postgresql://"):
                _put_and_kill(store, server)
            with pytest.raises(StateError, match="cannot use postgresql://"):
                store.facts.get(TaskPreparation)
            server.start()
            assert store.facts.get(TaskPreparation) == TaskPreparation("1")
            store.facts.put(TaskPreparation("4"))
            assert store.database.is_locked()
            assert store.clock.now_s() >= now_s
        with _open(tmp_path / "a", server) as again:
            assert again.facts.get(TaskPreparation) == TaskPreparation("4")
            assert again.clock.now_s() >= now_s
    finally:
        server.close()


@pytest.mark.parametrize(
    "url",
    ["postgresql://u:hunter2@h/d", "postgresql://h/d?password=hunter2", "mysql://h/d", "postgresql://[h/d"],
)
def test_url_with_a_password_or_of_another_kind_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store(tmp_path, database=url, fleet="f")
    assert "hunter2" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_mistyped_url_is_not_remembered(tmp_path: Path, postgresql: PostgreSQL) -> None:
    """The other commands still find the database that was used before."""
    open_store(tmp_path / "a", database=postgresql.url, fleet=tmp_path.name).close()
    with pytest.raises(StateError, match="none"):
        open_store(tmp_path / "a", database=postgresql.url + "none", fleet=tmp_path.name)
    open_store(tmp_path / "a", read_only=True).close()


def _put_and_fail(store: Store) -> None:
    with store.transaction():
        store.facts.put(TaskPreparation("1"))
        with contextlib.suppress(StateError):
            store.database.write("SELECT no_such_column")


def _put_and_kill(store: Store, server: PostgreSQL) -> None:
    with store.transaction():
        store.facts.put(TaskPreparation("2"))
        server.kill()
        store.facts.put(TaskPreparation("3"))


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
        opened.facts.put(TaskPreparation("before"))
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
        assert through.facts.get(TaskPreparation) == TaskPreparation("before")
    elif marker == "BEGIN":
        through.facts.put(TaskPreparation("after"))
    else:
        with pytest.raises(StateError, match="cannot use postgresql://"):
            through.facts.put(TaskPreparation("after"))
        is_stored = (fault, marker) == ("answer lost", "COMMIT")
        assert direct.facts.get(TaskPreparation) == TaskPreparation("after" if is_stored else "before")
        assert (
            through.database.data_version() != version
        ) == is_stored  # so that nothing of it is read from a cache
        through.facts.put(TaskPreparation("after"))
    assert proxy.faults == 1
    assert direct.facts.get(TaskPreparation) == through.facts.get(TaskPreparation)
    assert direct.database.is_locked()


def test_session_that_an_administrator_ends(through: Store, direct: Store, postgresql: PostgreSQL) -> None:
    """Only what is in a transaction is an error; the next call connects and locks the fleet again."""
    end = SESSIONS.replace("pid", "pg_terminate_backend(pid)")

    def put_and_end() -> None:
        with through.transaction():
            through.facts.put(TaskPreparation("lost"))
            postgresql.execute(end)
            through.facts.put(TaskPreparation("lost"))

    assert postgresql.execute(end) == [(True,)]
    through.facts.put(TaskPreparation("after"))
    with pytest.raises(StateError, match="terminating connection"):
        put_and_end()
    assert direct.facts.get(TaskPreparation) == through.facts.get(TaskPreparation) == TaskPreparation("after")
    assert direct.database.is_locked()


def test_server_that_has_become_read_only(through: Store, direct: Store, postgresql: PostgreSQL) -> None:
    """Each write is an error, after which the next one connects again: another server may be at the address by then."""
    before = postgresql.execute(SESSIONS)
    reload = "SELECT pg_reload_conf()"
    try:
        postgresql.execute("ALTER SYSTEM SET default_transaction_read_only = on", reload)
        with pytest.raises(StateError, match="read-only transaction"):
            _write_until_it_fails(through)
        assert through.facts.get(TaskPreparation) == TaskPreparation("before")
        assert postgresql.execute(SESSIONS) != before
    finally:
        postgresql.execute("ALTER SYSTEM RESET default_transaction_read_only", reload)
    while direct.facts.get(TaskPreparation) != TaskPreparation("after"):
        with contextlib.suppress(StateError):
            through.facts.put(TaskPreparation("after"))


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
            store.facts.put(TaskPreparation("before"))
            fill(disk)
            with pytest.raises(StateError, match="No space left on device"):
                store.database.check_writable()
            with pytest.raises(StateError, match="No space left on device"):
                store.refusals.count("a", reason="shape", detail=secrets.token_hex(2**20), now_s=1.0)
            assert store.facts.get(TaskPreparation) == TaskPreparation("before")
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
    with pytest.raises(database.NotLeader, match="lacks its last 1 changes"):
        through.database.data_version()
    with pytest.raises(database.NotLeader):
        through.facts.put(TaskPreparation("after"))
    with pytest.raises(database.NotLeader):
        direct.facts.put(TaskPreparation("of another program"))
    through.close()
    with contextlib.closing(open_store(through.folder, lock=True)) as store:
        store.facts.put(TaskPreparation("again"))


def test_failover_to_a_replica(tmp_path: Path) -> None:
    """A URL with both servers finds the one that can be written; meanwhile nothing can."""
    with contextlib.closing(PostgreSQL()) as primary:
        primary.start()
        with contextlib.closing(primary.replica()) as replica:
            replica.start()
            hosts = f"127.0.0.1:{primary.port},127.0.0.1:{replica.port}"
            url = f"postgresql://fleet@{hosts}/postgres?target_session_attrs=read-write"
            with contextlib.closing(open_store(tmp_path / "a", database=url, fleet="f", lock=True)) as store:
                store.facts.put(TaskPreparation("before"))
                _wait_for_replica(primary)
                primary.kill()
                with pytest.raises(StateError, match="session is read-only"):
                    store.database.check_writable()
                replica.promote()
                assert store.facts.get(TaskPreparation) == TaskPreparation("before")
                store.facts.put(TaskPreparation("after"))
                assert store.database.is_locked()


def _wait_for_replica(primary: PostgreSQL) -> None:
    behind = "SELECT 1 FROM pg_stat_replication WHERE replay_lsn = pg_current_wal_lsn()"
    while not primary.execute(behind):
        time.sleep(0.05)
