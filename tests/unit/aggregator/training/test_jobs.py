"""Jobs: one round's pooling, which needs no training framework, and the training and the calibration of a head."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Contribution
from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.tensors import unpack_tensors
from aggregator.config.task_file import load_task
from aggregator.coordination.bounds import MAX_MULTIPLE
from aggregator.graphs.head_export import head_to_onnx
from aggregator.storage.blobs import Blobs, FolderBlobs
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.tasks.task_preparation import Task, prepare_task
from aggregator.training import calibration_job
from aggregator.training.head_job import run as run_head
from aggregator.training.jobs import CalibrationJob, Result, RoundJob
from aggregator.training.round_job import run
from protocol.errors import ProtofleetError
from protocol.models.onnx_metadata import HeadMetadata, read_metadata
from protocol.wire.arrays import to_array, to_tensor, to_unsigned
from protocol.wire.codec import encode
from protocol.wire.messages import CONFIDENCE_BINS, Evaluation, Submission, Tensors
from tests.support.graphs.heads import head_metadata
from tests.support.messages.jobs import head_job, workspace
from tests.support.messages.submissions import (
    FEATURE_SIZE,
    MANIFEST,
    evaluation,
    round_submission,
    submission,
    values_of,
)

WITHOUT_TORCH = """\
import sys
sys.modules["torch"] = None
from pathlib import Path
from aggregator.job_processes import JobOrder
from aggregator.training.execution import run_in_folder
run_in_folder(JobOrder(Path(sys.argv[1]), sys.argv[2], "local", 60.0), report=lambda _: None)
"""
"""A job, on a machine that has no torch."""


@dataclass
class Bench:
    """A task of rounds with its state directory, and a folder for what a round makes."""

    task: Task
    blobs: Blobs
    out: Path

    def submission(self, *, number: int = 1, seed: int = 0) -> Submission:
        shapes = self.task.expectation.tensors
        return round_submission(task=self.task.digest, number=number, shapes=shapes, seed=seed)

    def submissions(self, devices: str) -> dict[str, Submission]:
        return {device: self.submission(seed=seed) for seed, device in enumerate(devices)}

    def run(self, sent: Mapping[str, Submission | Evaluation], *, folder: str = "", **changes: Any) -> Result:
        job = msgspec.structs.replace(self.job(sent), **changes)
        return run(job, workspace(self.blobs, self.out / folder))

    def job(self, sent: Mapping[str, Submission | Evaluation]) -> RoundJob:
        assert self.task.first_tensors is not None
        return RoundJob(
            version=2,
            task=self.task.digest.hex(),
            algorithm=self.task.file.algorithm,
            settings=msgspec.to_builtins(self.task.file.method),
            robust=self.task.file.robust,
            members={device: self.blobs.put(encode(each)).hex() for device, each in sent.items()},
            tensors=self.task.first_tensors.digest.hex(),
            feature_size=self.task.feature_size,
        )

    def first(self) -> dict[str, NDArray[Any]]:
        assert self.task.first_tensors is not None
        return unpack_tensors(self.blobs.read(self.task.first_tensors.digest))

    def after(self, folder: str = "") -> dict[str, NDArray[Any]]:
        return unpack_tensors((self.out / folder / "tensors.bin").read_bytes())


@pytest.fixture
def bench(prepared: Path, tmp_path: Path) -> Iterator[Bench]:
    shutil.copytree(prepared, folder := tmp_path / "task")
    (tmp_path / "out").mkdir()
    with contextlib.closing(open_store(folder / "state")) as store:
        task = prepare_task(*load_task(folder / "task.toml"), store=store)
        yield Bench(task, store.blobs, tmp_path / "out")


def test_tensors_are_those_of_the_algorithm(bench: Bench) -> None:
    """The next round's tensors equal an independent mean; the metrics count prototypes and classes."""
    fresh, stale = bench.submission(seed=1), bench.submission(number=0, seed=2)
    fresh = msgspec.structs.replace(fresh, loss=None)
    result = bench.run({"a": fresh, "b": stale})
    assert result.prototypes == 4
    assert (result.metrics["classes"], result.metrics["carried"], result.metrics["loss"]) == (2.0, 1.0, 0.5)
    first, after = bench.first(), bench.after()
    assert after.keys() == first.keys()
    changes = [to_array(each.tensors["classifier_bias"]).astype(np.float32) for each in (fresh, stale)]
    np.testing.assert_allclose(
        after["classifier_bias"], first["classifier_bias"] + np.mean(changes, axis=0), atol=1e-6
    )


def test_order_of_members_does_not_matter(bench: Bench) -> None:
    """The same submissions give the same bytes."""
    sent = bench.submissions("abc")
    found = []
    for name, members in (("one", sent), ("other", dict(reversed(sent.items())))):
        bench.run(members, folder=name)
        found.append([(bench.out / name / file).read_bytes() for file in ("tensors.bin", "head.onnx")])
    assert found[0] == found[1]


def test_job_runs_without_torch(bench: Bench) -> None:
    """In a process of its own, it writes everything, the result last."""
    (bench.out / "job.json").write_bytes(msgspec.json.encode(bench.job(bench.submissions("a"))))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(bench.out), bench.blobs.location],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert msgspec.json.decode((bench.out / "result.json").read_bytes(), type=Result).prototypes == 2
    assert {file.name for file in bench.out.iterdir()} >= {"tensors.bin", "head.onnx", "model.onnx"}


def test_non_finite_tensors_are_not_published(bench: Bench) -> None:
    """The error names the tensor, and there is no result."""
    runaway = {**bench.first(), "adapter_bias": np.full(4, np.inf, np.float32)}
    payload = encode(Tensors(values={name: to_tensor(values) for name, values in runaway.items()}))
    tensors = bench.blobs.put(payload).hex()
    with pytest.raises(
        ProtofleetError, match="the round's adapter_bias holds NaN or infinity: not published"
    ):
        bench.run(bench.submissions("a"), tensors=tensors)
    assert list(bench.out.iterdir()) == []


def test_device_whose_submission_fails_is_left_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, invalid or not finite in the result, and the round closes with the others."""
    honest = bench.submissions("ab")
    bench.run(honest, folder="honest")
    expected = (bench.out / "honest" / "tensors.bin").read_bytes()
    result = bench.run({**honest, "c": round_submission()})
    assert list(result.quarantined) == ["c"]
    assert "its submission is refused: expected task" in result.quarantined["c"]
    assert (result.prototypes, (bench.out / "tensors.bin").read_bytes()) == (4, expected)

    change = FPL.aggregate

    def overflowing(self: FPL, parts: Sequence[Contribution], *args: Any, **settings: Any) -> dict[str, Any]:
        tensors = change(self, parts, *args, **settings)
        if any(part.device == "d" for part in parts):
            tensors["classifier_bias"] = tensors["classifier_bias"] + np.float32("inf")
        return tensors

    monkeypatch.setattr(FPL, "aggregate", overflowing)
    result = bench.run({**honest, "d": bench.submission(seed=9)})
    assert result.quarantined == {"d": "the round's classifier_bias holds NaN or infinity: not published"}
    assert (bench.out / "tensors.bin").read_bytes() == expected


def test_device_does_not_outweigh_the_others(bench: Bench) -> None:
    """One that claims a million images moves the model no more than the median device; its loss counts once."""
    sent = bench.submissions("abcd")
    sent["d"] = msgspec.structs.replace(
        sent["d"], counts=to_unsigned(np.array([10**6, 10**6])), images=2 * 10**6, loss=1e6
    )
    result = bench.run(sent)
    assert result.metrics["loss"] == 0.5
    changes = [to_array(each.tensors["classifier_bias"]).astype(np.float32) for each in sent.values()]
    lengths = [
        np.linalg.norm(
            np.concatenate([to_array(value).ravel().astype(float) for value in each.tensors.values()])
        )
        for each in sent.values()
    ]
    influences = np.array(lengths) * [1, 1, 1, MAX_MULTIPLE]
    weights = np.minimum(influences, np.sort(influences)[1]) / lengths
    expected = np.average(changes, axis=0, weights=weights)
    moved = bench.after()["classifier_bias"] - bench.first()["classifier_bias"]
    np.testing.assert_allclose(moved, expected, atol=1e-6)


def test_submissions_that_cannot_be_aggregated_are_errors(bench: Bench) -> None:
    """A payload that is no submission to this task, and a task without rounds."""
    with pytest.raises(ProtofleetError, match="got an evaluation"):
        bench.run({"a": evaluation()})
    with pytest.raises(ProtofleetError, match="expected task"):
        bench.run({"a": round_submission()})
    with pytest.raises(ProtofleetError, match="fedtc has no rounds"):
        bench.run({}, algorithm="fedtc", settings={})


@pytest.mark.parametrize("has_novelty", [False, True])
def test_head_has_the_novelty_that_was_asked_for(tmp_path: Path, *, has_novelty: bool) -> None:
    """It is 0 for the mean of a class; a class without prototypes is known to no image."""
    sent = submission(labels=(0, 2) * 5)
    blobs = FolderBlobs(tmp_path / "blobs")
    run_head(head_job(blobs, sent, has_novelty=has_novelty), workspace(blobs, tmp_path))
    session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
    assert ("novelty" in [each.name for each in session.get_outputs()]) is has_novelty
    if has_novelty:
        rows = values_of(sent)
        means = np.stack([rows[start::2].mean(axis=0) for start in (0, 1)])
        (novelty,) = session.run(["novelty"], {"feature": np.concatenate([means, -means])})
        np.testing.assert_allclose(novelty[:2], 0, atol=1e-3)
        assert (novelty[2:] > 0.5).all()


def test_head_job_without_torch_takes_the_closed_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it would train an adapter; the head's metadata and figures say so, and only there."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "aggregator.algorithms.fedtc.adapter", raising=False)
    blobs = FolderBlobs(tmp_path / "blobs")
    for number, expected in ((10, None), (400, 1.0)):
        job = head_job(blobs, submission(labels=(0, 1, 2) * number))
        result = run_head(job, workspace(blobs, tmp_path))
        assert (result.metrics.get("adapter_missing"), result.metrics["epochs"]) == (expected, 0)
        session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
        written = read_metadata(session.get_modelmeta().custom_metadata_map, HeadMetadata)
        assert written.training.get("adapter_missing") == expected


def _job(store: Store) -> CalibrationJob:
    task = store.blobs.put(encode(MANIFEST)).hex()
    metadata = head_metadata(b"a backbone", version=6, task=task, training={"loss": 0.5})
    weight = np.random.default_rng(0).normal(size=(3, FEATURE_SIZE)).astype(np.float32)
    head = head_to_onnx([Dense(weight, np.zeros(3, np.float32))], metadata=metadata)
    return CalibrationJob(
        version=7,
        task=task,
        feature_size=FEATURE_SIZE,
        head=store.blobs.put(head).hex(),
        correct=tuple(float(place) for place in range(CONFIDENCE_BINS)),
        images=(40.0,) * CONFIDENCE_BINS,
        novelty=(100.0, 99.0, *[0.0] * 30),
    )


def test_calibrated_head_has_the_figures_of_the_head_before(store: Store, tmp_path: Path) -> None:
    """Beside its own."""
    result = calibration_job.run(_job(store), workspace(store.blobs, tmp_path))
    session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
    metadata = read_metadata(session.get_modelmeta().custom_metadata_map, HeadMetadata)
    assert metadata.novelty_threshold == pytest.approx((2 - 1 / 99) / 32)  # one of the 199 may exceed it
    assert metadata.training["loss"] == 0.5
    assert result.metrics["calibrated_from"] == 6
    assert result.metrics["calibration_images"] == 40 * CONFIDENCE_BINS


def test_head_that_differs_is_not_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_job, "max_difference", lambda *_: float("nan"))
    with pytest.raises(ProtofleetError, match="the calibrated head in ONNX Runtime differs by nan"):
        calibration_job.run(_job(store), workspace(store.blobs, tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []
