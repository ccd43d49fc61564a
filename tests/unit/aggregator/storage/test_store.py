"""What must survive a restart does, also under a full disk, a second reader and a newer program."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from aggregator.coordination.rollout import State
from aggregator.coordination.rounds import Entry, Settings, Ticked, Train, Trained, resumed, step, waiting
from aggregator.storage.migrations import MIGRATIONS, SCHEMA_VERSION
from aggregator.storage.store import Closing, HeadRow, Store, SubmissionRow, open_folder
from protocol.errors import StateError
from protocol.wire.messages import BlobRef
from tests.support.machine import full_disk, read_only
from tests.support.machine import open_folder as shared_folder
from tests.support.submissions import TASK, evaluation


def _row(device: str, sequence: int = 1) -> SubmissionRow:
    return SubmissionRow(
        device=device,
        entry=Entry(sequence, f"{device}{sequence}".encode(), 100.0 + sequence),
        size_bytes=1234,
        images=40,
        prototypes=8,
        per_class={0: 5, 2: 3},
    )


def _head(version: int, *rows: SubmissionRow, task: bytes = TASK) -> HeadRow:
    return HeadRow(
        version=version,
        task=task,
        digest=bytes([version]) * 32,
        size_bytes=99,
        trained_s=5.5,
        prototypes=16,
        members={row.device: row.entry.digest.hex() for row in rows},
        metrics={"loss": 0.25},
    )


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    """Facts, devices, submissions, heads, evaluations, refusals and blobs."""
    store = Store(tmp_path)
    store.set_fact("epoch", "7")
    store.see_device("a", state="online", epoch=3, now_s=10.0)
    store.keep_info("a", info='{"runtime": "x"}', now_s=11.0)
    store.keep_submission(TASK, _row("a"))
    store.keep_head(_head(1, _row("a")))
    store.keep_evaluation("a", evaluation(), digest=b"e", now_s=12.0)
    store.count_refusal("a", reason="shape", detail="d", now_s=13.0)
    digest = store.blobs.put(b"blob")
    store.close()
    again = Store(tmp_path)
    assert again.fact("epoch") == "7"
    assert again.fact("other", "default") == "default"
    assert again.devices() == [("a", "online", 11.0, {"runtime": "x"})]
    assert again.submissions(TASK) == {"a": _row("a")}
    assert again.heads(TASK) == [_head(1, _row("a"))]
    assert again.evaluations(TASK, 1) == {"a": evaluation()}
    assert again.refusals() == [("a", "shape", 1, "d")]
    assert again.blobs.read(digest) == b"blob"


def test_the_newest_submission_takes_the_place_of_the_older(tmp_path: Path) -> None:
    """One row a device and task, and only what stands is held."""
    store = Store(tmp_path)
    for sequence in (1, 2):
        store.keep_submission(TASK, _row("a", sequence))
    store.keep_submission(bytes(32), _row("a", 1))
    store.keep_submission(TASK, _row("b"))
    assert store.submissions(TASK) == {"a": _row("a", 2), "b": _row("b")}
    assert store.holds("a", b"a2")
    assert store.holds("a", b"a1")  # it stands for the other task
    assert not store.holds("b", b"a2")
    assert not store.holds("c", b"a2")


def test_evaluations_of_old_heads_are_forgotten(tmp_path: Path) -> None:
    """Those of the heads that are named stay."""
    store = Store(tmp_path)
    for version in (1, 2, 3):
        store.keep_evaluation("a", evaluation(head_version=version), digest=bytes([version]), now_s=1.0)
    store.forget_evaluations(TASK, but={2, 3})
    assert [bool(store.evaluations(TASK, version)) for version in (1, 2, 3)] == [False, True, True]


def test_an_evaluation_is_held_and_replaced(tmp_path: Path) -> None:
    """A repeated evaluation of one head counts once, with its newest figures."""
    store = Store(tmp_path)
    store.keep_evaluation("a", evaluation(), digest=b"first", now_s=1.0)
    better = msgspec.structs.replace(evaluation(), correct=(5, 5, 0), incorrect=(0, 0, 0))
    store.keep_evaluation("a", better, digest=b"second", now_s=2.0)
    store.keep_evaluation("a", evaluation(head_version=2), digest=b"third", now_s=3.0)
    assert store.evaluations(TASK, 1) == {"a": better}
    assert [store.holds("a", digest) for digest in (b"first", b"second", b"third")] == [False, True, True]


def test_an_old_last_will_does_not_end_a_new_session(tmp_path: Path) -> None:
    """Presence of an older start is passed over; of the same or a newer start it counts."""
    store = Store(tmp_path)
    for state, epoch, expected in (
        ("online", 5, "online"),
        ("offline", 4, "online"),
        ("stopped", 5, "stopped"),
        ("online", 6, "online"),
        ("offline", 6, "offline"),
    ):
        store.see_device("a", state=state, epoch=epoch, now_s=1.0)
        assert [row[1] for row in store.devices()] == [expected]


def test_refusals_are_counted_by_device_and_reason(tmp_path: Path) -> None:
    """The first of each pair is told apart, so that it can be logged; the last detail is kept."""
    store = Store(tmp_path)
    said = [
        store.count_refusal(device, reason=reason, detail=detail, now_s=1.0)
        for device, reason, detail in (
            ("a", "shape", "1"),
            ("a", "shape", "2"),
            ("a", "dtype", "3"),
            ("b", "shape", "4"),
        )
    ]
    assert said == [True, False, True, True]
    assert store.refusals() == [("a", "dtype", 1, "3"), ("a", "shape", 2, "2"), ("b", "shape", 1, "4")]


def test_the_round_goes_on_where_it_was(tmp_path: Path) -> None:
    """The state after a restart knows what a head covers, what waits, and which version comes next."""
    settings = Settings(quorum=1, deadline_s=10.0, retrain_after=1)
    store = Store(tmp_path)
    assert waiting(store.round_state(TASK), settings) == {}
    for row in (_row("a"), _row("b")):
        store.keep_submission(TASK, row)
    state, (train,) = step(store.round_state(TASK), Ticked(0.0), settings=settings)
    assert isinstance(train, Train)
    assert (train.version, [device for device, _ in train.members]) == (1, ["a", "b"])
    store.keep_head(_head(1, _row("a"), _row("b")))
    state, _ = step(state, Trained(1), settings=settings)
    restored = Store(tmp_path).round_state(TASK)
    assert waiting(restored, settings) == waiting(state, settings) == {}
    assert restored.head_version == state.head_version == 1
    store.keep_submission(TASK, _row("b", 2))
    assert waiting(Store(tmp_path).round_state(TASK), settings) == {"b": _row("b", 2).entry}
    store.keep_head(_head(2, _row("a"), _row("b", 2)))
    assert waiting(store.round_state(TASK), settings) == {}
    assert store.round_state(TASK).head_version == 2
    assert store.round_state(bytes(32)).submissions == {}


def test_a_round_goes_on_where_it_was(tmp_path: Path) -> None:
    """Rounds of submissions, what heads leave to the next round, and what was being pooled, outlive a restart."""
    settings = Settings(quorum=2, deadline_s=10.0, rounds=3, staleness=1)
    store = Store(tmp_path)
    rows = [replace(_row(device), entry=replace(_row(device).entry, round=1)) for device in "ab"]
    tensors = BlobRef(digest=bytes(32), size_bytes=7, name="tensors-1")
    store.keep_head(replace(_head(1, _row("a")), tensors=tensors))
    assert store.heads(TASK)[0].tensors == tensors
    for row in rows:
        store.keep_submission(TASK, row)
    assert store.submissions(TASK) == {row.device: row for row in rows}
    state, (train,) = step(store.round_state(TASK), Ticked(0.0), settings=settings)
    assert isinstance(train, Train)
    store.set_closing(Closing(TASK, train.version, dict(train.members)))
    store.keep_submission(TASK, replace(_row("c"), entry=replace(_row("c").entry, round=1)))
    restored = Store(tmp_path).round_state(TASK)
    assert resumed(restored) == (train,)
    assert restored.training == state.training
    assert Store(tmp_path).round_state(bytes(32)).training is None
    store.keep_head(replace(_head(2, *rows), tensors=tensors))
    assert Store(tmp_path).round_state(TASK).training is None


def test_what_is_forgotten_is_not_held(tmp_path: Path) -> None:
    """A submission whose blob is gone can be made to have never come, without touching others."""
    store = Store(tmp_path)
    for task in (TASK, bytes(32)):
        for device in "ab":
            store.keep_submission(task, _row(device))
    store.forget_submission(TASK, "a")
    assert store.submissions(TASK) == {"b": _row("b")}
    assert store.submissions_to_others(TASK) == {b"a1", b"b1"}


def test_facts_of_a_kind(tmp_path: Path) -> None:
    """Those whose names begin alike are found together, whatever characters mean something to SQL."""
    store = Store(tmp_path)
    for key in ("graphs:1", "graphs:2", "graphs", "gra%hs:3"):
        store.set_fact(key, key)
    assert store.facts("graphs:") == {"graphs:1": "graphs:1", "graphs:2": "graphs:2"}
    assert store.facts("gra%") == {"gra%hs:3": "gra%hs:3"}


def test_an_older_state_is_brought_up_to_date(tmp_path: Path) -> None:
    """What stood in it stands; who only looks is told to start the aggregator first."""
    with sqlite3.connect(tmp_path / "aggregator.sqlite") as database:
        database.executescript(f"{MIGRATIONS[0]}PRAGMA user_version = 1;")
        database.execute(
            "INSERT INTO submissions VALUES (?, 'a', 1, ?, 101.0, 1234, 40, 8, '{\"0\": 5, \"2\": 3}')",
            (TASK, b"a1"),
        )
        database.execute(
            'INSERT INTO heads VALUES (1, ?, ?, 99, 5.5, 16, \'{"a": "6131"}\', \'{"loss": 0.25}\')',
            (TASK, b"\x01" * 32),
        )
    with pytest.raises(StateError, match="older protofleet: start `aggregator run` on it first"):
        Store(tmp_path, read_only=True)
    store = Store(tmp_path)
    assert store.submissions(TASK) == {"a": _row("a")}
    head = replace(_head(1, _row("a")), file=b"\x01" * 32)
    assert store.heads(TASK) == [head]
    assert Store(tmp_path, read_only=True).heads() == [head]
    assert store.rollout(TASK) == State(newest=1, current=1)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """A state directory of a newer program is left alone, and the message says what to do."""
    Store(tmp_path).close()
    file = tmp_path / "aggregator.sqlite"
    with sqlite3.connect(file) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    for read in (False, True):
        with pytest.raises(
            StateError,
            match=rf"schema {SCHEMA_VERSION + 1}, expected {SCHEMA_VERSION}\): use that version, or another --state",
        ):
            Store(tmp_path, read_only=read)


def test_a_reader_sees_what_a_writer_writes(tmp_path: Path) -> None:
    """`aggregator status` looks while the daemon writes: neither waits for the other, and nothing can be changed."""
    writer = Store(tmp_path)
    (mode,) = writer._read("PRAGMA journal_mode")
    assert mode == ("wal",)
    reader = Store(tmp_path, read_only=True)
    writer._write("BEGIN IMMEDIATE")
    writer.set_fact("epoch", "1")
    assert reader.fact("epoch") == ""
    writer._write("COMMIT")
    assert reader.fact("epoch") == "1"
    with pytest.raises(StateError, match="readonly"):
        reader.set_fact("epoch", "2")


def test_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    """Looking at a folder without state makes none, and names the option."""
    with pytest.raises(StateError, match=r"no aggregator state in .*none: give the --state"):
        Store(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


def test_any_folder_name_is_a_folder_name(tmp_path: Path) -> None:
    """Characters that mean something in a URI do not: the state lands in the folder that was named."""
    folder = tmp_path / "50% of #1? state"
    Store(folder).set_fact("epoch", "1")
    assert (folder / "aggregator.sqlite").is_file()
    assert Store(folder, read_only=True).fact("epoch") == "1"


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    """It is named, and not overwritten."""
    file = tmp_path / "aggregator.sqlite"
    file.write_bytes(b"something else " * 100)
    with pytest.raises(StateError, match=rf"cannot use {file}: file is not a database"):
        Store(tmp_path)
    assert file.read_bytes() == b"something else " * 100


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    """What was stored stays, the failure is one line, and it works again once there is room."""
    store = Store(tmp_path)
    store.keep_submission(TASK, _row("a"))
    used = sum(file.stat().st_size for file in tmp_path.glob("aggregator.sqlite*"))
    with full_disk(after_bytes=used), pytest.raises(StateError, match=r"cannot use .*aggregator\.sqlite: "):
        store.set_fact("large", "x" * 10**6)
    assert Store(tmp_path, read_only=True).submissions(TASK) == {"a": _row("a")}
    store.keep_submission(TASK, _row("b"))
    assert sorted(Store(tmp_path).submissions(TASK)) == ["a", "b"]


def test_a_state_folder_that_cannot_be_written() -> None:
    """Each way in says so in one line."""
    with shared_folder() as folder, read_only(folder):
        with pytest.raises(StateError, match=f"cannot use {folder}/state: Permission denied"):
            open_folder(folder / "state")
        with pytest.raises(StateError, match="Permission denied"):
            Store(folder)


def test_what_is_written_together_is_there_or_not(tmp_path: Path) -> None:
    """Others see all of it at the end; nothing of it if something fails, also if that is not the disk."""
    store = Store(tmp_path)
    with store.together():
        store.set_fact("one", "1")
        assert Store(tmp_path, read_only=True).fact("one") == ""
        store.set_fact("two", "2")
    assert Store(tmp_path, read_only=True).facts("") == {"one": "1", "two": "2"}
    with pytest.raises(KeyError):
        _set_together(store, {"two": "3"}, then=KeyError())
    assert store.fact("two") == "2"
    with full_disk(after_bytes=100_000), pytest.raises(StateError):
        _set_together(store, {"one": "11", "two": "x" * 3_000_000})
    assert (store.fact("one"), store.fact("two")) == ("1", "2")
    store.set_fact("one", "new")
    assert store.fact("one") == "new"


def _set_together(store: Store, facts: dict[str, str], *, then: Exception | None = None) -> None:
    with store.together():
        for key, value in facts.items():
            store.set_fact(key, value)
        if then is not None:
            raise then


def test_who_is_not_heard_is_not_there(tmp_path: Path) -> None:
    """A device that was revoked, or not enrolled in a closed fleet, cannot say that it goes, and does not count."""
    store = Store(tmp_path)
    for device in ("enrolled", "pinned", "revoked", "new"):
        store.see_device(device, state="online", epoch=1, now_s=1.0)
    store.keys.enrol_key("enrolled", b"1" * 32, now_s=1.0)
    store.keys.enrol_key("revoked", b"2" * 32, now_s=1.0)
    store.keys.pin_key("pinned", b"3" * 32, now_s=1.0)
    store.keys.revoke_key("revoked", now_s=2.0)
    assert store.online() == {"enrolled", "pinned", "new"}
    store.keys.close_fleet()
    assert store.online() == {"enrolled"}
