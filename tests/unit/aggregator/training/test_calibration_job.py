"""A calibration as a process and in a worker makes the same bytes, and publishes nothing that was not verified."""

import queue
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from aggregator.algorithms.fedtc.head import Dense
from aggregator.graphs.head_export import head_to_onnx
from aggregator.storage.store import Store
from aggregator.training import calibration_job
from aggregator.training.jobs import CalibrationJob
from aggregator.training.runner import Finished, Progress, Trainer
from aggregator.training.workers.queue_trainer import QueueTrainer
from aggregator.training.workers.worker import Worker
from protocol.errors import ProtofleetError
from protocol.models.onnx_metadata import HeadMetadata, read_metadata
from protocol.wire.codec import encode
from protocol.wire.messages import CONFIDENCE_BINS
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST


def _job(store: Store) -> CalibrationJob:
    task = store.blobs.put(encode(MANIFEST)).hex()
    metadata = HeadMetadata(
        classes=MANIFEST.classes,
        version=6,
        task=task,
        backbones=("0" * 64,),
        feature_size=FEATURE_SIZE,
        training={"loss": 0.5},
    )
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
