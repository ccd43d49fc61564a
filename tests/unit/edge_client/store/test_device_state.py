"""A device's state directory, its outbox, and counts of the program's ends."""

import contextlib
import itertools
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.core.state import StoredState, UploadItem
from edge_client.store import outbox, stored_values
from edge_client.store.culprit_record import MAX_ROWS
from edge_client.store.culprits import MAX_DEATHS, Culprits
from edge_client.store.device_state import _BASE_VERSION, _SCHEMA, DeviceState, default_device_id
from edge_client.store.head_trials import MAX_FAILURES
from edge_client.store.job_folder import At, Built, Changes, FromJob, Result, Worked
from edge_client.store.job_state import JobBlobs
from edge_client.store.privacy_ledger import Release
from edge_client.store.stored_values import (
    Epoch,
    Heads,
    InstalledHead,
    PrivacySpent,
    SubmissionSequence,
)
from protocol.errors import (
    BackboneMismatch,
    CrashedBefore,
    GraphRefused,
    ProtofleetError,
    RuntimeMissing,
    StateError,
)
from protocol.wire.codec import digest_of
from tests.support.devices.job_states import keep_item
from tests.support.machine_faults import full_disk


def test_facts_survive_a_restart(tmp_path: Path) -> None:
    """A reader in another process sees them while the writer still runs; a fact never stored has its defaults."""
    state = DeviceState(tmp_path)
    head = InstalledHead(head=b"\0\xff" * 16, version=3, backbones=(b"b" * 32,), classes=("a", "ü"), round=4)
    stored = (
        StoredState(task=b"t" * 32),
        stored_values.SubmissionReport(
            (stored_values.ClassReport("a", 9, 2, (7,)),), (("a/1.png", "broken"),), 77
        ),
        Heads(head, msgspec.structs.replace(head, tensors=b"r" * 32)),
    )
    state.set(*stored)
    again = DeviceState(tmp_path, read_only=True)
    assert tuple(again.get(type(fact)) for fact in stored) == stored
    assert again.get(stored_values.PrivacySpent) == stored_values.PrivacySpent()
    assert [one.key for one in (stored[2].installed, stored[2].previous) if one] == [head.head, b"r" * 32]


def test_numbers_only_grow(tmp_path: Path) -> None:
    """From one to the next, above a number known elsewhere, and after the state was lost."""
    state, numbers = DeviceState(tmp_path / "a"), list[int]()
    for _ in range(5):
        numbers.append(state.free_number(SubmissionSequence))
        state.set(SubmissionSequence(numbers[-1]))
    assert numbers == sorted(set(numbers))
    far = numbers[-1] + 10**6
    assert state.free_number(SubmissionSequence, above=far) > far
    assert DeviceState(tmp_path / "b").free_number(SubmissionSequence) >= numbers[0]


def test_device_id_is_stable(tmp_path: Path) -> None:
    """The machine's default stays, so does a given one, and two folders are two devices."""
    state = DeviceState(tmp_path)
    made = state.device_id(None)
    assert made == default_device_id(tmp_path) == DeviceState(tmp_path).device_id(None) == state.device_id("")
    assert default_device_id(tmp_path / "other") != made
    assert state.device_id("camera-1") == "camera-1"
    assert DeviceState(tmp_path).device_id(None) == "camera-1"


@pytest.mark.parametrize("name", ["a/b", "a+b", "#", "ä", "x" * 65, "a\n"])
def test_device_id_that_is_no_topic_level_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StateError, match="cannot name a device"):
        DeviceState(tmp_path).device_id(name)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("contents", [b"damaged" * 2000, b""])
def test_a_damaged_or_empty_database_is_not_to_be_deleted(
    tmp_path: Path, contents: bytes, *, read_only: bool
) -> None:
    """It has the privacy ledger: a new one would not know what was spent, or which images are together."""
    DeviceState(tmp_path).close()  # its other files are mapped while it is open
    (tmp_path / "device.sqlite").write_bytes(contents)
    found = "" if contents else "damaged: it is empty: "
    with pytest.raises(StateError, match=f"{found}keep the folder, .* would spend epsilon again"):
        DeviceState(tmp_path, read_only=read_only)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_state_of_an_earlier_program_is_not_carried_over(tmp_path: Path, *, read_only: bool) -> None:
    """All commands say so, and what it means for privacy; one that only reads changes nothing."""
    for version in (1, 2):
        with contextlib.closing(sqlite3.connect(tmp_path / "device.sqlite")) as database:
            database.execute(f"PRAGMA user_version = {version}")
        before = (tmp_path / "device.sqlite").read_bytes()
        with pytest.raises(
            StateError, match=f"version {version}, expected [0-9]+: .* not carried over.*epsilon"
        ):
            DeviceState(tmp_path, read_only=read_only)
        if read_only:
            assert (tmp_path / "device.sqlite").read_bytes() == before


def test_a_ledger_of_the_first_schema_keeps_what_it_has_charged(tmp_path: Path) -> None:
    """The share of noise of its releases is unknown, and all images of a person counted."""
    key, spent = (
        bytes(32),
        '{"epsilon":1.5,"total_epsilon":2.25,"delta":1e-05,"releases":2,"max_epsilon":4.0}',
    )
    with contextlib.closing(sqlite3.connect(tmp_path / "device.sqlite")) as database:
        database.executescript(_SCHEMA)
        rows = [(1, b"first", 2.0, None, b"rows"), (2, b"second", 3.0, key, None)]
        database.executemany("INSERT INTO releases VALUES (?, ?, ?, ?, ?)", rows)
        database.execute("INSERT INTO facts VALUES ('PrivacySpent', ?)", (spent,))
        database.execute(f"PRAGMA user_version = {_BASE_VERSION + 1}")
        database.commit()
    (tmp_path / "releases").write_text("2\n")
    for _ in range(2):
        state = DeviceState(tmp_path)
        assert state.ledger.releases() == tuple(Release(*row, honest=0) for row in rows)
        assert state.get(PrivacySpent) == PrivacySpent(1.5, 2.25, 1e-5, 2, 4.0)
        assert not state.ledger.is_empty()
        state.close()


def test_a_kill_while_the_database_is_made_leaves_none(tmp_path: Path) -> None:
    """It is written beside its place first: the next start makes it."""
    (tmp_path / ".gitignore").write_text("*")
    with patch.object(os, "link", side_effect=SystemExit), pytest.raises(SystemExit):
        DeviceState(tmp_path)
    assert not (tmp_path / "device.sqlite").exists()
    assert DeviceState(tmp_path, lock=True).get(Epoch) == Epoch()


def test_unusable_directory_is_named_in_the_error(tmp_path: Path) -> None:
    """A file in place of the folder, and a folder without state to read."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file"):
        DeviceState(tmp_path / "file" / "state")
    with pytest.raises(StateError, match="no device state"):
        DeviceState(tmp_path, read_only=True)


GRAPH = b"g" * 32


@pytest.fixture
def state(tmp_path: Path) -> DeviceState:
    return DeviceState(tmp_path)


def culprits(state: DeviceState, said: list[FromJob] | None = None) -> Culprits:
    """Return what a job is given."""
    return Culprits((said if said is not None else []).append, deaths=state.culprits.deaths())


def test_what_ended_three_jobs_is_not_run_again(tmp_path: Path, state: DeviceState) -> None:
    """Across restarts; something else runs, and the operator can insist."""
    for _ in range(MAX_DEATHS):
        DeviceState(tmp_path).culprits.add_death(GRAPH)
    for _ in range(2):
        with (
            pytest.raises(CrashedBefore, match="3 jobs ended while running it"),
            culprits(DeviceState(tmp_path)).running(GRAPH, what="it"),
        ):
            pytest.fail("it ran")
    said: list[FromJob] = []
    with culprits(state, said).running(b"other", what="it"):
        assert said == [At(b"other")]
    with culprits(state, said).running(GRAPH, what="it", max_deaths=None):
        pass
    assert said == [At(b"other"), At(), At(GRAPH), Worked(GRAPH), At()]
    state.culprits.forget(GRAPH)
    assert state.culprits.deaths() == {}


@pytest.mark.parametrize("end_of_run", [None, GraphRefused, StateError, KeyboardInterrupt])
def test_a_run_that_works_resets_the_count(
    state: DeviceState, end_of_run: type[BaseException] | None
) -> None:
    """One that is refused does not: earlier deaths stay."""
    state.culprits.add_death(GRAPH)
    said: list[FromJob] = []
    with contextlib.suppress(end_of_run or StateError), culprits(state, said).running(GRAPH, what="it"):
        if end_of_run is not None:
            raise end_of_run
    assert (Worked(GRAPH) in said) == (end_of_run is None)


def test_deaths_after_progress_are_counted_anew(state: DeviceState) -> None:
    """Features and checkpoints that are on disk are not computed again: the next end is at another place."""
    state.culprits.add_death(GRAPH)
    said: list[FromJob] = []
    with pytest.raises(StateError), culprits(state, said).running(GRAPH, what="it"):
        raise StateError
    assert Worked(GRAPH) not in said
    each = culprits(state, said)
    with each.running(GRAPH, what="it"):
        each.stored()
        assert said[-1] == Worked(GRAPH)
    assert Worked(GRAPH) in said


def test_few_culprits_are_kept(state: DeviceState) -> None:
    """The newest: those of replaced tasks and heads are deleted."""
    for number in range(MAX_ROWS + 2):
        state.culprits.add_death(b"%03d" % number)
        state.culprits.add_death(b"%03d" % 0)
    kept = state.culprits.deaths()
    assert len(kept) <= MAX_ROWS
    assert kept[b"000".hex()] == MAX_ROWS + 3


def head(version: int) -> InstalledHead:
    return InstalledHead(head=bytes([version]) * 32, version=version, backbones=(), classes=())


def test_a_head_that_fails_three_times_in_use_gives_way_to_the_previous_one(state: DeviceState) -> None:
    """Only if it does not work in between; who reads sees it at once, and the service stores it."""
    trials = DeviceState(state.folder, read_only=True).head_trials

    def fail() -> None:
        with pytest.raises(GraphRefused), trials.count(head(2).key):
            raise GraphRefused

    state.set(Heads(head(2), head(1)))
    fail()
    with trials.count(head(2).key):
        pass
    for _ in range(MAX_FAILURES):
        assert state.leave_failed_heads() == (state.heads_in_use(), "") == (Heads(head(2), head(1)), "")
        fail()
    assert DeviceState(state.folder, read_only=True).heads_in_use() == Heads(head(1))
    assert state.get(Heads) == Heads(head(2), head(1))
    assert state.leave_failed_heads() == (Heads(head(1)), "head 2 failed 3 times in use")
    assert state.get(Heads) == Heads(head(1))
    with pytest.raises(CrashedBefore), culprits(state).running(head(2).key, what="the head"):
        pytest.fail("it ran")
    assert trials.failures(head(2).key) == 0, "the row counts now"


@pytest.mark.parametrize(
    ("end", "failures"),
    [(GraphRefused, 1), (BackboneMismatch, 1), (MemoryError, 1), (None, 0), (StateError, 0), (RuntimeMissing, 0),
     (KeyboardInterrupt, 0), (SystemExit, 0)],
)  # fmt: skip
def test_a_trial_counts_unless_it_works_or_ends_for_another_reason(
    state: DeviceState, end: type[BaseException] | None, failures: int
) -> None:
    """A trial that still runs is no failure, and another program that runs a head meanwhile counts nothing."""
    with contextlib.suppress(end or GraphRefused), state.head_trials.count(b"k"):
        assert state.head_trials.failures(b"k") == 0
        with pytest.raises(GraphRefused), DeviceState(state.folder).head_trials.count(b"k"):
            raise GraphRefused
        if end is not None:
            raise end
    assert state.head_trials.failures(b"k") == failures
    assert (state.folder / "apps" / "trials" / b"k".hex()).exists() == bool(failures)


def test_a_trial_of_one_head_leaves_the_failures_of_another(state: DeviceState) -> None:
    """A head that has failed too often would be in use again while a program tries the head before."""
    state.set(Heads(head(2), head(1)))
    for _ in range(MAX_FAILURES):
        with pytest.raises(GraphRefused), state.head_trials.count(head(2).key):
            raise GraphRefused
    with DeviceState(state.folder, read_only=True).head_trials.count(head(1).key):
        assert state.heads_in_use() == Heads(head(1))
    state.leave_failed_heads()
    trials = state.folder / "apps" / "trials"
    assert [file.name for file in trials.iterdir()] == [f"{head(1).key.hex()}.lock"]


def test_a_lock_that_cannot_be_read_hides_no_failure(state: DeviceState) -> None:
    """The service would end by it: a program of another user, which had a strict umask, may have made it."""
    with pytest.raises(GraphRefused), state.head_trials.count(b"k"):
        raise GraphRefused
    lock = state.folder / "apps" / "trials" / f"{b'k'.hex()}.lock"
    lock.unlink()
    lock.mkdir()
    assert state.head_trials.failures(b"k") == 1


def test_a_killed_trial_counts(state: DeviceState) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from edge_client.store.head_trials import HeadTrials\n"
        "with HeadTrials(Path(sys.argv[1])).count(b'k'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    for number in (1, 2):
        subprocess.run([sys.executable, "-c", program, state.folder], check=False, timeout=60)
        assert state.head_trials.failures(b"k") == number


@pytest.mark.parametrize("contents", [b"", b"-1", b"[3]", b"3" * 10**4, b"{", None])
def test_a_malformed_count_is_logged_and_taken_for_none(
    state: DeviceState, contents: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in its place, too; the next trial counts."""
    file = state.folder / "apps" / "trials" / b"k".hex()
    if contents is None:
        file.mkdir()
    else:
        file.write_bytes(contents)
    assert [state.head_trials.failures(b"k") for _ in range(2)] == [0, 0]
    assert caplog.text.count("malformed file not used") == 1
    state.head_trials.keep_only([])
    if contents is not None:
        with pytest.raises(GraphRefused), state.head_trials.count(b"k"):
            raise GraphRefused
        assert state.head_trials.failures(b"k") == 1


def test_nothing_is_counted_on_an_almost_full_disk(
    state: DeviceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be room for a count, and then none for its deletion: three builds or predictions would be the last."""
    disk = SimpleNamespace(total=3 * 1024**2, free=44 * 1024)
    monkeypatch.setattr("edge_client.store.disk_space.disk_usage", lambda _: disk)
    with pytest.raises(GraphRefused), state.head_trials.count(head(2).key):
        raise GraphRefused
    assert state.head_trials.failures(head(2).key) == 0


TASK = b"t" * 32
ROOT = Path(__file__).parents[4]
KEY = "ab" * 32


def keep(state: DeviceState, payload: bytes, *, number: int = 0) -> UploadItem:
    """Put a submission into the outbox, with its number as a fact."""
    return keep_item(state, payload, SubmissionSequence(number), task=TASK, about="made of this")


def number_of(state: DeviceState) -> int:
    """Return the number stored with the newest submission."""
    return state.get(SubmissionSequence).number


@given(payload=st.binary(min_size=1, max_size=2000), cuts=st.lists(st.integers(0, 2000), max_size=6))
@settings(max_examples=30, deadline=None)
def test_any_ranges_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, payload: bytes, cuts: list[int]
) -> None:
    """A program that was started again reads them too."""
    folder = tmp_path_factory.mktemp("state")
    item = keep(DeviceState(folder), payload)
    assert (item.digest, item.size_bytes) == (digest_of(payload), len(payload))
    bounds = sorted(min(cut, len(payload)) for cut in cuts)
    ranges = tuple(itertools.pairwise(bounds))
    again = DeviceState(folder)
    assert again.outbox.items() == (item,)
    assert again.outbox.read(item.digest, ranges) == [payload[start:stop] for start, stop in ranges]
    assert again.outbox.read(b"n" * 32, ranges) is None


def test_newer_item_replaces_the_waiting_one(state: DeviceState) -> None:
    """The one acknowledged last stays until another is: the aggregator may ask for it again."""
    first = keep(state, b"first", number=1)
    second = keep(state, b"second", number=2)
    assert state.outbox.items() == (second,)
    assert not state.outbox.receive(first.digest)
    assert state.outbox.receive(second.digest)
    received = state.outbox.newest_submission()
    assert received is not None
    assert (received.digest, received.received) == (second.digest, True)
    third = keep(state, b"third", number=3)
    assert state.outbox.newest_submission() == third
    assert state.outbox.items() == (third, received)
    assert state.outbox.payload(received) == b"second"
    assert state.outbox.receive(third.digest)
    assert [item.digest for item in state.outbox.items()] == [third.digest]
    assert not state.outbox.receive(third.digest)
    assert number_of(state) == 3


def test_acknowledged_evaluation_is_deleted(state: DeviceState) -> None:
    """Facts are stored with both."""
    submission = keep(state, b"submission")
    evaluation = keep_item(state, b"5 correct", Epoch(7), kind="evaluation", about=KEY)
    assert evaluation.head == bytes.fromhex(KEY)
    assert submission.head is None
    assert state.outbox.items() == (submission, evaluation)
    assert state.outbox.receive(evaluation.digest)
    assert state.outbox.items() == (submission,)
    assert state.get(Epoch).number == 7


def test_submission_above_the_limit_is_refused(state: DeviceState, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier submission stays, with its facts."""
    monkeypatch.setattr(outbox, "LIMIT_BYTES", 100)
    there = keep(state, b"x" * 100, number=1)
    with pytest.raises(ProtofleetError, match=r"submission has 101 bytes .* holds 100: use fewer features"):
        keep(state, b"y" * 101, number=2)
    assert state.outbox.items() == (there,)
    assert number_of(state) == 1


def test_full_disk_leaves_the_old_item_or_the_new_one(tmp_path: Path, state: DeviceState) -> None:
    """The facts stored with the item are of the same one."""
    outcomes = set()
    before = keep(state, b"old" * 1000, number=1)
    size = (tmp_path / "device.sqlite-wal").stat().st_size
    for room in range(0, size + 200_000, 10_000):
        try:
            with full_disk(after_bytes=room):
                now = keep(state, b"new%d" % room * 3000, number=2 + room)
        except StateError:
            outcomes.add("old")
        else:
            before = now
            outcomes.add("new")
        for each in (state, DeviceState(tmp_path)):
            assert each.outbox.items() == (before,)
            assert digest_of(each.outbox.payload(before) or b"") == before.digest
    assert outcomes == {"old", "new"}


def test_a_file_that_a_job_has_not_left_is_an_error_without_a_trace(
    tmp_path: Path, state: DeviceState
) -> None:
    """A disk may lose it. The state stays as it is."""
    item = UploadItem(digest_of(b"new"), 3, "submission", b"task")
    changes = Changes(item=item, facts={"LeftOut": msgspec.Raw(b'{"unknown":["dgo"]}')})
    with pytest.raises(StateError, match="No such file or directory"):
        state.commit(tmp_path, Result(outcome=Built(item=item), changes=changes))
    assert state.outbox.items() == ()
    assert state.get(stored_values.LeftOut) == stored_values.LeftOut()


def test_a_job_leaves_a_blob_although_the_service_has_it(tmp_path: Path) -> None:
    """One to which nothing refers yet may be deleted while the job runs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / digest_of(b"model").hex()).write_bytes(b"model")
    blobs = JobBlobs(tmp_path / "blobs", tmp_path / "own")
    digest = blobs.put(b"model")
    assert blobs.added == [digest]
    assert (tmp_path / "own" / digest.hex()).read_bytes() == b"model"


def test_damaged_item_is_deleted(tmp_path: Path, state: DeviceState) -> None:
    damaged = keep(state, b"damaged" * 1000)
    whole = keep_item(state, b"5 correct", kind="evaluation", about=KEY)
    assert state.outbox.drop_damaged() == []
    with sqlite3.connect(tmp_path / "device.sqlite") as other:
        other.execute("UPDATE payloads SET bytes = zeroblob(7000) WHERE length(bytes) = 7000")
    again = DeviceState(tmp_path)
    assert again.outbox.payload(damaged) is None
    assert again.outbox.drop_damaged() == [damaged]
    assert again.outbox.items() == (whole,)


_KEEP = """
import pathlib, sys
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import SubmissionSequence
from tests.support.devices.job_states import keep_item

state = DeviceState(pathlib.Path(sys.argv[1]))
number = state.get(SubmissionSequence).number
while True:
    number += 1
    payload = b"%8d" % number * 40_000
    item = keep_item(state, payload, SubmissionSequence(number), about=str(number))
    print(number, flush=True)
    if number % 3 == 0:
        state.outbox.receive(item.digest)
        print(-number, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_killed_program_leaves_the_last_item_or_the_next(tmp_path: Path, seed: int) -> None:
    """The one that was acknowledged last is there, too."""
    chance, received = random.Random(seed), 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _KEEP, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(chance.randint(1, 8))]
        time.sleep(chance.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        said += map(int, process.stdout.read().split())
        assert process.wait() == -signal.SIGKILL, "it ended by itself"
        state = DeviceState(tmp_path)
        number = number_of(state)
        newest = state.outbox.newest_submission()
        assert newest is not None
        assert number - max(said) in {0, 1}
        assert newest.about == str(number)
        assert state.outbox.payload(newest) == b"%8d" % number * 40_000
        said_received = max([received, *(-each for each in said)])
        received = max([0, *(int(item.about) for item in state.outbox.items() if item.received)])
        assert received in {said_received, number if number % 3 == 0 else said_received}
        assert state.outbox.drop_damaged() == []


def test_file_size_is_bounded(tmp_path: Path, state: DeviceState) -> None:
    """There is room for two submissions, and for the log of the last transaction."""
    for number in range(12):
        item = keep(state, bytes([number]) * 2**20)
        if number % 2:
            state.outbox.receive(item.digest)
    with sqlite3.connect(tmp_path / "device.sqlite") as other:
        assert other.execute("SELECT count(*) FROM payloads").fetchone() == (1,)
    used = sum(file.stat().st_size for file in tmp_path.glob("device.sqlite*"))
    assert used < 6 * 2**20
