"""Blobs that are missing or damaged in an object store are written again while the aggregator's copies are whole."""

import contextlib
import queue
import secrets
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from aggregator.cluster import object_blobs
from aggregator.cluster.object_blobs import ObjectBlobs
from aggregator.config.task_file import load_task
from aggregator.heads.schedule import Schedule
from aggregator.job_processes import JobEnded, JobEvent, JobRunner
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import LostFiles
from aggregator.tasks import restoration
from aggregator.tasks.restoration import Restoration
from aggregator.tasks.task_preparation import Task, prepare_task
from protocol.errors import BlobLost
from protocol.wire.codec import digest_of
from tests.support.messages.heads import add_head
from tests.support.simulation.submissions import submit
from tests.support.stores.object_store import BUCKET, ObjectStore


@pytest.fixture
def store(remote: ObjectStore, prepared: Path, tmp_path: Path) -> Iterator[Store]:
    del remote
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    location = f"s3://{BUCKET}/{secrets.token_hex(8)}"
    with contextlib.closing(open_store(tmp_path / "state", blobs=location)) as opened:
        yield opened


@pytest.fixture
def task(store: Store) -> Task:
    return prepare_task(*load_task(store.folder.parent / "task.toml"), store=store)


def _harm(remote: ObjectStore, store: Store, digest: bytes, *, fault: str) -> None:
    path = f"/{store.blobs.location.removeprefix('s3://')}/blobs/{digest.hex()}"
    if fault == "missing":
        remote.direct("DELETE", path)
    else:
        remote.direct("PUT", path, b"other contents")


def _shown(store: Store) -> set[str]:
    return set((store.facts.get(LostFiles) or LostFiles(())).digests)


@pytest.mark.parametrize("fault", ["missing", "wrong"])
@pytest.mark.parametrize("copies", [True, False])
def test_reported_blob_is_written_again(
    task: Task,
    store: Store,
    remote: ObjectStore,
    fault: str,
    *,
    copies: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the copy, or as at the start; what no program can make is shown as lost until it is back."""
    monkeypatch.setattr(restoration, "VERIFY_S", 0.0)
    monkeypatch.setattr(restoration, "POLL_S", 0.0)
    healer, reader = Restoration(task, store), ObjectBlobs(store.blobs.location)
    digests = [task.digest, *sorted(task.blobs - {task.manifest.program.step.digest})]  # type: ignore[union-attr]
    healer.verify_all(digests)
    head = store.blobs.put(b"a head")
    add_head(store, 1, task=task.digest, digest=head)
    for digest in (*digests, head):
        if not copies:
            store.blobs.path(digest).unlink(missing_ok=True)
        _harm(remote, store, digest, fault=fault)
        with pytest.raises(BlobLost):
            reader.read(digest)
        store.report_lost(digest)
    healer.tick()
    assert all(reader.is_whole(digest) for digest in digests)
    assert _shown(store) == {head.hex()}
    reader.put(b"a head")
    healer.tick()
    assert _shown(store) == set()


def test_deleted_blob_that_nothing_needs_is_not_lost(task: Task, store: Store) -> None:
    """A device may have requested a head before another one replaced it."""
    healer, head = Restoration(task, store), digest_of(b"an old head")
    with pytest.raises(BlobLost):
        healer.verify([head])
    assert _shown(store) == set()
    store.report_lost(head)
    healer.tick()
    assert _shown(store) == set()


def test_failing_object_store_is_not_the_end_of_the_restoration(
    task: Task, store: Store, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No StateError, which would stop the intake; the blob is shown as lost, and restored once the store answers."""
    monkeypatch.setattr(restoration, "VERIFY_S", 0.0)
    monkeypatch.setattr(restoration, "POLL_S", 0.0)
    healer = Restoration(task, store)
    _harm(remote, store, task.digest, fault="missing")
    store.report_lost(task.digest)
    remote.status = 503
    healer.tick()
    assert _shown(store) == {task.digest.hex()}
    remote.heal()
    healer.tick()
    assert _shown(store) == set()
    assert store.blobs.is_whole(task.digest)


def test_pause_between_exports_that_restore_nothing_doubles_up_to_a_limit(
    task: Task, store: Store, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export takes the event loop; whether the blob is back is still examined each minute."""
    now_s, exports_s = 1000.0, list[float]()
    monkeypatch.setattr(object_blobs, "READS_S", (0.0, 0.0))
    monkeypatch.setattr(restoration, "MAX_EXPORT_PAUSE_S", 240.0)
    monkeypatch.setattr(restoration, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(restoration, "prepare_task", lambda *_, **__: exports_s.append(now_s))
    healer = Restoration(task, store)
    manifest = store.blobs.read(task.digest)
    store.blobs.path(task.digest).unlink(missing_ok=True)
    _harm(remote, store, task.digest, fault="missing")
    store.report_lost(task.digest)
    for now_s in range(1000, 1900, 60):  # noqa: B007 - the clock's
        healer.tick()
    assert [later - sooner for sooner, later in pairwise(exports_s)] == [60, 120, 240, 240]
    ObjectBlobs(store.blobs.location).put(manifest)
    now_s += 60
    healer.tick()
    assert _shown(store) == set()


def test_training_whose_task_is_missing_succeeds_the_next_time(
    task: Task, store: Store, remote: ObjectStore
) -> None:
    """The program that trains reads the object store, in which the manifest is missing."""
    events: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
    training = Schedule(task, store, JobRunner(events.put))
    training.restoration.verify_all([task.digest])
    _harm(remote, store, task.digest, fault="missing")
    for number, devices in enumerate(("ab", "c")):
        for device in devices:
            submit(training, device)
        training.tick()
        finished = events.get(timeout=300.0)
        assert isinstance(finished, JobEnded)
        assert training.finish(finished) == bool(number), training.plan
    assert len(store.heads.all(task.digest)) == 1


def test_wrong_answers_that_pass_are_no_lost_blob(store: Store, remote: ObjectStore) -> None:
    """Two equal ones, after which the object is neither moved nor reported."""
    digest = store.blobs.put(b"contents")
    remote.change, remote.only, remote.left = lambda _: b"other page", "GET", 2
    assert ObjectBlobs(store.blobs.location).read(digest) == b"contents"
    assert remote.harmed == 2
