"""The table of training jobs: one worker at a time, whose lease ends with it, and one result for each job."""

import pytest

from aggregator.storage.programs import MAX_LOST_WORKERS, Outcome, QueuedJob
from aggregator.storage.store import Store
from protocol.errors import StateError

TASK, OTHER = bytes(32), bytes([1] * 32)
LEASE_S = 10.0


def _add(store: Store, *, task: bytes = TASK, digest: bytes = b"a") -> bytes:
    store.jobs.add(task, kind="head", job="{}", digest=digest, timeout_s=60.0, now_s=0.0)
    return digest


def _claim(store: Store, worker: str, *, now_s: float = 0.0) -> QueuedJob:
    claimed = store.jobs.claim(worker, now_s=now_s, lease_s=LEASE_S)
    assert claimed is not None
    return claimed


def _get(store: Store, digest: bytes, *, now_s: float = 0.0) -> QueuedJob:
    found = store.jobs.get(digest, now_s=now_s)
    assert found is not None
    return found


def test_equal_job_is_kept_and_another_replaces_it(store: Store) -> None:
    """A restarted aggregator finds the job that it has queued; of a changed collection there is a new one."""
    digest = _add(store)
    _claim(store, "one")
    _add(store)
    kept = _get(store, digest)
    assert (kept.worker, kept.attempt) == ("one", 1)
    _add(store, digest=b"b")
    waiting = _claim(store, "two")
    assert (waiting.worker, waiting.attempt) == ("two", 1)
    assert not store.jobs.finish(kept, Outcome(reason="of the job that was replaced"))
    assert store.jobs.claim("three", now_s=0.0, lease_s=LEASE_S) is None


def test_job_has_one_worker_until_its_lease_is_over(store: Store) -> None:
    """Renewing extends the lease; the worker that had it before can neither renew nor finish."""
    digest = _add(store)
    first = _claim(store, "one")
    assert store.jobs.claim("two", now_s=9.0, lease_s=LEASE_S) is None
    assert store.jobs.renew(first, until_s=20.0, progress={"epoch": 1})
    assert store.jobs.claim("two", now_s=19.0, lease_s=LEASE_S) is None
    second = _claim(store, "two", now_s=21.0)
    assert (second.digest, second.attempt, second.progress) == (digest, 2, {})
    assert not store.jobs.renew(first, until_s=100.0, progress={})
    assert not store.jobs.finish(first, Outcome(reason="late"))
    store.jobs.give_back(first)
    assert store.jobs.finish(second, Outcome(result={"metrics": {}}))
    assert not store.jobs.finish(second, Outcome(reason="twice"))
    assert _get(store, digest).outcome == Outcome(result={"metrics": {}})
    assert store.jobs.claim("one", now_s=1000.0, lease_s=LEASE_S) is None


def test_job_that_ends_its_workers_is_abandoned(store: Store) -> None:
    """A job that was given back does not count; a renewed one is not abandoned yet."""
    digest = _add(store)
    store.jobs.give_back(_claim(store, "zero"))
    now_s = 0.0
    for attempt in range(MAX_LOST_WORKERS + 1):
        assert not _claim(store, f"worker-{attempt}", now_s=now_s).is_abandoned
        now_s += LEASE_S + 1
    assert store.jobs.claim("last", now_s=now_s, lease_s=LEASE_S) is None
    assert _get(store, digest, now_s=now_s).is_abandoned


def test_cancelled_job_stops_at_its_renewal(store: Store) -> None:
    """Other tasks' jobs stay."""
    digest = _add(store, task=OTHER)
    claimed = _claim(store, "one")
    store.jobs.cancel(TASK)
    assert store.jobs.renew(claimed, until_s=20.0, progress={})
    store.jobs.cancel(OTHER)
    assert not store.jobs.renew(claimed, until_s=30.0, progress={})
    assert store.jobs.get(digest, now_s=0.0) is None


def test_blobs_are_needed_before_they_are_stored(store: Store) -> None:
    """As long as the job is there; digests and names that are none are refused."""
    digest = _add(store)
    claimed = _claim(store, "one")
    assert store.jobs.renew(claimed, until_s=20.0, progress={}, files={"head.onnx": "ab" * 32})
    assert store.jobs.blobs() == {bytes([0xAB] * 32)}
    for files in ('{"../head.onnx": "%s"}' % ("ab" * 32), '{"head.onnx": "../ab"}'):
        store.database.write("UPDATE jobs SET files = ?", files)
        with pytest.raises(StateError, match="damaged contents"):
            store.jobs.blobs()
    store.jobs.delete(digest)
    assert store.jobs.blobs() == set()
