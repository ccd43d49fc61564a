"""One round's pooling: what goes in, what comes out, and that it needs no training framework."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Contribution
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.tensors import unpack_tensors
from aggregator.config.schema import MAX_MULTIPLE, TaskFile
from aggregator.config.task_file import load_task
from aggregator.storage.open_store import open_store
from aggregator.tasks.task_preparation import Task, prepare_task
from aggregator.training.jobs import Result, RoundJob
from aggregator.training.round_job import run
from protocol.errors import ProtofleetError
from protocol.wire.codec import encode, to_array, to_tensor, to_unsigned
from protocol.wire.messages import Submission, Tensors
from tests.support.messages.submissions import evaluation, round_submission

WITHOUT_TORCH = """\
import sys
sys.modules["torch"] = None
sys.argv = ["pooling", sys.argv[1]]
import runpy
runpy.run_module("aggregator.training.round_job", run_name="__main__")
"""
"""The program, on a machine that has no torch."""


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "task")
    return tmp_path / "task"


@pytest.fixture
def task(folder: Path) -> Task:
    store = open_store(folder / "state")
    found = prepare_task(*load_task(folder / "task.toml"), store=store)
    store.close()
    return found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def _submission(task: Task, *, number: int = 0, seed: int = 0) -> Submission:
    shapes = task.expectation.tensors
    return round_submission(task=task.digest, number=number, shapes=shapes, seed=seed)


def _job(
    task: Task, folder: Path, to: Path, payloads: dict[str, bytes], *, tensors: bytes | None = None
) -> RoundJob:
    blobs = open_store(folder / "state").blobs
    first = task.first_tensors
    assert first is not None
    return RoundJob(
        version=2,
        task=task.digest.hex(),
        task_file=task.file,
        members={device: blobs.put(payload).hex() for device, payload in payloads.items()},
        tensors=(first.digest if tensors is None else blobs.put(tensors)).hex(),
        blobs=str(blobs.folder),
        feature_size=task.feature_size,
        folder=str(to),
    )


def _first(task: Task, folder: Path) -> dict[str, NDArray[Any]]:
    assert task.first_tensors is not None
    return unpack_tensors(open_store(folder / "state").blobs.read(task.first_tensors.digest))


def test_tensors_are_those_of_the_algorithm(task: Task, folder: Path, out: Path) -> None:
    """The next round's tensors equal an independent mean; the metrics count prototypes and classes."""
    fresh, stale = _submission(task, number=1, seed=1), _submission(task, number=0, seed=2)
    fresh = msgspec.structs.replace(fresh, loss=None)
    job = _job(task, folder, out, {"a": encode(fresh), "b": encode(stale)})
    result = run(job)
    assert result.prototypes == 4
    assert (result.metrics["classes"], result.metrics["carried"], result.metrics["loss"]) == (2.0, 1.0, 0.5)
    after = unpack_tensors((out / "tensors.bin").read_bytes())
    first = _first(task, folder)
    assert after.keys() == first.keys()
    changes = [to_array(each.tensors["classifier_bias"]).astype(np.float32) for each in (fresh, stale)]
    np.testing.assert_allclose(
        after["classifier_bias"], first["classifier_bias"] + np.mean(changes, axis=0), atol=1e-6
    )


def test_order_of_members_does_not_matter(task: Task, folder: Path, out: Path) -> None:
    """The same submissions give the same bytes."""
    payloads = {device: encode(_submission(task, number=1, seed=seed)) for seed, device in enumerate("abc")}
    found = []
    for name, members in (("one", payloads), ("other", dict(reversed(payloads.items())))):
        (out / name).mkdir()
        run(_job(task, folder, out / name, members))
        found.append([(out / name / file).read_bytes() for file in ("tensors.bin", "head.onnx")])
    assert found[0] == found[1]


def test_job_runs_without_torch(task: Task, folder: Path, out: Path) -> None:
    """As a program, without torch installed, it writes everything, the result last."""
    job = _job(task, folder, out, {"a": encode(_submission(task, number=1))})
    (out / "job.json").write_bytes(msgspec.json.encode(job))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(out / "job.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert msgspec.json.decode((out / "result.json").read_bytes(), type=Result).prototypes == 2
    assert {file.name for file in out.iterdir()} >= {"tensors.bin", "head.onnx", "model.onnx"}


def test_non_finite_tensors_are_not_published(task: Task, folder: Path, out: Path) -> None:
    """The error names the tensor, and there is no result."""
    runaway = {**_first(task, folder), "adapter_bias": np.full(4, np.inf, np.float32)}
    payload = encode(Tensors(values={name: to_tensor(values) for name, values in runaway.items()}))
    job = _job(task, folder, out, {"a": encode(_submission(task, number=1))}, tensors=payload)
    with pytest.raises(
        ProtofleetError, match="the round's adapter_bias holds NaN or infinity: not published"
    ):
        run(job)
    assert list(out.iterdir()) == []


def test_device_whose_submission_fails_is_left_out(
    task: Task, folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, invalid or not finite in the result, and the round closes with the others."""
    honest = {device: encode(_submission(task, number=1, seed=seed)) for seed, device in enumerate("ab")}
    (out / "honest").mkdir()
    run(_job(task, folder, out / "honest", honest))
    expected = (out / "honest" / "tensors.bin").read_bytes()
    invalid = {**honest, "c": encode(round_submission())}
    result = run(_job(task, folder, out, invalid))
    assert list(result.quarantined) == ["c"]
    assert "its submission is refused: expected task" in result.quarantined["c"]
    assert (result.prototypes, (out / "tensors.bin").read_bytes()) == (4, expected)

    change = FPL.aggregate

    def overflowing(self: FPL, parts: Sequence[Contribution], *args: Any, **settings: Any) -> dict[str, Any]:
        tensors = change(self, parts, *args, **settings)
        if any(part.device == "d" for part in parts):
            tensors["classifier_bias"] = tensors["classifier_bias"] + np.float32("inf")
        return tensors

    monkeypatch.setattr(FPL, "aggregate", overflowing)
    result = run(_job(task, folder, out, {**honest, "d": encode(_submission(task, number=1, seed=9))}))
    assert result.quarantined == {"d": "the round's classifier_bias holds NaN or infinity: not published"}
    assert (out / "tensors.bin").read_bytes() == expected


def test_device_does_not_outweigh_the_others(task: Task, folder: Path, out: Path) -> None:
    """One that claims a million images moves the model no more than the median device; its loss counts once."""
    payloads = {device: _submission(task, number=1, seed=seed) for seed, device in enumerate("abcd")}
    payloads["d"] = msgspec.structs.replace(
        payloads["d"], counts=to_unsigned(np.array([10**6, 10**6])), images=2 * 10**6, loss=1e6
    )
    result = run(_job(task, folder, out, {device: encode(payload) for device, payload in payloads.items()}))
    after = unpack_tensors((out / "tensors.bin").read_bytes())
    assert result.metrics["loss"] == 0.5
    changes = [to_array(each.tensors["classifier_bias"]).astype(np.float32) for each in payloads.values()]
    lengths = [
        np.linalg.norm(
            np.concatenate([to_array(value).ravel().astype(float) for value in each.tensors.values()])
        )
        for each in payloads.values()
    ]
    influences = np.array(lengths) * [1, 1, 1, MAX_MULTIPLE]
    weights = np.minimum(influences, np.sort(influences)[1]) / lengths
    expected = np.average(changes, axis=0, weights=weights)
    moved = after["classifier_bias"] - _first(task, folder)["classifier_bias"]
    np.testing.assert_allclose(moved, expected, atol=1e-6)


def test_submissions_that_cannot_be_aggregated_are_errors(task: Task, folder: Path, out: Path) -> None:
    """A payload that is no submission to this task, and a task without rounds."""
    with pytest.raises(ProtofleetError, match="got an evaluation"):
        run(_job(task, folder, out, {"a": encode(evaluation())}))
    with pytest.raises(ProtofleetError, match="expected task"):
        run(_job(task, folder, out, {"a": encode(round_submission())}))
    job = _job(task, folder, out, {})
    other = TaskFile(classes=("a",), backbones=("b",))
    with pytest.raises(ProtofleetError, match="fedtc has no rounds"):
        run(msgspec.structs.replace(job, task_file=other))


def test_job_contains_the_settings(task: Task, folder: Path, out: Path) -> None:
    job = _job(task, folder, out, {})
    again = msgspec.json.decode(msgspec.json.encode(job), type=RoundJob)
    assert again == job
    assert again.task_file.learning == FPL(rounds=3, projection_size=4)
