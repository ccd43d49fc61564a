"""SQLite files: committed changes stay, failed ones leave nothing, other versions are kept."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import StateError
from protocol.storage.database import Database
from protocol.storage.folder_lock import FolderLock
from tests.support.machine_faults import full_disk, not_root, open_folder, read_only

FIRST = "CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;"
SECOND = """
CREATE TABLE log (line TEXT) STRICT;
CREATE TRIGGER record AFTER DELETE ON facts
BEGIN INSERT INTO log VALUES (OLD.key); END;
UPDATE facts SET value = upper(value)
"""


def open_database(
    folder: Path,
    *,
    migrations: Sequence[str] = (FIRST, SECOND),
    held: FolderLock | None = None,
    lock: FolderLock | None = None,
    **options: Any,
) -> Database:
    return Database(
        folder / "state.sqlite",
        program="fleet run",
        migrations=migrations,
        lock=held or lock,
        holds_lock=held is not None,
        **options,
    )


def put(database: Database, key: str, value: str = "1") -> None:
    database.write("INSERT OR REPLACE INTO facts VALUES (?, ?)", key, value)


def keys(database: Database) -> list[str]:
    return [key for (key,) in database.read("SELECT key FROM facts ORDER BY key")]


def test_reader_sees_committed_writes_and_cannot_write(tmp_path: Path) -> None:
    writer = open_database(tmp_path)
    assert writer.read("PRAGMA journal_mode") == [("wal",)]
    assert writer.read("PRAGMA synchronous") == [(2,)]
    reader = open_database(tmp_path, read_only=True)
    with writer.transaction():
        put(writer, "a")
        assert keys(reader) == []
    assert keys(reader) == ["a"]
    with pytest.raises(StateError, match="readonly"):
        put(reader, "b")
    writer.close()
    assert keys(open_database(tmp_path, read_only=True)) == ["a"]


def test_snapshot_does_not_change(tmp_path: Path) -> None:
    writer = open_database(tmp_path)
    reader = open_database(tmp_path, read_only=True)
    with reader.transaction("DEFERRED"):
        assert keys(reader) == []
        put(writer, "a")
        assert keys(reader) == []
    assert keys(reader) == ["a"]


def test_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    database = open_database(tmp_path)
    for error in (KeyError, KeyboardInterrupt):
        with pytest.raises(error), database.transaction():  # noqa: PT012
            put(database, "a")
            raise error
    with pytest.raises(StateError, match="UNIQUE"), database.transaction() as connection:
        connection.executemany("INSERT INTO facts VALUES (?, '1')", [("a",), ("a",)])
    assert keys(database) == []
    put(database, "a")
    assert keys(open_database(tmp_path, read_only=True)) == ["a"]


def run_in_threads(work: Callable[[], None], *, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()


def test_threads_take_turns(tmp_path: Path) -> None:
    database = open_database(tmp_path)
    put(database, "count", "0")

    def count() -> None:
        for _ in range(50):
            with database.transaction() as connection:
                ((value,),) = connection.execute("SELECT value FROM facts")
                put(database, "count", str(int(value) + 1))

    run_in_threads(count, threads=4)
    assert database.read("SELECT value FROM facts") == [("200",)]


def test_older_file_is_migrated(tmp_path: Path) -> None:
    """Its contents stay; a reader's error names the command that migrates it."""
    old = open_database(tmp_path, migrations=[FIRST])
    put(old, "a", "kept")
    old.close()
    with pytest.raises(StateError, match="version 1, expected 2: start `fleet run` on it once"):
        open_database(tmp_path, read_only=True)
    database = open_database(tmp_path)
    assert database.read("SELECT * FROM facts") == [("a", "KEPT")]
    database.write("DELETE FROM facts")
    assert open_database(tmp_path, read_only=True).read("SELECT line FROM log") == [("a",)]


def test_failed_migration_changes_nothing(tmp_path: Path) -> None:
    put(open_database(tmp_path, migrations=[FIRST]), "a", "kept")
    with pytest.raises(StateError, match="syntax error"):
        open_database(tmp_path, migrations=[FIRST, SECOND, "NO SQL;"])
    assert open_database(tmp_path, migrations=[FIRST]).read("SELECT * FROM facts") == [("a", "kept")]


def test_newer_file_is_refused(tmp_path: Path) -> None:
    put(open_database(tmp_path), "a")
    for only in (False, True):
        with pytest.raises(StateError, match="version 2, expected 1: upgrade protofleet here, or"):
            open_database(tmp_path, migrations=[FIRST], read_only=only)
    assert keys(open_database(tmp_path)) == ["a"]


def test_concurrent_starts_migrate_once(tmp_path: Path) -> None:
    names = iter("abcdefgh")
    run_in_threads(lambda: put(open_database(tmp_path), next(names)), threads=8)
    assert keys(open_database(tmp_path)) == list("abcdefgh")


def test_lock_is_taken_before_the_file_and_released_on_close(tmp_path: Path) -> None:
    first = open_database(tmp_path, held=FolderLock(tmp_path))
    with pytest.raises(StateError, match=f"`fleet run` already runs on {tmp_path}: stop it"):
        open_database(tmp_path, migrations=[FIRST, SECOND, "NO SQL;"], held=FolderLock(tmp_path))
    first.close()
    with pytest.raises(StateError, match="syntax"):
        open_database(tmp_path, migrations=[FIRST, SECOND, "NO SQL;"], held=FolderLock(tmp_path))
    open_database(tmp_path, held=FolderLock(tmp_path)).close()
    assert not FolderLock(tmp_path).is_taken()


def test_file_is_not_migrated_while_another_program_holds_the_lock(tmp_path: Path) -> None:
    """Not by a program that needs no lock of its own either; an up-to-date file can be written."""
    running = open_database(tmp_path, migrations=[FIRST], held=FolderLock(tmp_path))
    other = open_database(tmp_path, migrations=[FIRST], lock=FolderLock(tmp_path))
    put(other, "a")
    with pytest.raises(
        StateError, match="version 1, expected 2, and `fleet run` of an older protofleet runs on it: stop it"
    ):
        open_database(tmp_path, lock=FolderLock(tmp_path))
    other.close()
    put(running, "b")
    running.close()
    migrated = open_database(tmp_path, lock=FolderLock(tmp_path))
    assert not FolderLock(tmp_path).is_taken()
    assert keys(migrated) == ["a", "b"]


def test_any_folder_name_can_be_opened(tmp_path: Path) -> None:
    folder = tmp_path / "50% of #1? state"
    folder.mkdir()
    put(open_database(folder), "a")
    assert (folder / "state.sqlite").is_file()
    assert keys(open_database(folder, read_only=True)) == ["a"]


def test_missing_file_is_not_created_by_a_reader(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot use .*state\.sqlite: unable to open"):
        open_database(tmp_path, read_only=True)
    assert list(tmp_path.iterdir()) == []


NOISE = [b"no database" * 500, b"SQLite format 3\0" + b"\xff" * 5000]


@pytest.mark.parametrize("contents", NOISE)
def test_damaged_file_is_kept_and_named(tmp_path: Path, contents: bytes) -> None:
    file = tmp_path / "state.sqlite"
    file.write_bytes(contents)
    with pytest.raises(StateError, match=rf"cannot use {file}: .*: restore it from a backup, or use another"):
        open_database(tmp_path)
    assert file.read_bytes() == contents


@pytest.mark.parametrize("contents", NOISE)
def test_damaged_cache_is_renamed_and_created_anew(
    tmp_path: Path, contents: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state.sqlite").write_bytes(contents)
    (tmp_path / "state.sqlite-wal").write_bytes(b"left over" * 100)
    cache = open_database(tmp_path, is_cache=True)
    put(cache, "a")
    cache.close()
    assert keys(open_database(tmp_path, is_cache=True)) == ["a"]
    assert (tmp_path / "state.damaged").read_bytes() == contents
    assert "renamed=state.damaged" in caplog.text


def test_cache_damage_found_while_reading_fails_once(tmp_path: Path) -> None:
    cache = open_database(tmp_path, is_cache=True)
    for number in range(300):
        put(cache, str(number), "x" * 1000)
    cache.close()
    file = tmp_path / "state.sqlite"
    size = file.stat().st_size
    with file.open("r+b") as damaged:
        damaged.seek(8192)
        damaged.write(b"\xa5" * (size - 8192))
    cache = open_database(tmp_path, is_cache=True)
    with pytest.raises(StateError, match="damaged and has been created anew: start again"):
        cache.read("SELECT * FROM facts")
    assert keys(cache) == []
    put(cache, "a")
    assert keys(open_database(tmp_path, is_cache=True)) == ["a"]
    assert (tmp_path / "state.damaged").stat().st_size == size


@pytest.mark.parametrize("version", [0, 7])
def test_cache_of_a_later_version_is_created_anew(tmp_path: Path, version: int) -> None:
    with sqlite3.connect(tmp_path / "state.sqlite") as other:
        other.executescript(f"CREATE TABLE facts (something TEXT); PRAGMA user_version = {version};")
    put(open_database(tmp_path, is_cache=True), "a")
    assert keys(open_database(tmp_path, is_cache=True)) == ["a"]


def test_cache_of_an_earlier_version_is_migrated(tmp_path: Path) -> None:
    """Its contents take long to compute."""
    earlier = open_database(tmp_path, is_cache=True, migrations=(FIRST,))
    put(earlier, "a", "x")
    earlier.close()
    assert open_database(tmp_path, is_cache=True).read("SELECT * FROM facts") == [("a", "X")]


def test_full_disk_loses_nothing(tmp_path: Path) -> None:
    database = open_database(tmp_path)
    put(database, "before")
    with full_disk(after_bytes=50_000):
        with pytest.raises(StateError, match="cannot use"), database.transaction() as connection:
            connection.executemany("INSERT INTO facts VALUES (?, ?)", [("small", ""), ("large", "x" * 10**6)])
        assert keys(database) == ["before"]
    with full_disk(after_bytes=0), pytest.raises(StateError, match=r"cannot use .*state\.sqlite: "):
        database.check_writable()
    database.check_writable()
    put(database, "after")
    assert keys(open_database(tmp_path, read_only=True)) == ["after", "before"]


def test_file_is_read_where_nothing_can_be_written() -> None:
    """But not if its log has transactions that a reader without other files would miss."""
    with open_folder() as folder:
        folder.chmod(0o777)
        closed, killed = folder / "closed", folder / "killed"
        with not_root():
            for each in (closed, killed):
                each.mkdir()
            database = open_database(closed)
            put(database, "a")
            for name in ("state.sqlite", "state.sqlite-wal"):
                shutil.copy(closed / name, killed)
            database.close()
        with read_only(closed):
            assert keys(open_database(closed, read_only=True)) == ["a"]
            with pytest.raises(StateError, match=r"readonly|unable to open"):
                open_database(closed)
        with read_only(killed), pytest.raises(StateError, match=r"readonly|unable to open"):
            open_database(killed, read_only=True)


@pytest.mark.parametrize(
    ("flags", "free", "cause"),
    [(os.ST_RDONLY, 9, "the filesystem is read-only"), (0, 0, "no space left on the disk")],
)
def test_error_names_what_is_wrong_with_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, free: int, cause: str
) -> None:
    (tmp_path / "state.sqlite").mkdir()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags, f_bavail=free))
    with pytest.raises(StateError, match=f"unable to open database file: {cause}"):
        open_database(tmp_path)


def test_log_file_shrinks_after_a_large_transaction(tmp_path: Path) -> None:
    database = open_database(tmp_path)
    put(database, "large", "x" * 8 * 2**20)
    put(database, "small")
    assert (tmp_path / "state.sqlite-wal").stat().st_size <= 2**20


def test_deleted_contents_are_in_no_file(tmp_path: Path) -> None:
    """Neither in free space of the file, nor in the log."""
    database = open_database(tmp_path)
    put(database, "key", secret := "a secret of the device")
    put(database, "large", secret * 1000)
    database.write("UPDATE facts SET value = '' WHERE key = 'key'")
    database.write("DELETE FROM facts WHERE key = 'large'")

    def files_with_it() -> list[str]:
        return [file.name for file in tmp_path.iterdir() if secret.encode() in file.read_bytes()]

    assert files_with_it() == ["state.sqlite-wal"]
    reader = open_database(tmp_path, read_only=True)
    with reader.transaction("DEFERRED"):
        keys(reader)
        database.write("PRAGMA busy_timeout = 0")
        database.empty_log()
    database.empty_log()
    assert files_with_it() == []


_WRITE = """
import sys
from pathlib import Path
from tests.unit.protocol.storage.test_database import open_database, put

database = open_database(Path(sys.argv[1]))
number = int(dict(database.read("SELECT key, value FROM facts")).get("a", 0))
while True:
    number += 1
    with database.transaction():
        put(database, "a", str(number))
        put(database, "padding", "x" * 10**5)
        put(database, "b", str(number))
    print(number, flush=True)
"""


def test_kill_leaves_the_last_transaction_or_the_next(tmp_path: Path) -> None:
    for reported in (1, 3, 8):
        with subprocess.Popen([sys.executable, "-c", _WRITE, tmp_path], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(reported)]
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        facts = dict(open_database(tmp_path).read("SELECT key, value FROM facts WHERE key != 'padding'"))
        assert facts["a"] == facts["b"]
        assert int(facts["a"]) - int(lines[-1]) in {0, 1}


@pytest.mark.parametrize("value", ["NULL", "7", "'{~'"])
def test_value_that_is_no_json_text_is_damage(tmp_path: Path, value: str) -> None:
    """Pages that the disk has changed may hold NULL, or another type, in a column of texts."""
    database = open_database(tmp_path)
    ((stored,),) = database.read(f"SELECT {value}")
    with pytest.raises(StateError, match="damaged contents"):
        database.decode(stored, dict)
