"""Blobs that are missing or damaged in an object store are written again while the aggregator's copies are whole."""

import contextlib
import queue
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aggregator.cluster.object_blobs import ObjectBlobs
from aggregator.config.task_file import load_task
from aggregator.heads.schedule import Schedule
from aggregator.job_processes import JobEnded, JobEvent, JobRunner
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import LostFiles
from aggregator.tasks.restoration import (
    VERIFY_S,
    Verified,
    VerifiedFiles,
    heal,
    note_whole,
    report_damage,
)
from aggregator.tasks.task_preparation import Task, prepare_task
from protocol.errors import BlobLost, StateError
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


@pytest.mark.parametrize(("fault", "copies"), [("missing", True), ("wrong", False)])
def test_damaged_blob_is_written_again_at_the_start(
    task: Task, store: Store, remote: ObjectStore, fault: str, *, copies: bool
) -> None:
    """From the copy, or as the start makes it; what no program can make is shown as lost until it is back."""
    reader = ObjectBlobs(store.blobs.location)
    digests = [task.digest, *sorted(task.blobs - {task.manifest.program.step.digest})]  # type: ignore[union-attr]
    heal(task, store, digests)
    head = store.blobs.put(b"a head")
    add_head(store, 1, task=task.digest, digest=head)
    for digest in (*digests, head):
        if not copies:
            store.blobs.path(digest).unlink(missing_ok=True)
        _harm(remote, store, digest, fault=fault)
        with pytest.raises(BlobLost):
            reader.read(digest)
    heal(task, store, [*digests, head])
    assert all(reader.is_whole(digest) for digest in digests)
    assert _shown(store) == {head.hex()}
    reader.put(b"a head")
    heal(task, store, digests)
    assert _shown(store) == set()


def test_damage_ends_the_program_once(task: Task, store: Store) -> None:
    """A file that is known as lost does not, nor one that nothing needs: a head that was replaced."""
    report_damage(task, store, BlobLost(digest_of(b"an old head"), "missing"))
    assert _shown(store) == set()
    with pytest.raises(StateError, match="missing: the next start writes it again, if it can"):
        report_damage(task, store, BlobLost(task.digest, "missing"))
    assert _shown(store) == {task.digest.hex()}
    report_damage(task, store, BlobLost(task.digest, "missing"))
    note_whole(store, task.digest)
    assert _shown(store) == set()


def test_lost_file_that_nothing_needs_any_more_is_not_shown(task: Task, store: Store) -> None:
    """Such as a head that others have replaced since."""
    store.facts.put(LostFiles((digest_of(b"an old head").hex(),)))
    heal(task, store, [])
    assert _shown(store) == set()


def test_failing_object_store_is_no_lost_blob(task: Task, store: Store, remote: ObjectStore) -> None:
    """The start fails, and is repeated."""
    _harm(remote, store, task.digest, fault="missing")
    remote.status = 503
    with pytest.raises(StateError):
        heal(task, store, [task.digest])
    remote.heal()
    heal(task, store, [task.digest])
    assert _shown(store) == set()
    assert store.blobs.is_whole(task.digest)


def test_training_whose_task_is_missing_names_it(task: Task, store: Store, remote: ObjectStore) -> None:
    """The program that trains reads the object store, in which the manifest is missing."""
    events: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
    training = Schedule(task, store, JobRunner(events.put))
    heal(task, store, [task.digest])
    _harm(remote, store, task.digest, fault="missing")
    for device in "ab":
        submit(training, device)
    training.tick()
    ended = events.get(timeout=300.0)
    assert isinstance(ended, JobEnded)
    with pytest.raises(StateError, match="the next start writes it again"):
        training.finish(ended)
    assert _shown(store) == {task.digest.hex()}
    heal(task, store, [])
    training = Schedule(task, store, JobRunner(events.put))
    training.tick()
    ended = events.get(timeout=300.0)
    assert isinstance(ended, JobEnded)
    assert training.finish(ended), training.plan


def test_a_file_counts_as_verified_for_a_minute(
    task: Task, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read once, however often it is asked for meanwhile, and again later; damage is reported."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    files = VerifiedFiles(store.blobs, events.put)
    assert not files.is_verified(task.digest)
    assert not files.is_verified(task.digest)
    verified = events.get(timeout=300.0)
    assert verified == Verified(task.digest)
    files.take(verified)
    assert files.is_verified(task.digest)
    later_s = time.monotonic() + VERIFY_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    store.blobs.path(task.digest).write_bytes(b"damaged")
    lost = digest_of(b"an old head")
    for digest in (task.digest, lost):
        assert not files.is_verified(digest)
        files.take(verified := events.get(timeout=300.0))
        assert (verified.digest, verified.problem is None) == (digest, digest == task.digest)
    assert not files.is_verified(lost)
    assert events.get(timeout=300.0).digest == lost
    assert events.empty()


def test_wrong_answers_that_pass_are_no_lost_blob(store: Store, remote: ObjectStore) -> None:
    """Two equal ones, after which the object is neither moved nor reported."""
    digest = store.blobs.put(b"contents")
    remote.change, remote.only, remote.left = lambda _: b"other page", "GET", 2
    assert ObjectBlobs(store.blobs.location).read(digest) == b"contents"
    assert remote.harmed == 2
