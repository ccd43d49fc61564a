"""Trainings as processes: their output becomes events, and every end is reported."""

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from msgspec import structs

from aggregator.algorithms.algorithm import Training
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.jobs import HeadJob
from aggregator.training.runner import Finished, Progress, Trainer
from protocol.errors import StateError, ThreadFailed
from protocol.wire.codec import encode
from protocol.wire.messages import BlobRef
from tests.support.graphs.backbones import tiny_backbone
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST, submission

TIMEOUT_S = 300.0


def _job(folder: Path, *payloads: bytes) -> HeadJob:
    blobs = FolderBlobs(folder / "blobs")
    return HeadJob(
        version=1,
        task=blobs.put(encode(MANIFEST)).hex(),
        members={f"dev{number}": blobs.put(payload).hex() for number, payload in enumerate(payloads)},
        blobs=str(blobs.folder),
        feature_size=FEATURE_SIZE,
        training=Training(device="cpu"),
        folder=str(folder / "training" / "head-1"),
    )


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


def test_missing_submission_fails_the_job(tmp_path: Path) -> None:
    """The reason has the exit status and the process's error."""
    job = _job(tmp_path, encode(submission()))
    (tmp_path / "blobs" / job.members["dev0"]).unlink()
    finished, _ = _end(job, tmp_path)
    assert finished.result is None
    assert finished.reason.startswith("exit status 1: cannot use ")
    assert "No such file" in finished.reason


def test_same_submissions_make_the_same_head(tmp_path: Path) -> None:
    """Byte for byte, so that an interrupted training can be repeated."""
    blobs = FolderBlobs(tmp_path / "blobs")
    backbone = tiny_backbone(feature_size=FEATURE_SIZE)
    reference = BlobRef(digest=blobs.put(backbone), size_bytes=len(backbone), name="tiny.onnx")
    task = blobs.put(encode(structs.replace(MANIFEST, backbones=(reference,))))
    job = _job(tmp_path, encode(submission(task=task)))
    job = structs.replace(job, task=task.hex(), training=Training(device="cpu", epochs=2))
    heads = []
    for _ in range(2):
        finished, _ = _end(job, tmp_path)
        assert finished.result is not None
        assert finished.result.metrics["seconds"] > 0
        heads.append([(Path(job.folder) / name).read_bytes() for name in ("head.onnx", "model.onnx")])
    assert heads[0] == heads[1]


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
    trainer.start(_job(tmp_path, encode(submission())))
    trainer.stop()
    finished = events.get(timeout=TIMEOUT_S)
    assert isinstance(finished, Finished)
    assert finished.reason.startswith("exit status -15")


def _replace_python(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, *, mode: int = 0o755) -> None:
    program = folder / "program"
    program.write_text(script)
    program.chmod(mode)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('echo hello; echo 3; echo "[1]"; echo \'{"epoch": 1}\'; echo oops >&2; exit 4', "oops"),
        ("echo '{\"epoch\": 1}'; rm -r training; exit 4", "no error message"),
    ],
    ids=["other output", "folder vanishes"],
)
def test_failed_job_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    """The reason has the last line of its errors; output without figures is ignored."""
    _replace_python(tmp_path, monkeypatch, f"#!/bin/sh\ncd {tmp_path}; {script}\n")
    finished, said = _end(_job(tmp_path), tmp_path)
    assert said == [Progress({"epoch": 1})]
    assert finished.reason == f"exit status 4: {reason}"


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


def test_killed_job_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the usual cause."""
    _replace_python(tmp_path, monkeypatch, "#!/bin/sh\nkill -9 $$\n")
    finished, _ = _end(_job(tmp_path), tmp_path)
    assert (finished.result, finished.is_killed) == (None, True)
    assert finished.reason == "killed (SIGKILL), as Linux does when memory runs out"


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


def test_output_that_is_not_utf8_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library prints it; the figures that follow still arrive."""
    script = "printf '\\377\\n'; echo '{\"epoch\": 2}'; exit 4"
    _replace_python(tmp_path, monkeypatch, f"#!/bin/sh\n{script}\n")
    finished, said = _end(_job(tmp_path), tmp_path)
    assert said == [Progress({"epoch": 2})]
    assert finished.reason == "exit status 4: no error message"


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
