"""Jobs as processes: output becomes events, and every end is reported."""

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from msgspec import structs

from aggregator.storage.blobs import FolderBlobs
from aggregator.training.job_processes import KILLED, Finished, Progress, Trainer
from aggregator.training.jobs import HeadJob, write_head
from protocol.errors import StateError, ThreadFailed
from protocol.wire.messages import BlobRef, Submission
from tests.support.messages.jobs import head_job, workspace
from tests.support.messages.submissions import MANIFEST, submission

TIMEOUT_S = 300.0


def _job(folder: Path, *sent: Submission) -> HeadJob:
    return head_job(FolderBlobs(folder / "blobs"), *sent)


def _trainer(
    folder: Path, on_event: Callable[[Progress | Finished], None], *, timeout_s: float = TIMEOUT_S
) -> Trainer:
    blobs = str(folder / "blobs")
    return Trainer(folder / "training", blobs=blobs, timeout_s=timeout_s, on_event=on_event)


def _end(job: HeadJob, folder: Path, *, timeout_s: float = TIMEOUT_S) -> tuple[Finished, list[Progress]]:
    events: queue.SimpleQueue[Progress | Finished] = queue.SimpleQueue()
    _trainer(folder, events.put, timeout_s=timeout_s).start(job)
    said: list[Progress] = []
    while not isinstance(event := events.get(timeout=TIMEOUT_S), Finished):
        said.append(event)
    return event, said


def test_head_that_cannot_be_fused_is_written(tmp_path: Path) -> None:
    """The training does not fail for lack of a model.onnx."""
    blobs = FolderBlobs(tmp_path / "blobs")
    references = tuple(
        BlobRef(digest=blobs.put(data), size_bytes=len(data), name="broken") for data in (b"one", b"other")
    )
    place = workspace(blobs, tmp_path / "made")
    write_head(b"head", structs.replace(MANIFEST, backbones=references), place)
    assert [path.name for path in place.folder.iterdir()] == ["head.onnx"]


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
        tmp_path,
        monkeypatch,
        f'#!/bin/sh\necho \'{{"type": "Result", "metrics": {{"loss": null}}}}\' > {result}\n',
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
