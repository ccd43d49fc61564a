"""The aggregator's SQLite file, checked while it is open: deleted, replaced or damaged."""

from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.storage.open_store import SqliteDatabase
from protocol.errors import StateError
from protocol.storage.folder_lock import FolderLock


def open_database(folder: Path) -> SqliteDatabase:
    database = SqliteDatabase(folder, read_only=False, lock=FolderLock(folder), is_leader=True)
    database.write("INSERT INTO facts VALUES ('a', '1')")
    return database


@pytest.mark.parametrize("name", ["aggregator.sqlite", "aggregator.sqlite-wal"])
def test_file_that_is_deleted_or_replaced_is_noticed(tmp_path: Path, name: str) -> None:
    """The file and its log; the same file moved back is none."""
    database, file, away = open_database(tmp_path), tmp_path / name, tmp_path / "away"
    database.check()
    file.rename(away)
    for is_replaced in (False, True):
        if is_replaced:
            file.write_bytes(away.read_bytes())
        for check in (database.check_file, database.check):
            with pytest.raises(
                StateError, match=r"deleted or replaced while `aggregator run` was running: .*, restore it"
            ):
                check()
    away.replace(file)
    database.check()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:4096] + bytes(4096) + data[8192:], "Page 2"),
        (lambda data: bytes(len(data)), "file is not a database"),
        (lambda _: b"", "it is empty"),
    ],
    ids=["a page", "all", "cut off"],
)
def test_damage_is_noticed_while_the_file_is_open(
    tmp_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    """Although all of it is in memory; `check_file` then reports the same."""
    database, file = open_database(tmp_path), tmp_path / "aggregator.sqlite"
    database.read("PRAGMA wal_checkpoint(TRUNCATE)")
    data = damage(file.read_bytes())
    with file.open("r+b") as opened:
        opened.truncate(len(data))
        opened.write(data)
    for check in (database.check, database.check_file):
        with pytest.raises(StateError, match=f"aggregator.sqlite: .*{reason}.*: restore it"):
            check()
