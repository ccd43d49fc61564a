"""Trainings as processes, of the aggregator and of workers: output becomes events, and every end is reported."""

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
from msgspec import structs

from aggregator.algorithms.algorithm import Training
from aggregator.storage.blobs import FolderBlobs
from aggregator.storage.store import Store
from aggregator.training.jobs import HeadJob
from aggregator.training.runner import KILLED, Finished, Progress, Trainer
from aggregator.training.workers.queue_trainer import QueueTrainer
from aggregator.training.workers.worker import Worker, scratch_folder
from protocol.errors import StateError, ThreadFailed
from protocol.storage.folder_lock import FolderLock
from protocol.wire.messages import BlobRef, Submission
from tests.support.messages.jobs import head_job
from tests.support.messages.submissions import MANIFEST, submission

TIMEOUT_S = 300.0


def _job(folder: Path, *sent: Submission, **changes: Any) -> HeadJob:
    return head_job(FolderBlobs(folder / "blobs"), folder / "training" / "head-1", *sent, **changes)


def _trainer(
    folder: Path, on_event: Callable[[Progress | Finished], None], *, timeout_s: float = TIMEOUT_S
) -> Trainer:
    return Trainer(folder / "training", timeout_s=timeout_s, on_event=on_event)


def _end(job: HeadJob, folder: Path, *, timeout_s: float = TIMEOUT_S) -> tuple[Finished, list[Progress]]:
    events: queue.SimpleQueue[Progress | Finished] = queue.SimpleQueue()
    _trainer(folder, events.put, timeout_s=timeout_s).start(job)
    said: list[Progress] = []
    while not isinstance(event := events.get(timeout=TIMEOUT_S), Finished):
        said.append(event)
    return event, said


def test_head_that_cannot_be_fused_is_written(tmp_path: Path) -> None:
    """The training does not fail for lack of a model.onnx."""
    job, blobs = _job(tmp_path), FolderBlobs(tmp_path / "blobs")
    references = tuple(
        BlobRef(digest=blobs.put(data), size_bytes=len(data), name="broken") for data in (b"one", b"other")
    )
    Path(job.folder).mkdir(parents=True)
    job.write_head(b"head", structs.replace(MANIFEST, backbones=references))
    assert [path.name for path in Path(job.folder).iterdir()] == ["head.onnx"]


def test_stopped_process_is_a_failed_job(tmp_path: Path) -> None:
    """Stopping waits for its end."""
    events: queue.SimpleQueue[Progress | Finished] = queue.SimpleQueue()
    trainer = _trainer(tmp_path, events.put)
    trainer.stop()
    trainer.start(_job(tmp_path, submission()))
    trainer.stop()
    finished = events.get(timeout=TIMEOUT_S)
    assert isinstance(finished, Finished)
    assert finished.reason.startswith("exit status -15")


def _replace_python(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, *, mode: int = 0o755) -> None:
    program = folder / "program"
    program.write_text(script)
    program.chmod(mode)
    monkeypatch.setattr(sys, "executable", str(program))


FIGURES = "echo '{\"epoch\": 1}'"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f'echo hello; echo 3; echo "[1]"; {FIGURES}; echo oops >&2; exit 4', "exit status 4: oops"),
        (f"{FIGURES}; rm -r training; exit 4", "exit status 4: no error message"),
        (f"printf '\\377\\n'; {FIGURES}; exit 4", "exit status 4: no error message"),
        (f"{FIGURES}; kill -9 $$", KILLED),
    ],
    ids=["other output", "folder vanishes", "output that is not UTF-8", "killed"],
)
def test_failed_job_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    """The reason has the last line of its errors, or the usual cause; output without figures is ignored."""
    _replace_python(tmp_path, monkeypatch, f"#!/bin/sh\ncd {tmp_path}; {script}\n")
    finished, said = _end(_job(tmp_path), tmp_path)
    assert said == [Progress({"epoch": 1})]
    assert (finished.result, finished.is_killed) == (None, "SIGKILL" in reason)
    assert finished.reason == reason


def test_result_with_a_number_that_is_not_finite_is_a_failed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has none: it is null there."""
    result = tmp_path / "training" / "head-1" / "result.json"
    _replace_python(
        tmp_path, monkeypatch, f'#!/bin/sh\necho \'{{"metrics": {{"loss": null}}}}\' > {result}\n'
    )
    finished, _ = _end(_job(tmp_path), tmp_path)
    assert finished.result is None
    assert finished.reason.startswith("invalid result.json: Expected `float`, got `null`")


def test_job_is_ended_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children, which keep its output open, are ended too."""
    _replace_python(tmp_path, monkeypatch, "#!/bin/sh\nsleep 1000 & sleep 1000\n")
    finished, _ = _end(_job(tmp_path), tmp_path, timeout_s=0.1)
    assert (finished.result, finished.is_killed) == (None, False)
    assert finished.reason.startswith("not finished within `[training]` timeout_s, 0.1 s: raise it")


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    """No process is started."""
    (tmp_path / "training").write_text("a file")
    with pytest.raises(StateError, match="cannot use"):
        _trainer(tmp_path, lambda _: None).start(_job(tmp_path))


def test_process_that_cannot_be_started_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_python(tmp_path, monkeypatch, "no program", mode=0o644)
    with pytest.raises(StateError, match="Permission denied"):
        _trainer(tmp_path, lambda _: None).start(_job(tmp_path))


def test_job_that_cannot_be_watched_is_killed_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the watching thread, such as a lack of memory, ends the job."""
    _replace_python(tmp_path, monkeypatch, "#!/bin/sh\necho '{\"epoch\": 1}'; exec sleep 1000\n")
    events: queue.SimpleQueue[Progress | Finished] = queue.SimpleQueue()

    def take(event: Progress | Finished) -> None:
        if isinstance(event, Progress):
            raise MemoryError  # noqa: TRY004
        events.put(event)

    trainer = _trainer(tmp_path, take)
    trainer.start(_job(tmp_path))
    finished = events.get(timeout=TIMEOUT_S)
    assert isinstance(finished, Finished)
    assert finished.result is None
    assert finished.reason.startswith("the thread job has ended unexpectedly: out of memory")
    assert trainer._process is not None
    assert trainer._process.wait(TIMEOUT_S) == -9


def test_job_without_a_thread_to_watch_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program ends, and its next start runs the job again."""
    _replace_python(tmp_path, monkeypatch, "#!/bin/sh\nexec sleep 1000\n")
    trainer = _trainer(tmp_path, lambda _: None)
    no_thread = patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with no_thread, pytest.raises(ThreadFailed):
        trainer.start(_job(tmp_path))
    assert trainer._process is not None
    assert trainer._process.wait(TIMEOUT_S) == -9


Events = queue.SimpleQueue[Progress | Finished]


def _queued_job(store: Store) -> HeadJob:
    training = Training(device="cpu", recipe="paper", epochs=2)
    return head_job(store.blobs, store.folder / "training" / "head-1", submission(), training=training)


def _queue_trainer(store: Store) -> tuple[QueueTrainer, Events]:
    events: Events = queue.SimpleQueue()
    return QueueTrainer(store, timeout_s=TIMEOUT_S, on_event=events.put), events


def _result(events: Events) -> Finished:
    while not isinstance(event := events.get(timeout=TIMEOUT_S), Finished):
        pass
    return event


def _worker(store: Store) -> Worker:
    (folder := store.folder / "workers" / "one").mkdir(parents=True, exist_ok=True)
    return Worker(store, folder, name="one", lease_s=30.0)


def test_failed_job_is_reported_and_queued_again(store: Store) -> None:
    """With the training's own reason; a result whose file is lost has failed as well."""
    job = _queued_job(store)
    trainer, events = _queue_trainer(store)
    lost = structs.replace(job, members={"dev0": "00" * 32})
    trainer.start(lost)
    assert _worker(store).run_next()
    finished = _result(events)
    assert finished.result is None
    assert finished.reason.startswith("exit status 1: cannot use ")
    assert not finished.is_killed
    trainer.start(job)
    assert _worker(store).run_next()
    trainer.stop()
    store.blobs.delete(store.jobs.blobs())
    trainer, events = _queue_trainer(store)
    trainer.start(job)
    assert "its files cannot be used" in _result(events).reason
    trainer.start(job)
    assert _worker(store).run_next()
    assert _result(events).result is not None


def test_stopped_worker_gives_its_job_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM is an exception in the worker; another worker claims the job at once."""

    def terminated(*_: object) -> NoReturn:
        raise SystemExit(0)

    trainer, events = _queue_trainer(store)
    trainer.start(_queued_job(store))
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "start", terminated)
        with pytest.raises(SystemExit):
            _worker(store).run_next()
    assert _worker(store).run_next()
    assert _result(events).result is not None


def test_job_that_fails_while_the_object_store_does_is_given_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker may reach it; four failures of the training would make a head with half the memory."""

    def unreachable() -> NoReturn:
        raise StateError("cannot use the object store")

    job = _queued_job(store)
    trainer, events = _queue_trainer(store)
    trainer.start(structs.replace(job, members={"dev0": "00" * 32}))
    with monkeypatch.context() as failure:
        failure.setattr(store.blobs, "check_writable", unreachable)
        with pytest.raises(StateError, match="object store"):
            _worker(store).run_next()
    assert events.empty()
    assert _worker(store).run_next()
    assert _result(events).reason.startswith("exit status 1: cannot use ")


def test_cancelled_job_is_not_run(store: Store) -> None:
    """No event follows a cancellation."""
    job = _queued_job(store)
    trainer, events = _queue_trainer(store)
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
