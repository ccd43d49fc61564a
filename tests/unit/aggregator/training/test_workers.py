"""Jobs between the aggregator's side of the queue and a worker, with real training processes."""

import queue
from pathlib import Path
from typing import NoReturn

import pytest
from msgspec import structs

from aggregator.algorithms.algorithm import Training
from aggregator.storage.store import Store
from aggregator.training.jobs import HeadJob
from aggregator.training.runner import Finished, Progress, Trainer
from aggregator.training.workers.queue_trainer import QueueTrainer
from aggregator.training.workers.worker import Worker, scratch_folder
from protocol.errors import StateError
from protocol.storage.folder_lock import FolderLock
from tests.support.messages.jobs import head_job
from tests.support.messages.submissions import submission

Events = queue.SimpleQueue[Progress | Finished]

TIMEOUT_S = 300.0


def _job(store: Store) -> HeadJob:
    training = Training(device="cpu", recipe="paper", epochs=2)
    return head_job(store.blobs, store.folder / "training" / "head-1", submission(), training=training)


def _trainer(store: Store) -> tuple[QueueTrainer, Events]:
    events: Events = queue.SimpleQueue()
    return QueueTrainer(store, timeout_s=TIMEOUT_S, on_event=events.put), events


def _end(events: Events) -> Finished:
    while not isinstance(event := events.get(timeout=TIMEOUT_S), Finished):
        pass
    return event


def _worker(store: Store) -> Worker:
    (folder := store.folder / "workers" / "one").mkdir(parents=True, exist_ok=True)
    return Worker(store, folder, name="one", lease_s=30.0)


def test_result_of_a_worker_reaches_a_restarted_aggregator(store: Store) -> None:
    """The files are in the job's folder; until the job is deleted, their blobs are needed."""
    job = _job(store)
    before, _ = _trainer(store)
    before.start(job)
    before.stop()
    worker = _worker(store)
    assert worker.run_next()
    assert not worker.run_next()
    after, events = _trainer(store)
    after.start(job)
    finished = _end(events)
    assert finished.result is not None
    head = (Path(job.folder) / "head.onnx").read_bytes()
    assert {store.blobs.put(head)} == store.jobs.blobs()
    local: Events = queue.SimpleQueue()
    folder = store.folder / "local"
    Trainer(folder, timeout_s=TIMEOUT_S, on_event=local.put).start(
        structs.replace(job, folder=str(folder / "head-1"))
    )
    assert _end(local).result is not None
    assert (folder / "head-1" / "head.onnx").read_bytes() == head


def test_failed_job_is_reported_and_queued_again(store: Store) -> None:
    """With the training's own reason; a result whose file is lost has failed as well."""
    job = _job(store)
    trainer, events = _trainer(store)
    lost = structs.replace(job, members={"dev0": "00" * 32})
    trainer.start(lost)
    assert _worker(store).run_next()
    finished = _end(events)
    assert finished.result is None
    assert finished.reason.startswith("exit status 1: cannot use ")
    assert not finished.is_killed
    trainer.start(job)
    assert _worker(store).run_next()
    trainer.stop()
    store.blobs.delete(store.jobs.blobs())
    trainer, events = _trainer(store)
    trainer.start(job)
    assert "its files cannot be used" in _end(events).reason
    trainer.start(job)
    assert _worker(store).run_next()
    assert _end(events).result is not None


def test_stopped_worker_gives_its_job_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM is an exception in the worker; another worker claims the job at once."""

    def terminated(*_: object) -> NoReturn:
        raise SystemExit(0)

    trainer, events = _trainer(store)
    trainer.start(_job(store))
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "start", terminated)
        with pytest.raises(SystemExit):
            _worker(store).run_next()
    assert _worker(store).run_next()
    assert _end(events).result is not None


def test_job_that_fails_while_the_object_store_does_is_given_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker may reach it; four failures of the training would make a head with half the memory."""

    def unreachable() -> NoReturn:
        raise StateError("cannot use the object store")

    job = _job(store)
    trainer, events = _trainer(store)
    trainer.start(structs.replace(job, members={"dev0": "00" * 32}))
    with monkeypatch.context() as failure:
        failure.setattr(store.blobs, "check_writable", unreachable)
        with pytest.raises(StateError, match="object store"):
            _worker(store).run_next()
    assert events.empty()
    assert _worker(store).run_next()
    assert _end(events).reason.startswith("exit status 1: cannot use ")


def test_cancelled_job_is_not_run(store: Store) -> None:
    """No event follows a cancellation."""
    job = _job(store)
    trainer, events = _trainer(store)
    trainer.start(job)
    trainer.cancel(bytes.fromhex(job.task))
    assert not _worker(store).run_next()
    assert events.empty()


def test_scratch_folders_of_killed_workers_are_deleted(tmp_path: Path) -> None:
    """Those of running workers stay, whose names are taken."""
    (tmp_path / "workers" / "killed").mkdir(parents=True)
    FolderLock(tmp_path / "workers", "killed.lock").take()
    (tmp_path / "workers" / "killed.lock").touch()
    with scratch_folder(tmp_path, "one") as one:
        with pytest.raises(StateError, match="give another --name"), scratch_folder(tmp_path, "one"):
            pass
        with scratch_folder(tmp_path, "two"):
            assert one.is_dir()
            assert not (tmp_path / "workers" / "killed").exists()
    assert not one.exists()
