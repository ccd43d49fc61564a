"""The store keeps its contents over restarts, a full disk, a second reader, a newer program and damage."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aggregator.coordination.round_state import Entry
from aggregator.security.device_keys import reset_device
from aggregator.storage import schema
from aggregator.storage.devices import DeviceRecord
from aggregator.storage.heads import HeadRecord, TrainingProgress
from aggregator.storage.open_store import SqliteDatabase, open_store
from aggregator.storage.quarantine import REVOKED, ForgottenDevice
from aggregator.storage.refusals import Refusal
from aggregator.storage.schema import MIGRATIONS
from aggregator.storage.store import Store
from aggregator.storage.stored_values import SigningKey
from aggregator.storage.submissions import SubmissionRecord
from protocol.errors import StateError
from protocol.storage.folder_lock import FolderLock
from tests.support.machine_faults import full_disk
from tests.support.messages.heads import add_head, plan_head
from tests.support.messages.submissions import TASK, device_info, evaluation


def _row(device: str, sequence: int = 1) -> SubmissionRecord:
    return SubmissionRecord(
        device=device,
        entry=Entry(sequence, f"{device}{sequence}".encode(), 0.0),
        size_bytes=1234,
        images=40,
        prototypes=8,
        per_class={0: 5, 2: 3},
    )


def _add_head(store: Store, version: int, *rows: SubmissionRecord, **fields: Any) -> HeadRecord:
    members = {row.device: row.entry.digest for row in rows}
    made = {"digest": bytes([version]) * 32, "size_bytes": 99, "trained_s": 5.5, "metrics": {"loss": 0.25}}
    return add_head(store, version, members=members, is_used=False, **{**made, **fields})


def test_state_survives_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.devices.put_presence("a", "online", now_s=10.0)
    store.devices.put_info("a", device_info(runtime="x"), now_s=11.0)
    store.submissions.put(TASK, _row("a"))
    head = _add_head(store, 1, _row("a"))
    plan_head(store, 2, state="training", progress=TrainingProgress(2, loss=0.5))
    store.evaluations.put("a", evaluation(), digest=b"e", now_s=12.0)
    store.refusals.count("a", reason="shape", detail="d", now_s=13.0)
    digest = store.blobs.put(b"blob")
    store.close()
    again = open_store(tmp_path)
    planned = again.heads.planned(TASK)
    assert planned is not None
    assert planned.progress == TrainingProgress(2, loss=0.5)
    assert again.facts.get(SigningKey) is None
    assert again.devices.all() == [DeviceRecord("a", "online", 11.0, device_info(runtime="x"))]
    assert again.submissions.all(TASK) == {"a": _row("a")}
    assert again.heads.all(TASK) == [head]
    assert again.members(head) == {"a": b"a1"}
    assert again.evaluations.of_head(TASK, 1) == {"a": evaluation()}
    assert again.refusals.all() == [Refusal("a", "shape", 1, "d", 13.0)]
    assert again.blobs.read(digest) == b"blob"


def test_newer_submission_replaces_older(store: Store) -> None:
    for sequence in (1, 2):
        store.submissions.put(TASK, _row("a", sequence))
    store.submissions.put(bytes(32), _row("a", 1))
    store.submissions.put(TASK, _row("b"))
    assert store.submissions.all(TASK) == {"a": _row("a", 2), "b": _row("b")}
    assert store.holds("a", b"a2")
    assert store.holds("a", b"a1")  # for the other task
    assert not store.holds("b", b"a2")
    assert not store.holds("c", b"a2")


def test_evaluations_are_replaced_and_deleted(store: Store) -> None:
    """Per device and head."""
    better = msgspec.structs.replace(evaluation(), correct=(5, 5, 0), incorrect=(0, 0, 0))
    sent = {b"first": evaluation(), b"second": better, b"third": evaluation(head_version=2)}
    for digest, message in sent.items():
        store.evaluations.put("a", message, digest=digest, now_s=1.0)
    assert store.evaluations.of_head(TASK, 1) == {"a": better}
    assert [store.holds("a", digest) for digest in sent] == [False, True, True]
    store.evaluations.delete_except(TASK, {2, 3})
    assert [bool(store.evaluations.of_head(TASK, version)) for version in (1, 2)] == [False, True]


def test_only_one_head_of_a_task_is_planned(store: Store) -> None:
    plan_head(store, 1)
    plan_head(store, 1, task=bytes(32))
    with pytest.raises(StateError, match=r"UNIQUE|unique"):
        plan_head(store, 2)


def test_state_of_a_running_aggregator_is_not_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer `aggregator enroll` would break the older aggregator; it and a newer `run` change nothing."""
    running = open_store(tmp_path, lock=True)
    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", (*MIGRATIONS, "ALTER TABLE heads ADD COLUMN note TEXT;"))
        with pytest.raises(StateError, match="`aggregator run` of an older protofleet runs on it: stop it"):
            open_store(tmp_path)
        with pytest.raises(StateError, match="already runs on"):
            open_store(tmp_path, lock=True)
    open_store(tmp_path).close()
    _add_head(running, 1)
    running.close()
    monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, "ALTER TABLE heads ADD COLUMN note TEXT;"))
    open_store(tmp_path).close()
    assert open_store(tmp_path, lock=True).database.read("SELECT version, note FROM heads") == [(1, None)]


def test_lost_database_is_named_with_what_to_do(tmp_path: Path) -> None:
    """Deleted or cut off, for `aggregator status` and the other commands."""
    open_store(tmp_path).close()
    file = tmp_path / "aggregator.sqlite"
    file.unlink()
    with pytest.raises(StateError, match=r"aggregator\.sqlite: it is missing, .*: restore it from a backup"):
        open_store(tmp_path, read_only=True)
    file.touch()
    with pytest.raises(
        StateError, match=r"aggregator\.sqlite: damaged: it is empty: restore it from a backup"
    ):
        open_store(tmp_path, read_only=True)


@pytest.mark.parametrize(
    ("statement", "read"),
    [
        ("UPDATE facts SET value = '{~'", lambda store: store.facts.get(SigningKey)),
        ("UPDATE submissions SET per_class = '{~'", lambda store: store.submissions.all(TASK)),
        ("UPDATE heads SET record = '{~'", lambda store: store.heads.all(TASK)),
        ("UPDATE devices SET info = '{~'", lambda store: store.devices.all()),
    ],
)
def test_damaged_record_is_named_with_what_to_do(
    store: Store, statement: str, read: Callable[[Store], object]
) -> None:
    """A record that the disk has changed, unnoticed by SQLite, is one error that says how to go on."""
    store.facts.put(SigningKey("00"))
    store.submissions.put(TASK, _row("a"))
    _add_head(store, 1, _row("a"))
    store.devices.put_info("a", device_info(), now_s=1.0)
    store.database.write(statement)
    with pytest.raises(StateError, match=r"(aggregator\.sqlite|#fleet_\S+): damaged contents: .*: restore "):
        read(store)


def test_transaction_is_whole_or_nothing(tmp_path: Path) -> None:
    """Other processes see all of it at the end; nothing of it if anything fails, and no key from a cache."""
    store, one = open_store(tmp_path), SigningKey("1")
    with store.transaction():
        store.facts.put(one)
        assert open_store(tmp_path, read_only=True).facts.get(SigningKey) is None
        store.submissions.put(TASK, _row("a"))
    reader = open_store(tmp_path, read_only=True)
    assert (reader.facts.get(SigningKey), list(reader.submissions.all(TASK))) == (one, ["a"])
    with pytest.raises(KeyError):
        _put(store, SigningKey("2"), then=KeyError())
    assert store.keys.get("b") is None
    with full_disk(after_bytes=100_000), pytest.raises(StateError):
        _put(store, SigningKey("x" * 3_000_000))
    assert (store.facts.get(SigningKey), list(store.submissions.all(TASK))) == (one, ["a"])
    store.facts.put(SigningKey("3"))
    assert store.facts.get(SigningKey) == SigningKey("3")


def _put(store: Store, fact: SigningKey, *, then: Exception | None = None) -> None:
    with store.transaction():
        assert store.keys.pin("b", b"1" * 32, now_s=1.0)
        store.submissions.delete("a", TASK)
        store.facts.put(fact)
        if then is not None:
            raise then


def test_reset_device_lets_any_submission_replace_the_stored_one(store: Store) -> None:
    """It still counts until then, unless it is deleted; a revocation's quarantine is deleted."""
    store.submissions.put(TASK, _row("a", 9))
    store.quarantine.add(TASK, "a", reason=REVOKED, now_s=1.0)
    store.devices.put_presence("a", "online", now_s=1.0)
    reset_device(store, "a", delete_submissions=False)
    entry = _row("a", 9).entry
    assert store.submissions.all(TASK) == {"a": replace(_row("a", 9), entry=replace(entry, sequence=0))}
    assert (store.quarantine.all(TASK), store.devices.online()) == ({}, frozenset())
    reset_device(store, "a", delete_submissions=True)
    assert store.submissions.all(TASK) == {}


def test_records_of_heads_are_small(store: Store) -> None:
    """Their submissions are in blobs: otherwise a thousand devices need 100 kB for each head."""
    rows = [_row(f"device-{number}") for number in range(100)]
    for version in range(1, 51):
        _add_head(store, version, *rows)
    ((size,),) = store.database.read("SELECT sum(length(record)) FROM heads")
    assert size < 50 * 1000


@pytest.mark.parametrize(
    "query",
    [
        "EXPLAIN QUERY PLAN SELECT 1 FROM submissions WHERE device = ? AND digest = ?",
        "EXPLAIN QUERY PLAN SELECT 1 FROM evaluations WHERE device = ? AND digest = ?",
    ],
)
def test_a_stored_upload_is_found_without_reading_all_of_them(tmp_path: Path, query: str) -> None:
    """This is asked with each query of a device, however many devices and heads there are."""
    store = open_store(tmp_path)
    ((*_, plan),) = store.database.read(query, "a", b"a1")
    assert " USING COVERING INDEX " in plan
    assert plan.startswith("SEARCH ")


def test_adopted_submissions_count_for_both_tasks_and_are_stored_once(store: Store) -> None:
    """A device's own submission to the later task stays."""
    later = b"l" * 32
    for name in ("a", "b"):
        store.submissions.put(TASK, _row(name))
    store.submissions.put(later, _row("b", sequence=9))
    assert store.submissions.adopt(later, TASK) == 1
    assert store.submissions.all(later) == {"a": _row("a"), "b": _row("b", sequence=9)}
    assert store.submissions.all(TASK) == {"a": _row("a"), "b": _row("b")}
    assert store.submissions.stored_bytes() == 3 * _row("a").size_bytes
    assert store.submissions.adopt(later, TASK) == 0


def test_every_change_has_a_greater_number(store: Store) -> None:
    """Of what decisions depend on, also of a deletion; nothing that a pass has read is out of date unnoticed."""
    changes: list[Callable[[], object]] = [
        lambda: store.submissions.put(TASK, _row("a")),
        lambda: store.submissions.count_again("a"),
        lambda: store.evaluations.put("a", evaluation(), digest=b"1", now_s=0.0),
        lambda: store.evaluations.delete_except(TASK, {2}),
        lambda: store.evaluations.delete_device("a"),
        lambda: _add_head(store, 1),
        lambda: store.heads.delete(TASK, 1),
        lambda: store.quarantine.add(TASK, "a", reason="far off", now_s=0.0),
        lambda: store.quarantine.release(TASK, "a", now_s=0.0),
        lambda: store.quarantine.delete(TASK, "a"),
        lambda: store.forgotten.put(TASK, ForgottenDevice("a", 1, 0.0)),
        lambda: store.keys.enroll("a", bytes(32), now_s=0.0),
        lambda: store.keys.revoke("a", now_s=0.0),
        store.keys.close_fleet,
        lambda: store.submissions.delete("a"),
    ]
    for each in changes:
        before = store.newest_change()
        each()
        assert store.newest_change() > before


def test_deletions_are_counted(store: Store) -> None:
    """That to another task stays."""
    store.submissions.put(bytes(32), _row("a"))
    for device in ("a", "b", "c"):
        store.submissions.put(TASK, _row(device))
    before = store.submissions.deletions
    with store.transaction():
        store.submissions.delete("a", TASK)
        store.submissions.delete("b")
    assert store.submissions.deletions > before
    assert store.submissions.all(TASK).keys() == {"c"}
    assert store.submissions.all(bytes(32)).keys() == {"a"}


def open_database(folder: Path) -> SqliteDatabase:
    database = SqliteDatabase(folder, read_only=False, lock=FolderLock(folder), holds_lock=True)
    database.write("INSERT INTO facts VALUES ('a', '1')")
    return database


@pytest.mark.parametrize("name", ["aggregator.sqlite", "aggregator.sqlite-wal"])
def test_file_that_is_deleted_or_replaced_is_noticed(tmp_path: Path, name: str) -> None:
    """The file and its log; the same file moved back is none."""
    database, file, away = open_database(tmp_path), tmp_path / name, tmp_path / "away"
    database.check_file()
    file.rename(away)
    for is_replaced in (False, True):
        if is_replaced:
            file.write_bytes(away.read_bytes())
        with pytest.raises(
            StateError, match=r"deleted or replaced while `aggregator run` was running: .*, restore it"
        ):
            database.check_file()
    away.replace(file)
    database.check_file()


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
    """Although all of it is in memory."""
    database, file = open_database(tmp_path), tmp_path / "aggregator.sqlite"
    database.read("PRAGMA wal_checkpoint(TRUNCATE)")
    data = damage(file.read_bytes())
    with file.open("r+b") as opened:
        opened.truncate(len(data))
        opened.write(data)
    database.check_file()
    database.search_damage()
    with pytest.raises(StateError, match=f"aggregator.sqlite: .*{reason}.*: restore it"):
        database.check_file()
