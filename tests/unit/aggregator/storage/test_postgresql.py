"""PostgreSQL in place of the SQLite file: fleets, locks, migrations, hostile texts, and a server that is killed."""

import contextlib
from pathlib import Path

import pytest

from aggregator.cli.state import existing_state
from aggregator.storage import schema
from aggregator.storage.open_store import open_store
from aggregator.storage.schema import MIGRATIONS
from aggregator.storage.store import Store
from aggregator.storage.stored_values import SigningKey
from protocol.errors import ConfigError, StateError
from tests.support.databases.postgresql import PostgreSQL


def _open(folder: Path, server: PostgreSQL, *, lock: bool = False) -> "contextlib.closing[Store]":
    return contextlib.closing(open_store(folder, database=server.url, fleet=folder.parent.name, lock=lock))


def test_state_directory_remembers_its_database(tmp_path: Path, postgresql: PostgreSQL) -> None:
    """For the other commands; another fleet of the same database sees nothing of it."""
    with _open(tmp_path / "a", postgresql) as store:
        store.facts.put(SigningKey("1"))
    with contextlib.closing(open_store(tmp_path / "a", read_only=True)) as reader:
        assert reader.facts.get(SigningKey) == SigningKey("1")
        with pytest.raises(StateError, match="read-only"):
            reader.facts.put(SigningKey("2"))
    with contextlib.closing(open_store(tmp_path / "b", database=postgresql.url, fleet="x" * 64)) as other:
        assert other.facts.get(SigningKey) is None
    open_store(tmp_path / "file").close()
    with pytest.raises(ConfigError, match="give --store with another --state"):
        open_store(tmp_path / "file", database=postgresql.url, fleet="f")


def test_program_with_another_state_directory_needs_an_object_store(
    tmp_path: Path, postgresql: PostgreSQL
) -> None:
    """It would look for the blobs in its own folder, in which they are not."""
    with _open(tmp_path / "a", postgresql, lock=True):
        database = {"database": postgresql.url, "fleet": tmp_path.name}
        with (
            pytest.raises(ConfigError, match="start `aggregator run` there with --blobs"),
            existing_state(tmp_path / "b", **database),
        ):
            pass
        assert not (tmp_path / "b").exists()
        with existing_state(tmp_path / "a", **database) as store:
            assert store.blobs.put(b"")
        with (
            pytest.raises(StateError, match="no aggregator state"),
            existing_state(tmp_path / "b", database=postgresql.url, fleet="other"),
        ):
            pass


def test_one_aggregator_runs_on_a_fleet_whatever_its_directory(
    tmp_path: Path, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its schema is not migrated by a newer program meanwhile."""
    monkeypatch.setattr("aggregator.storage.postgresql_lead.LOCK_S", 0.2)
    with _open(tmp_path / "a", postgresql, lock=True), _open(tmp_path / "b", postgresql) as other:
        assert other.database.is_locked()
        with pytest.raises(StateError, match="already runs on"):
            open_store(tmp_path / "c", database=postgresql.url, fleet=tmp_path.name, lock=True)
        monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, "ALTER TABLE heads ADD COLUMN n TEXT;"))
        with pytest.raises(StateError, match="of an older protofleet runs on it"):
            open_store(tmp_path / "b")
    with _open(tmp_path / "b", postgresql, lock=True) as store:
        assert store.database.read("SELECT n FROM heads") == []


def test_writes_of_other_processes_are_noticed(tmp_path: Path, postgresql: PostgreSQL) -> None:
    """And a process's own are not taken for them; no other process sees a transaction before its end."""
    with _open(tmp_path / "a", postgresql) as one, _open(tmp_path / "b", postgresql) as other:
        before = one.database.data_version(), other.database.data_version()
        with one.transaction():
            one.facts.put(SigningKey("1"))
            assert other.facts.get(SigningKey) is None
        assert one.database.data_version() == before[0]
        assert other.database.data_version() != before[1]
        assert not other.keys.is_closed()
        one.keys.close_fleet()
        assert other.keys.is_closed()


def test_failed_statement_undoes_its_transaction(tmp_path: Path, postgresql: PostgreSQL) -> None:
    """Also where its error was caught: PostgreSQL alone would roll back and report success."""
    with _open(tmp_path / "a", postgresql) as store:
        with pytest.raises(StateError, match="a statement of the transaction has failed"):
            _put_and_fail(store)
        assert store.facts.get(SigningKey) is None
        store.facts.put(SigningKey("2"))
        store.refusals.count("a", reason="shape", detail="a\0b % ?", now_s=1.0)
        assert store.refusals.all()[0].detail == "a\N{REPLACEMENT CHARACTER}b % ?"


def test_killed_server_is_an_error_until_it_runs_again(tmp_path: Path) -> None:
    """The open transaction is undone, what was committed stays, and time does not go back."""
    server = PostgreSQL()
    try:
        server.start()
        with _open(tmp_path / "a", server, lock=True) as store:
            store.facts.put(SigningKey("1"))
            now_s = store.clock.now_s()
            with pytest.raises(StateError, match="cannot use postgresql://"):
                _put_and_kill(store, server)
            with pytest.raises(StateError, match="cannot use postgresql://"):
                store.facts.get(SigningKey)
            server.start()
            assert store.facts.get(SigningKey) == SigningKey("1")
            store.facts.put(SigningKey("4"))
            assert store.database.is_locked()
            assert store.clock.now_s() >= now_s
        with _open(tmp_path / "a", server) as again:
            assert again.facts.get(SigningKey) == SigningKey("4")
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
        store.facts.put(SigningKey("1"))
        with contextlib.suppress(StateError):
            store.database.write("SELECT no_such_column")


def _put_and_kill(store: Store, server: PostgreSQL) -> None:
    with store.transaction():
        store.facts.put(SigningKey("2"))
        server.kill()
        store.facts.put(SigningKey("3"))
