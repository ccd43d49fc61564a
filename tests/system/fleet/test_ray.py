"""Jobs on a Ray cluster of several machines, all of them here."""

import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from aggregator.algorithms.algorithm import Training
from aggregator.config.task_file import load_task
from aggregator.job_processes import JobEnded, JobRunner
from aggregator.storage.blobs import FolderBlobs
from aggregator.storage.open_store import open_store
from aggregator.tasks.task_preparation import prepare_task
from aggregator.training import statistics_job as statistics
from aggregator.training.execution import execute
from aggregator.training.jobs import BlobJob, Result, RoundJob, StatisticsJob, Workspace
from aggregator.training.trainer import finished, start
from protocol.errors import BlobLost, ProtofleetError
from protocol.storage.folder_lock import FolderLock
from protocol.wire.codec import encode
from tests.support.fleets.aggregator_process import IN_ROUNDS, write_task
from tests.support.graphs.exported_graphs import provide
from tests.support.messages.jobs import head_job, statistics_job, workspace
from tests.support.messages.statistics import GROUPS_EXPECTATION, groups_of, images
from tests.support.messages.submissions import round_submission, submission
from tests.support.ray_cluster import machines

pytest.importorskip("ray", reason="needs ray")

from aggregator.cluster import ray_driver

TIMEOUT_S = 280.0

pytestmark = pytest.mark.timeout(600)

Events = queue.SimpleQueue[Any]


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """The folder of temporary files of a running cluster of two machines."""
    with machines(2) as scratch:
        yield scratch


@pytest.fixture
def blobs(tmp_path: Path) -> FolderBlobs:
    return FolderBlobs(tmp_path / "blobs", damaged=tmp_path / "damaged")


def sums_job(blobs: FolderBlobs) -> StatisticsJob:
    parts = {str(device): groups_of(*images(device, 40)) for device in range(6)}
    return statistics_job(blobs, parts, GROUPS_EXPECTATION)


def training_job(blobs: FolderBlobs, *, epochs: int) -> BlobJob:
    sent = [submission(labels=(0, 1, 2) * 10, seed=seed) for seed in range(3)]
    return head_job(blobs, *sent, training=Training(device="cpu", recipe="paper", epochs=epochs))


def round_job(folder: Path) -> tuple[BlobJob, FolderBlobs]:
    folder.mkdir()
    provide(task_file := write_task(folder, IN_ROUNDS), folder / "state")
    store = open_store(folder / "state")
    task = prepare_task(*load_task(task_file), store=store)
    store.close()
    blobs, shapes = FolderBlobs(folder / "state" / "blobs"), task.expectation.tensors
    sent = {device: round_submission(task=task.digest, number=1, shapes=shapes) for device in "ab"}
    assert task.first_tensors is not None
    job = RoundJob(
        version=2,
        task=task.digest.hex(),
        algorithm=task.file.algorithm,
        settings=msgspec.to_builtins(task.file.method),
        robust=task.file.robust,
        members={device: blobs.put(encode(each)).hex() for device, each in sent.items()},
        tensors=task.first_tensors.digest.hex(),
        feature_size=task.feature_size,
    )
    return job, blobs


def until_end(events: Events) -> list[Any]:
    """Return the events that are left of a job, of which the last one is its end."""
    found: list[Any] = []
    while not found or not isinstance(found[-1], JobEnded):
        found.append(events.get(timeout=TIMEOUT_S))
    return found


def driver() -> psutil.Process:
    """Return the process of the job, which this process has started."""
    running = (each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE)
    return next(each for each in running if "aggregator.training.job_program" in each.cmdline())


def files_of(folder: Path, job: BlobJob) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in job.files if (folder / name).exists()}


def started(job: BlobJob, blobs: FolderBlobs, folder: Path) -> tuple[JobRunner, Events]:
    """Start a job as the aggregator does; its process inherits RAY_ADDRESS."""
    events: Events = queue.SimpleQueue()
    runner = JobRunner(events.put)
    start(runner, job, folder, blobs=blobs.location, timeout_s=TIMEOUT_S, engine="ray")
    return runner, events


def test_files_have_the_same_bytes_as_without_a_cluster(
    scratch: Path, blobs: FolderBlobs, tmp_path: Path
) -> None:
    """Of a training with PyTorch, of sums and of a round, after the same progress."""
    for name, (job, of) in {
        "training": (training_job(blobs, epochs=2), blobs),
        "sums": (sums_job(blobs), blobs),
        "round": round_job(tmp_path / "rounds"),
    }.items():
        figures: list[dict[str, float | str]] = []
        (here := tmp_path / name).mkdir()
        expected = execute(job, Workspace(of, here, figures.append))
        _, events = started(job, of, tmp_path / "jobs")
        *progress, ended = until_end(events)
        end = finished(ended)
        assert end.result is not None, end.reason
        assert [each.figures for each in progress] == figures
        assert files_of(tmp_path / "jobs" / job.name, job) == files_of(here, job)
        assert end.result.prototypes == expected.prototypes
    assert list(scratch.iterdir()) == []


class FatalJob(StatisticsJob, frozen=True, kw_only=True, dict=True, tag="fatal"):
    """The first time, it kills its machine."""

    module = __name__
    marker: str


def run(job: FatalJob, place: Workspace) -> Result:
    if not Path(job.marker).exists():
        Path(job.marker).touch()
        for process in (os.getppid(), os.getpid()):  # Ray's own process of a machine, and the worker
            os.kill(process, signal.SIGKILL)
    return statistics.run(job, place)


def test_killed_machine_costs_only_time(scratch: Path, blobs: FolderBlobs, tmp_path: Path) -> None:
    """The job is repeated on another one."""
    job = sums_job(blobs)
    execute(job, expected := workspace(blobs, tmp_path / "expected"))
    fields = {name: getattr(job, name) for name in job.__struct_fields__}
    fatal = FatalJob(**fields, marker=str(tmp_path / "killed"))
    ray_driver.execute(fatal, made := workspace(blobs, tmp_path / "made"))
    assert (tmp_path / "killed").exists()
    assert files_of(made.folder, job) == files_of(expected.folder, job)


def test_cancelled_job_ends_its_worker(scratch: Path, blobs: FolderBlobs, tmp_path: Path) -> None:
    """So does a killed driver, as at the time limit; the next job deletes what the worker has left."""
    for is_killed in (False, True):
        runner, events = started(training_job(blobs, epochs=100_000), blobs, tmp_path / "training")
        try:
            while "epoch" not in events.get(timeout=TIMEOUT_S).figures:
                pass
            (folder,) = (each for each in scratch.iterdir() if FolderLock(each).is_taken())
            if is_killed:
                driver().kill()
        finally:
            runner.stop()
        assert finished(until_end(events)[-1]).result is None
        deadline_s = time.monotonic() + TIMEOUT_S
        while FolderLock(folder).is_taken():
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    ray_driver.execute(sums_job(blobs), workspace(blobs, tmp_path / "next"))
    assert list(scratch.iterdir()) == []


def test_errors_are_those_of_the_job(
    scratch: Path, blobs: FolderBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged submission, too few GPUs, and a worker of another version."""
    job, place = sums_job(blobs), workspace(blobs, tmp_path / "made")
    blobs.path(bytes.fromhex(job.members["3"])).write_bytes(b"damaged")
    with pytest.raises(BlobLost, match=f"has been moved to {tmp_path / 'damaged'}"):
        ray_driver.execute(job, place)
    with pytest.raises(ProtofleetError, match=r"no machine of the Ray cluster has .* and 1 GPUs"):
        ray_driver.execute(head_job(blobs, training=Training(gpus=1)), place)
    monkeypatch.setattr(ray_driver, "__version__", "0.0.0")
    with pytest.raises(ProtofleetError, match=r"a Ray worker has protofleet .*, expected 0\.0\.0: install"):
        ray_driver.execute(job, place)
