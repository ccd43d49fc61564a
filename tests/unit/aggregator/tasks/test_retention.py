"""The blobs that the aggregator keeps: those that are needed, and no others."""

from dataclasses import replace

import pytest

from aggregator.coordination.rollout_state import State, Trial
from aggregator.coordination.round_state import Entry
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.stored_values import CompiledGraphs, NextHead
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.retention import delete_carried_submissions, needed_blobs, served_blobs
from protocol.wire.messages import BlobRef
from tests.support.messages.submissions import ROUNDS_EXPECTATION, ROUNDS_TASK, TASK
from tests.support.messages.tasks import served_task

ONE_SHOT = served_task()
FIRST = BlobRef(digest=b"f" * 32, size_bytes=1, name="tensors-0")
ROUNDS = served_task(ROUNDS_EXPECTATION, first_tensors=FIRST, algorithm="fpl")


def _row(device: str, *, number: int = 0) -> SubmissionRecord:
    return SubmissionRecord(device, Entry(1, f"{device}{number}".encode(), 0.0, number), 1, 1, 1, {0: 1})


def _head(task: bytes, version: int, *, tensors: bool) -> HeadRecord:
    blob = BlobRef(digest=bytes([version]) * 32, size_bytes=1, name="tensors") if tensors else None
    digest = b"graph" if tensors else f"head{version}".encode()
    return HeadRecord(
        version, task, digest, 1, 0.0, 1, {}, {}, blob, b"file%d" % version if tensors else digest
    )


@pytest.fixture
def store(store: Store) -> Store:
    for version in (1, 2, 3):
        store.heads.add(_head(ROUNDS_TASK, version, tensors=True))
        store.heads.add(_head(TASK, version, tensors=False))
    for number in range(4):
        store.submissions.put(ROUNDS_TASK, _row(f"r{number}", number=number))
    for device in "ab":
        store.submissions.put(TASK, _row(device))
    graph = BlobRef(digest=b"g" * 32, size_bytes=1, name="init.onnx")
    store.facts.put(CompiledGraphs({"key": {"init": graph}}))
    return store


def test_blobs_that_rounds_need(store: Store) -> None:
    """Submissions within the staleness, tensors and files of retained heads, graphs; everything of other tasks."""
    for version in range(4, 9):
        store.heads.add(_head(ROUNDS_TASK, version, tensors=True))
    store.heads.put_rollout(ROUNDS_TASK, State(newest=8, current=2, earlier=(1,), trial=Trial(3, 0.0)))
    for number in (7, 8):
        store.submissions.put(ROUNDS_TASK, _row(f"r{number}", number=number))
    needed = needed_blobs(ROUNDS, store)
    assert {b"r77", b"r88"} <= needed
    assert not {b"r00", b"r11", b"r22", b"r33"} & needed
    assert {FIRST.digest, ROUNDS_TASK} <= needed
    for version in range(1, 9):
        assert bytes([version]) * 32 in needed
        assert b"file%d" % version in needed
    store.heads.put_rollout(ROUNDS_TASK, State(newest=8, current=3, trial=None))
    needed = needed_blobs(ROUNDS, store)
    for version in range(1, 9):
        assert (bytes([version]) * 32 in needed) == (version >= 3)
        assert (b"file%d" % version in needed) == (version >= 3)
    assert {b"a0", b"b0", b"head1", b"head2", b"head3", b"g" * 32} <= needed


def test_without_rounds_every_device_counts(store: Store) -> None:
    """Whatever the age of its submission; the blobs that a task with rounds would continue with are kept."""
    needed = needed_blobs(ONE_SHOT, store)
    assert {b"a0", b"b0", TASK, b"r00", b"r33", b"\x03" * 32, b"g" * 32} <= needed
    assert {b"\x01" * 32, b"\x02" * 32} <= needed


def test_last_heads_are_kept(store: Store) -> None:
    """The last five, the current one and the one before it; likewise of other tasks."""
    for version in range(4, 11):
        store.heads.add(_head(TASK, version, tensors=False))
    state = State(newest=10, current=2, earlier=(1, 4))
    store.heads.put_rollout(TASK, state)
    kept = {f"head{version}".encode() for version in (2, 4, 6, 7, 8, 9, 10)}
    heads = {f"head{version}".encode() for version in range(1, 11)}
    assert needed_blobs(ONE_SHOT, store) & heads == kept
    assert needed_blobs(ROUNDS, store) & heads == kept
    assert served_blobs(ONE_SHOT, store.heads.all(TASK), state) & heads == kept


def test_members_of_a_pending_head_are_needed(store: Store) -> None:
    entry = Entry(1, b"superseded", 0.0, 2)
    store.facts.put(NextHead(ROUNDS_TASK, 4, {"x": entry}))
    assert b"superseded" in needed_blobs(ROUNDS, store)
    store.facts.delete(NextHead)
    assert b"superseded" not in needed_blobs(ROUNDS, store)


def test_served_blobs() -> None:
    heads = [_head(ROUNDS_TASK, version, tensors=True) for version in range(1, 9)]
    served = served_blobs(ROUNDS, heads, State(newest=8, current=2))
    assert {FIRST.digest, b"graph", b"\x02" * 32, b"\x08" * 32, bytes(32)} <= served
    assert not {b"\x01" * 32, b"\x03" * 32} & served
    assert served_blobs(ONE_SHOT, [], State()) == {bytes(32)}


def test_submission_of_an_earlier_round_without_its_blob_is_deleted(store: Store) -> None:
    """It is deleted if it would count; one of the open round is requested instead."""
    store.submissions.put(ROUNDS_TASK, replace(_row("here"), entry=Entry(1, store.blobs.put(b"x"), 0.0, 2)))
    delete_carried_submissions(ROUNDS, store)
    assert sorted(store.submissions.all(ROUNDS_TASK)) == ["here", "r0", "r1", "r3"]
    assert sorted(store.submissions.all(TASK)) == ["a", "b"]
