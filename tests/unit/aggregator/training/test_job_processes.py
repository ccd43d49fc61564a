"""Jobs as processes: messages become events, and every end is reported."""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from msgspec import structs

from aggregator import job_processes
from aggregator.job_processes import JobEnded, JobEvent, JobProgress, JobRunner, Jobs
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.jobs import HeadJob, write_head
from aggregator.training.trainer import KILLED, Finished, Trainer, finished, start
from protocol.errors import StateError
from protocol.wire.messages import BlobRef, Submission
from tests.support.messages.jobs import head_job, workspace
from tests.support.messages.submissions import MANIFEST, submission

TIMEOUT_S = 300.0

PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
import msgspec
from aggregator.job_processes import JobOrder
from protocol.children import connect

pipe = connect(sys.argv[1:])
order = msgspec.msgpack.decode(pipe.recv_bytes(), type=JobOrder, dec_hook=lambda _, text: Path(text))

def say(**figures):
    pipe.send_bytes(msgspec.msgpack.encode(figures))

exec(Path(__file__).with_suffix(".txt").read_text())
"""
"""A job that does what a text says."""

Events = queue.SimpleQueue[Any]


def _job(folder: Path, *sent: Submission) -> HeadJob:
    return head_job(FolderBlobs(folder / "blobs"), *sent)


def _replace_program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (folder / "job_of_test.py").write_text(PROGRAM)
    (folder / "job_of_test.txt").write_text(text)
    monkeypatch.setattr(job_processes, "PROGRAM", "job_of_test")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))


def _started(folder: Path, *, timeout_s: float = TIMEOUT_S) -> tuple[JobRunner, Events]:
    events: Events = queue.SimpleQueue()
    runner = JobRunner(events.put)
    start(runner, _job(folder), folder / "training", blobs=str(folder / "blobs"), timeout_s=timeout_s)
    return runner, events


def _end(folder: Path, *, timeout_s: float = TIMEOUT_S) -> tuple[Finished, list[dict[str, Any]]]:
    _, events = _started(folder, timeout_s=timeout_s)
    figures = list[dict[str, Any]]()
    while isinstance(event := events.get(timeout=TIMEOUT_S), JobProgress):
        figures.append(event.figures)
    return finished(event), figures


def test_head_that_cannot_be_fused_is_written(tmp_path: Path) -> None:
    """The training does not fail for lack of a model.onnx."""
    blobs = FolderBlobs(tmp_path / "blobs")
    references = tuple(
        BlobRef(digest=blobs.put(data), size_bytes=len(data), name="broken") for data in (b"one", b"other")
    )
    place = workspace(blobs, tmp_path / "made")
    write_head(b"head", structs.replace(MANIFEST, backbones=references), place)
    assert [path.name for path in place.folder.iterdir()] == ["head.onnx"]


def test_stopped_job_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then another one can be started."""
    _replace_program(tmp_path, monkeypatch, "say(epoch=1); time.sleep(1000)")
    runner, events = _started(tmp_path)
    assert isinstance(events.get(timeout=TIMEOUT_S), JobProgress)
    folder = runner.folder
    assert folder == tmp_path / "training" / _job(tmp_path).name
    runner.stop()
    assert events.get(timeout=TIMEOUT_S) == JobEnded(folder, -9)
    assert _trainer(tmp_path, runner).ended() is None
    runner.stop()
    assert events.empty()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(order.folder / 'training.log').write_text('one\\noops\\n'); sys.exit(4)", "exit status 4: oops"),
        ("sys.exit(4)", "exit status 4: no error message"),
        ("import shutil; shutil.rmtree(order.folder.parent); sys.exit(4)", "exit status 4: no error message"),
        ("os.kill(os.getpid(), signal.SIGKILL)", KILLED),
    ],
    ids=["with a log", "without one", "folder vanishes", "killed"],
)
def test_failed_job_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    """The reason has the last line of its errors, or the usual cause."""
    _replace_program(tmp_path, monkeypatch, f"say(epoch=1); {text}")
    end, figures = _end(tmp_path)
    assert figures == [{"epoch": 1}]
    assert (end.result, end.is_killed) == (None, "SIGKILL" in reason)
    assert end.reason == reason


def test_errors_of_a_job_are_in_its_log(tmp_path: Path) -> None:
    """Its own program writes them there: a job whose blobs are in no folder ends with a sentence."""
    events: Events = queue.SimpleQueue()
    start(
        JobRunner(events.put), _job(tmp_path), tmp_path / "training", blobs="nothing://", timeout_s=TIMEOUT_S
    )
    end = finished(ended := events.get(timeout=TIMEOUT_S))
    assert end.reason.startswith("exit status 1: ")
    assert (ended.folder / "training.log").read_text().splitlines()[-1] == end.reason.partition(": ")[2]


def test_result_with_a_number_that_is_not_finite_is_a_failed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has none: it is null there."""
    text = '(order.folder / "result.json").write_text(\'{"type": "Result", "metrics": {"loss": null}}\')'
    _replace_program(tmp_path, monkeypatch, text)
    end, _ = _end(tmp_path)
    assert end.result is None
    assert end.reason.startswith("invalid result.json: Expected `float`, got `null`")


def test_job_is_ended_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children are ended, too."""
    text = 'other = subprocess.Popen(["sleep", "1000"]); Path(__file__).with_name("pid").write_text(str(other.pid))'
    _replace_program(tmp_path, monkeypatch, f"{text}; time.sleep(1000)")
    end, _ = _end(tmp_path, timeout_s=2.0)
    assert (end.result, end.is_killed) == (None, False)
    assert end.reason.startswith("not finished within `[training]` timeout_s, 2 s: raise it")
    if (file := tmp_path / "pid").exists():
        _wait_for_end(int(file.read_text()))


def _wait_for_end(process: int) -> None:
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    """No process is started."""
    (tmp_path / "training").write_text("a file")
    with pytest.raises(StateError, match="cannot use"):
        _started(tmp_path)


def test_process_that_cannot_be_started_is_a_failed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    end, _ = _end(tmp_path)
    assert end.reason == "cannot start a child process: No such file or directory"


def test_job_that_cannot_be_heard_is_killed_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the thread that hears it, such as a lack of memory, ends the job."""
    _replace_program(tmp_path, monkeypatch, "say(pid=os.getpid()); time.sleep(1000)")
    events: Events = queue.SimpleQueue()

    def take(event: JobEvent) -> None:
        events.put(event)
        if isinstance(event, JobProgress):
            raise MemoryError  # noqa: TRY004

    start(
        JobRunner(take),
        _job(tmp_path),
        tmp_path / "training",
        blobs=str(tmp_path / "blobs"),
        timeout_s=TIMEOUT_S,
    )
    process = events.get(timeout=TIMEOUT_S).figures["pid"]
    end = finished(events.get(timeout=TIMEOUT_S))
    assert end.reason.startswith("the thread child has ended unexpectedly: out of memory")
    _wait_for_end(process)


def test_job_without_a_thread_to_hear_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_program(tmp_path, monkeypatch, "time.sleep(1000)")
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        _, events = _started(tmp_path)
    assert finished(events.get_nowait()).reason.startswith("cannot start the thread child: ")
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "job_of_test" in process.cmdline():
                _wait_for_end(process.pid)


class Orders:
    """Takes orders; a job runs until a test ends it."""

    folder: Path | None = None
    ended: JobEnded | None = None

    def start(self, order: job_processes.JobOrder) -> None:
        self.folder = order.folder

    def stop(self) -> None:
        self.folder = None


def _trainer(folder: Path, jobs: Jobs) -> Trainer:
    return Trainer(
        folder / "training", jobs, blobs=str(folder / "blobs"), timeout_s=TIMEOUT_S, engine="local"
    )


def test_job_of_an_earlier_program_is_taken_over(tmp_path: Path) -> None:
    """If it runs or has ended, and is the job that would be started now."""
    jobs, job = Orders(), _job(tmp_path, submission())
    assert not _trainer(tmp_path, jobs).resume(job)
    _trainer(tmp_path, jobs).start(job)
    assert _trainer(tmp_path, jobs).resume(job)
    assert not _trainer(tmp_path, jobs).resume(structs.replace(job, has_novelty=True))
    folder, jobs.folder = jobs.folder, None
    assert folder is not None
    assert not _trainer(tmp_path, jobs).resume(job)
    jobs.ended = JobEnded(folder, -9)
    trainer = _trainer(tmp_path, jobs)
    assert trainer.resume(job)
    assert trainer.ended() == jobs.ended
    jobs.ended = None
    (folder / "result.json").write_text('{"type": "Result", "metrics": {"seconds": 1.0}}')
    trainer = _trainer(tmp_path, jobs)
    assert trainer.resume(job)
    assert trainer.ended() == JobEnded(folder)
    taken = trainer.take(JobEnded(folder))
    assert taken is not None
    assert taken[0] == job
    assert taken[1].result is not None
    assert trainer.take(JobEnded(folder)) is None


def test_job_ends_with_its_aggregator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed program leaves none that writes into the folder of a training."""
    _replace_program(tmp_path, monkeypatch, "say(pid=os.getpid()); time.sleep(1000)")
    code = f"""
import sys, time
from pathlib import Path
from aggregator import job_processes
job_processes.PROGRAM = "job_of_test"
runner = job_processes.JobRunner(lambda event: print(event.figures["pid"], flush=True))
runner.start(job_processes.JobOrder(Path({str(tmp_path)!r}), "", "local", 100.0))
time.sleep(1000)
"""
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    job = int(program.stdout.readline())
    program.kill()
    program.wait()
    program.stdout.close()
    _wait_for_end(job)
