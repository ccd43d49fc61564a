"""Limits of devices and of the fleet, counted in the database at the same cost however much is stored."""

import contextlib

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.config.limits import Limits
from aggregator.coordination.round_state import Entry
from aggregator.intake.quotas import Quotas
from aggregator.intake.validation import Refused
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from protocol.wire.codec import digest_of
from tests.support.messages.submissions import TASK

LIMITS = Limits(
    max_devices=2,
    max_storage_mb=2,
    uploads_per_hour=6,
    device_submissions_per_hour=3,
    device_evaluations_per_hour=2,
    device_mb_per_hour=2.5,
)
_MIB = 1024**2


def _record(device: str, size_bytes: int, digest: bytes = b"") -> SubmissionRecord:
    return SubmissionRecord(device, Entry(1, digest or digest_of(device.encode()), 1.0), size_bytes, 1, 1, {})


def _accept(store: Store, device: str, size_bytes: int = 1, limits: Limits = LIMITS) -> None:
    """Store a submission as the intake does, in a transaction."""
    quotas = Quotas(store, limits, task=TASK)
    with store.transaction():
        if store.keys.get(device) is None:
            quotas.check_new_device(device)
            store.keys.pin(device, device.encode() * 32, now_s=1.0)
        quotas.count_submission(_record(device, size_bytes))
        store.submissions.put(TASK, _record(device, size_bytes))


def test_quotas_of_the_fleet_are_counted_in_the_database(store: Store) -> None:
    """Submissions that another program has accepted count; a refused one changes nothing."""
    limits = Limits(max_devices=2, max_storage_mb=2, uploads_per_hour=6)
    with contextlib.closing(open_store(store.folder)) as other:
        _accept(store, "a", _MIB, limits)
        with pytest.raises(Refused, match=r"stores 1\.0 of 2 MiB .*add 1\.0"):
            _accept(other, "b", _MIB + 1, limits)
        assert other.keys.get("b") is None
        _accept(other, "b", _MIB, limits)
        with pytest.raises(Refused, match=r"limits\.max_devices allows \(2\)"):
            _accept(store, "c", 1, limits)
        for device in ("a", "a", "b", "b"):
            _accept(store, device, _MIB, limits)
        for each in (store, other):
            with pytest.raises(Refused, match=r"6 submissions within an hour \(limits\.uploads_per_hour\)"):
                _accept(each, "b", 1, limits)
        assert other.submissions.stored_bytes() == 2 * _MIB


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(device_submissions_per_hour=2), r"2 submissions .*limits\.device_submissions_per_hour"),
        (Limits(uploads_per_hour=5), r"2 submissions .*limits\.device_submissions_per_hour"),
        (Limits(device_mb_per_hour=1.5), r"2\.0 MiB .*limits\.device_mb_per_hour"),
    ],
    ids=["own limit", "half of the fleet's", "bytes"],
)
def test_one_device_does_not_use_up_the_quota_of_the_fleet(
    store: Store, limits: Limits, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others upload meanwhile; an hour after its first upload it may again."""
    now_s = store.clock.now_s()
    for _ in range(2):
        _accept(store, "a", _MIB, limits)
    with pytest.raises(Refused, match=rf"^a has uploaded {reason}.*accepted in 3\d\d\d s"):
        _accept(store, "a", _MIB, limits)
    _accept(store, "b", _MIB, limits)
    monkeypatch.setattr(store.clock, "now_s", lambda: now_s + 3700)
    _accept(store, "a", _MIB, limits)


def test_evaluations_of_a_device_are_limited(store: Store) -> None:
    """They count apart from its submissions, and their bytes with those."""
    quotas = Quotas(store, LIMITS, task=TASK)
    for _ in range(2):
        quotas.count_evaluation("a", 100)
    with pytest.raises(Refused, match=r"2 evaluations .*limits\.device_evaluations_per_hour"):
        quotas.count_evaluation("a", 100)
    _accept(store, "a", 3 * _MIB, Limits(device_mb_per_hour=2.5))
    quotas.count_evaluation("b", 100)
    with pytest.raises(Refused, match=r"3\.0 MiB .*limits\.device_mb_per_hour"):
        Quotas(store, Limits(device_mb_per_hour=2.5), task=TASK).count_evaluation("a", 1)


def test_cost_does_not_grow_with_the_number_of_submissions(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first upload, no query reads all rows of a table that has one for each device."""
    quotas = Quotas(store, LIMITS, task=TASK)
    quotas.count_submission(_record("a", 1))
    queries = list[str]()
    read, write = store.database.read, store.database.write

    def record_read(query: str, *values: object) -> list[tuple[object, ...]]:
        queries.append(query)
        return read(query, *values)

    def record_write(query: str, *values: object) -> None:
        queries.append(query)
        write(query, *values)

    monkeypatch.setattr(store.database, "read", record_read)
    monkeypatch.setattr(store.database, "write", record_write)
    quotas.check_transfer("a", b"d" * 32, 100_000)
    with store.transaction():
        quotas.count_submission(_record("a", 2))
        store.submissions.put(TASK, _record("a", 2))
        quotas.count_evaluation("a", 2)
    assert len(queries) > 10
    for query in queries:
        plan = [row[-1] for row in read(f"EXPLAIN QUERY PLAN {query}", *[b""] * query.count("?"))]
        tables = [f"SCAN {table}" for table in ("submissions", "evaluations", "usage", "devices")]
        assert not [step for step in plan for table in tables if step.startswith(table)], query


_CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "delete", "delete all", "delete task", "failed"]),
        st.sampled_from(["a", "b"]),
        st.integers(1, 3),
    ),
    max_size=12,
)


class _Undone(Exception):
    pass


@hypothesis.settings(max_examples=50, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@given(changes=_CHANGES)
def test_stored_bytes_follow_every_change(store: Store, changes: list[tuple[str, str, int]]) -> None:
    """They are what a sum over all rows gives, in which a submission that two tasks share counts once."""
    earlier = b"u" * 32
    for task in (TASK, earlier):
        store.delete_rows(task, 100)
    for size, device in enumerate("ab", start=1):
        store.submissions.put(earlier, _record(device, size, bytes([size]) * 32))
    limits = Limits(max_storage_mb=1, device_submissions_per_hour=10**6)
    quotas = Quotas(store, limits, task=TASK)
    for kind, device, size in changes:
        record = _record(device, size, bytes([size]) * 32)
        match kind:
            case "put":
                quotas.count_submission(record)
                store.submissions.put(TASK, record)
            case "failed":
                with contextlib.suppress(_Undone), store.transaction():
                    quotas.count_submission(record)
                    store.submissions.put(TASK, record)
                    raise _Undone
                quotas = Quotas(store, limits, task=TASK)  # of the next program
            case "delete task":
                store.delete_rows(earlier, 100)
            case _:
                store.submissions.delete(device, TASK if kind == "delete" else None)
        assert quotas._stored_bytes()[1] == store.submissions.stored_bytes()
