"""The table of training jobs: one worker at a time, whose lease ends with it, and one result for each job."""

import pytest

from aggregator.storage.programs import MAX_LOST_WORKERS, Outcome
from aggregator.storage.store import Store
from protocol.errors import StateError

TASK, OTHER = bytes(32), bytes([1] * 32)
LEASE_S = 10.0


def _add(store: Store, *, task: bytes = TASK, digest: bytes = b"a") -> bytes:
    store.jobs.add(task, kind="head", job="{}", digest=digest, timeout_s=60.0, now_s=0.0)
    return digest


def test_equal_job_is_kept_and_another_replaces_it(store: Store) -> None:
    """A restarted aggregator finds the job that it has queued; of a changed collection there is a new one."""
    digest = _add(store)
    assert store.jobs.claim("one", now_s=0.0, lease_s=LEASE_S) is not None
    _add(store)
    kept = store.jobs.get(digest, now_s=0.0)
    assert kept is not None
    assert (kept.worker, kept.attempt) == ("one", 1)
    _add(store, digest=b"b")
    waiting = store.jobs.claim("two", now_s=0.0, lease_s=LEASE_S)
    assert waiting is not None
    assert (waiting.worker, waiting.attempt) == ("two", 1)
    assert not store.jobs.finish(kept, Outcome(reason="of the job that was replaced"))
    assert store.jobs.claim("three", now_s=0.0, lease_s=LEASE_S) is None


def test_job_has_one_worker_until_its_lease_is_over(store: Store) -> None:
    """Renewing extends the lease; the worker that had it before can neither renew nor finish."""
    digest = _add(store)
    first = store.jobs.claim("one", now_s=0.0, lease_s=LEASE_S)
    assert first is not None
    assert store.jobs.claim("two", now_s=9.0, lease_s=LEASE_S) is None
    assert store.jobs.renew(first, until_s=20.0, progress={"epoch": 1})
    assert store.jobs.claim("two", now_s=19.0, lease_s=LEASE_S) is None
    second = store.jobs.claim("two", now_s=21.0, lease_s=LEASE_S)
    assert second is not None
    assert (second.digest, second.attempt, second.progress) == (digest, 2, {})
    assert not store.jobs.renew(first, until_s=100.0, progress={})
    assert not store.jobs.finish(first, Outcome(reason="late"))
    store.jobs.give_back(first)
    assert store.jobs.finish(second, Outcome(result={"metrics": {}}))
    assert not store.jobs.finish(second, Outcome(reason="twice"))
    ended = store.jobs.get(digest, now_s=0.0)
    assert ended is not None
    assert ended.outcome == Outcome(result={"metrics": {}})
    assert store.jobs.claim("one", now_s=1000.0, lease_s=LEASE_S) is None


def test_job_that_ends_its_workers_is_abandoned(store: Store) -> None:
    """A job that was given back does not count; a renewed one is not abandoned yet."""
    digest = _add(store)
    given = store.jobs.claim("zero", now_s=0.0, lease_s=LEASE_S)
    assert given is not None
    store.jobs.give_back(given)
    now_s = 0.0
    for attempt in range(MAX_LOST_WORKERS + 1):
        claimed = store.jobs.claim(f"worker-{attempt}", now_s=now_s, lease_s=LEASE_S)
        assert claimed is not None
        assert not claimed.is_abandoned
        now_s += LEASE_S + 1
    assert store.jobs.claim("last", now_s=now_s, lease_s=LEASE_S) is None
    abandoned = store.jobs.get(digest, now_s=now_s)
    assert abandoned is not None
    assert abandoned.is_abandoned


def test_cancelled_job_stops_at_its_renewal(store: Store) -> None:
    """Other tasks' jobs stay."""
    digest = _add(store, task=OTHER)
    claimed = store.jobs.claim("one", now_s=0.0, lease_s=LEASE_S)
    assert claimed is not None
    store.jobs.cancel(TASK)
    assert store.jobs.renew(claimed, until_s=20.0, progress={})
    store.jobs.cancel(OTHER)
    assert not store.jobs.renew(claimed, until_s=30.0, progress={})
    assert store.jobs.get(digest, now_s=0.0) is None


def test_blobs_are_needed_before_they_are_stored(store: Store) -> None:
    """As long as the job is there; digests and names that are none are refused."""
    digest = _add(store)
    claimed = store.jobs.claim("one", now_s=0.0, lease_s=LEASE_S)
    assert claimed is not None
    assert store.jobs.renew(claimed, until_s=20.0, progress={}, files={"head.onnx": "ab" * 32})
    assert store.jobs.blobs() == {bytes([0xAB] * 32)}
    for files in ('{"../head.onnx": "%s"}' % ("ab" * 32), '{"head.onnx": "../ab"}'):
        store.database.write("UPDATE jobs SET files = ?", files)
        with pytest.raises(StateError, match="damaged contents"):
            store.jobs.blobs()
    store.jobs.delete(digest)
    assert store.jobs.blobs() == set()
