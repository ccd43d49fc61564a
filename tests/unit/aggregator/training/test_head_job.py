"""The training and the calibration of a head, as jobs."""

import queue
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime
import pytest

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedtc import train_head
from aggregator.algorithms.fedtc.head import Dense
from aggregator.graphs.head_export import head_to_onnx
from aggregator.storage.blobs import FolderBlobs
from aggregator.storage.store import Store
from aggregator.training import calibration_job
from aggregator.training.head_job import run
from aggregator.training.jobs import CalibrationJob
from aggregator.training.runner import Finished, Progress, Trainer
from aggregator.training.workers.queue_trainer import QueueTrainer
from aggregator.training.workers.worker import Worker
from protocol.errors import ProtofleetError
from protocol.models.onnx_metadata import HeadMetadata, read_metadata
from protocol.wire.codec import encode
from protocol.wire.messages import CONFIDENCE_BINS
from tests.support.graphs.heads import head_metadata
from tests.support.messages.jobs import head_job
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST, submission, values_of


@pytest.mark.parametrize("recipe", ["default", "paper"])
def test_half_the_memory_is_half_the_prototypes_without_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Literal["default", "paper"]
) -> None:
    """Whatever the recipe, and whatever cross-validation would prefer; the head's metrics say so."""
    monkeypatch.setattr(train_head, "MIN_HELD_OUT", 0)  # otherwise so few would not be compared with it
    blobs, sent = FolderBlobs(tmp_path / "blobs"), submission(labels=(0, 1, 2) * 10)
    without_adapter = Training(recipe=recipe, device="cuda:99")  # it cannot be trained
    result = run(head_job(blobs, tmp_path, sent, training=without_adapter, half_memory=True))
    assert (result.prototypes, result.metrics["epochs"], result.metrics["half_memory"]) == (15, 0, 1)


@pytest.mark.parametrize("has_novelty", [False, True])
def test_head_has_the_novelty_that_was_asked_for(tmp_path: Path, *, has_novelty: bool) -> None:
    """It is 0 for the mean of a class; a class without prototypes is known to no image."""
    sent = submission(labels=(0, 2) * 5)
    run(head_job(FolderBlobs(tmp_path / "blobs"), tmp_path, sent, has_novelty=has_novelty))
    session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
    assert ("novelty" in [each.name for each in session.get_outputs()]) is has_novelty
    if has_novelty:
        rows = values_of(sent)
        means = np.stack([rows[start::2].mean(axis=0) for start in (0, 1)])
        (novelty,) = session.run(["novelty"], {"feature": np.concatenate([means, -means])})
        np.testing.assert_allclose(novelty[:2], 0, atol=1e-3)
        assert (novelty[2:] > 0.5).all()


def _job(store: Store) -> CalibrationJob:
    task = store.blobs.put(encode(MANIFEST)).hex()
    metadata = head_metadata(b"a backbone", version=6, task=task, training={"loss": 0.5})
    weight = np.random.default_rng(0).normal(size=(3, FEATURE_SIZE)).astype(np.float32)
    head = head_to_onnx([Dense(weight, np.zeros(3, np.float32))], metadata=metadata)
    return CalibrationJob(
        version=7,
        task=task,
        members={},
        blobs=store.blobs.location,
        feature_size=FEATURE_SIZE,
        folder=str(store.folder / "training" / "head-7"),
        head=store.blobs.put(head).hex(),
        correct=tuple(float(place) for place in range(CONFIDENCE_BINS)),
        images=(40.0,) * CONFIDENCE_BINS,
        novelty=(100.0, 99.0, *[0.0] * 30),
    )


def test_worker_makes_the_same_head(store: Store) -> None:
    """Beside the figures of the head before."""
    job, events = _job(store), queue.SimpleQueue[Progress | Finished]()
    Trainer(store.folder / "training", timeout_s=200.0, on_event=events.put).start(job)
    local = events.get(timeout=200.0)
    head = (Path(job.folder) / "head.onnx").read_bytes()
    metadata = read_metadata(
        onnxruntime.InferenceSession(head).get_modelmeta().custom_metadata_map, HeadMetadata
    )
    assert metadata.novelty_threshold == pytest.approx((2 - 1 / 99) / 32)  # one of the 199 may exceed it
    assert isinstance(local, Finished)
    assert local.result is not None
    assert local.result.metrics["calibrated_from"] == 6
    assert local.result.metrics["calibration_images"] == 40 * CONFIDENCE_BINS
    queued = QueueTrainer(store, timeout_s=200.0, on_event=events.put)
    queued.start(job)
    (folder := store.folder / "workers" / "one").mkdir(parents=True)
    assert Worker(store, folder, name="one", lease_s=30.0).run_next()
    assert events.get(timeout=200.0) == local
    assert (Path(job.folder) / "head.onnx").read_bytes() == head
    queued.stop()


def test_head_that_differs_is_not_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _job(store)
    Path(job.folder).mkdir(parents=True)
    monkeypatch.setattr(calibration_job, "max_difference", lambda *_: float("nan"))
    with pytest.raises(ProtofleetError, match="the calibrated head in ONNX Runtime differs by nan"):
        calibration_job.run(job)
    assert list(Path(job.folder).iterdir()) == []
