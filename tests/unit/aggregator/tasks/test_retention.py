"""Deletion of what nothing needs: in slices, each decided by what is stored when it is deleted."""

from collections.abc import Collection
from functools import partial

import pytest

from aggregator.coordination.round_state import Entry
from aggregator.storage.quarantine import ForgottenDevice
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.retention import (
    KEPT_S,
    PAUSE_S,
    RETENTION_S,
    SLICE_ROWS,
    Retention,
    delete_earlier_tasks,
    needed_blobs,
)
from protocol.storage.blobstore import SLICE_FILES
from protocol.wire.codec import digest_of
from tests.support.messages.heads import plan_head
from tests.support.messages.submissions import evaluation
from tests.support.messages.tasks import served_task
from tests.support.simulation.clocks import FakeClock

SERVED = served_task()
BEFORE = bytes([1]) * 32


@pytest.fixture
def clock(store: Store) -> FakeClock:
    store.clock = clock = FakeClock(1e6)
    return clock


def _write(store: Store, number: int) -> list[bytes]:
    """Write blobs as fast as possible: a durable one each would take minutes."""
    contents = [b"blob %d" % each for each in range(number)]
    for data in contents:
        store.blobs.path(digest_of(data)).write_bytes(data)
    return [digest_of(data) for data in contents]


def _submit(store: Store, device: str, digest: bytes, *, task: bytes = SERVED.digest) -> None:
    store.submissions.put(task, SubmissionRecord(device, Entry(1, digest, 0.0), 1, 1, 1, {0: 1}))


def test_blob_that_a_row_names_after_the_folder_was_listed_is_kept(store: Store) -> None:
    """Names that the system has read ahead, a new blob, and one that was there before its row."""
    written = _write(store, 3 * SLICE_FILES)
    steps = store.blobs.delete_unneeded(partial(needed_blobs, SERVED, store))
    next(steps)
    left = [digest for digest in written if digest in store.blobs]
    assert len(left) == 2 * SLICE_FILES
    new = store.blobs.put(b"new")
    for number, digest in enumerate([*left[::2], new]):
        _submit(store, f"dev{number}", digest)
    assert len(list(steps)) == 2
    assert set(store.blobs.digests()) == {*left[::2], new}


def test_no_slice_is_larger_than_its_bound(store: Store, clock: FakeClock) -> None:
    """Slices have pauses between them; the next deletion begins a minute after the last one has ended."""
    written = _write(store, 2 * SLICE_FILES + 1)
    retention, before = Retention(SERVED, store), len(written)
    retention.tick()
    assert len(list(store.blobs.digests())) == before  # not while devices connect after a start
    clock.elapsed_s += RETENTION_S
    for left in (SLICE_FILES + 1, 1, 0):
        retention.tick()
        retention.tick()
        assert len(list(store.blobs.digests())) == left
        clock.elapsed_s += PAUSE_S
    unneeded = store.blobs.put(b"unneeded")
    retention.tick()
    assert unneeded in store.blobs
    clock.elapsed_s += RETENTION_S
    retention.tick()
    assert unneeded not in store.blobs


def test_each_question_is_as_small_as_a_slice(store: Store) -> None:
    asked = list[int]()

    def needed(digests: Collection[bytes]) -> set[bytes]:
        asked.append(len(digests))
        return set(digests)

    written = _write(store, 2 * SLICE_FILES)
    list(store.blobs.delete_unneeded(needed))
    assert asked == [SLICE_FILES, SLICE_FILES]
    assert set(store.blobs.digests()) == set(written)


def test_no_query_reads_every_row(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tables that have a row for each device."""
    digests = _write(store, 2)
    _submit(store, "a", digests[0])
    plan_head(store, 1, task=SERVED.digest, members={"b": digests[1]})
    queries, read = list[tuple[str, int]](), store.database.read

    def recorded(query: str, *values: object) -> list[tuple[object, ...]]:
        queries.append((query, len(values)))
        return read(query, *values)

    monkeypatch.setattr(store.database, "read", recorded)
    assert needed_blobs(SERVED, store, [*digests, b"other"]) == set(digests)
    list(delete_earlier_tasks(SERVED, store))
    plans = {
        query: [row[-1] for row in read(f"EXPLAIN QUERY PLAN {query}", *[b""] * values)]
        for query, values in queries
    }
    assert len(plans) > 10
    tables = ("submissions", "evaluations", "lost_submissions", "quarantine", "forgotten")
    scans = {f"SCAN {table}" for table in tables}
    assert not [plan for plan in plans.values() for step in plan if " ".join(step.split()[:2]) in scans]


def test_rows_of_an_earlier_task_are_deleted_in_slices(store: Store, clock: FakeClock) -> None:
    """Everything of the task, and a restart goes on; what is of another task stays."""
    devices = [f"dev{number}" for number in range(SLICE_ROWS + 1)]
    with store.transaction():
        for task in (SERVED.digest, BEFORE):
            for device in devices:
                _submit(store, device, device.encode(), task=task)
            store.quarantine.add(task, "dev0", reason="outlier", now_s=0.0)
            store.forgotten.put(task, ForgottenDevice("dev0", 1, 0.0))
            store.submissions.add_lost(task, "lost", b"lost", now_s=0.0)
            plan_head(store, 1, task=task, members={})
        store.evaluations.put("dev0", evaluation(task=BEFORE), digest=b"e", now_s=0.0)
    list(delete_earlier_tasks(SERVED, store))
    clock.elapsed_s += KEPT_S
    next(delete_earlier_tasks(SERVED, store))
    assert len(store.submissions.all(BEFORE)) == 1
    assert store.tasks() == {SERVED.digest, BEFORE}
    list(delete_earlier_tasks(SERVED, store))
    assert store.tasks() == {SERVED.digest}
    assert not store.evaluations.of_head(BEFORE, 1)
    assert len(store.submissions.all(SERVED.digest)) == len(devices)
    kept = (store.quarantine.all(SERVED.digest), store.forgotten.all(SERVED.digest))
    assert (
        list(map(len, (*kept, store.submissions.lost(SERVED.digest), store.heads.all_planned()))) == [1] * 4
    )
