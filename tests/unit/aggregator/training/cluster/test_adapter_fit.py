"""The adapter of FedTC's head is the same with any number of workers, also while one is killed."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from aggregator.algorithms.fedtc import train_head as train_head_module
from aggregator.algorithms.fedtc.adapter import Fit, train_adapter
from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.config.schema import Training
from aggregator.training.head_job import run
from aggregator.training.jobs import HeadJob
from benchmarks.cost.engines.processes import machines
from protocol.storage.blobstore import BlobStore
from protocol.wire.codec import encode
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST, submission
from tests.support.ray_cluster import workers

pytest.importorskip("ray", reason="needs ray")

from aggregator.training.cluster import adapter_fit
from aggregator.training.cluster.adapter_fit import Place, RayFit

TOLERANCE = 1e-5
"""Of logits around 1: sums of a step's gradients are rounded in another order."""

EPOCHS = 3
RECIPE = replace(
    RECIPES["default"], epochs=EPOCHS, min_steps=0, batch_size=64, compress=False, learning_rate=1e-2
)


def data() -> TrainingSet:
    """Each class is two clusters; the last step has fewer rows than there are workers."""
    rng = np.random.default_rng(0)
    labels = np.arange(4 * 64 + 3) % 4
    centers = rng.choice([-1, 1], (len(labels), 1)) * rng.normal(size=(5, 16))[labels]
    values = (centers + rng.normal(size=centers.shape) / 3).astype(np.float32)
    return TrainingSet(values, labels, np.full(len(labels), 5), num_classes=5, restore=True)


def trained(fit: Fit | None, reports: list[dict[str, Any]]) -> NDArray[np.float32]:
    """The logits of the head."""
    every = data()
    layers, epochs = train_adapter(every, recipe=RECIPE, seed=0, device="cpu", fit=fit, report=reports.append)
    assert epochs == EPOCHS
    return logits_of(layers, every.features)


class Killing(list[dict[str, Any]]):
    """Kills the training's last worker after its first epoch."""

    def append(self, figures: dict[str, Any]) -> None:
        super().append(figures)
        if len(self) == 1:
            os.kill(worker_processes()[-1].pid, signal.SIGKILL)


def worker_processes() -> list[psutil.Process]:
    every = psutil.Process().children(recursive=True)
    return [each for each in every if "AdapterWorker" in " ".join(each.cmdline())]


def test_same_head_with_any_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while one is killed, and in chunks; a class without prototypes is never predicted."""
    local: list[dict[str, Any]] = []
    expected = trained(None, local)
    assert 0.3 < expected[:, :4].std() < 3  # what the tolerance relates to
    monkeypatch.setattr(adapter_fit, "CHUNK_BYTES", 16 * 4 * 100)
    with workers(4):
        reports: list[dict[str, Any]] = []
        np.testing.assert_allclose(trained(RayFit(workers=4), reports), expected, atol=TOLERANCE)
        assert [each["epoch"] for each in reports] == [1, 2, 3]
        assert reports[-1]["loss"] == pytest.approx(local[-1]["loss"], abs=TOLERANCE)
        killing = Killing()
        np.testing.assert_allclose(trained(RayFit(workers=2), killing), expected, atol=TOLERANCE)
        assert [each["epoch"] for each in killing] == [1, 2, 3]


def test_a_job_trains_with_one_worker_on_each_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_head_module, "MIN_HELD_OUT", 0)
    blobs = BlobStore(tmp_path / "blobs")
    parts = [encode(submission(labels=(0, 1, 2) * 10, sequence=number)) for number in range(1, 4)]
    job = HeadJob(
        version=1,
        task=blobs.put(encode(MANIFEST)).hex(),
        members={str(number): blobs.put(part).hex() for number, part in enumerate(parts)},
        blobs=str(blobs.folder),
        feature_size=FEATURE_SIZE,
        training=Training(recipe="paper", epochs=2),
        folder=str(tmp_path),
    )
    expected = run(job)
    joined: list[int] = []
    group = adapter_fit._group

    def counted(places: Sequence[Place]) -> Any:
        joined.append(len({str(place.options) for place in places}))
        return group(places)

    monkeypatch.setattr(adapter_fit, "_group", counted)
    with machines(2) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        made = run(msgspec.structs.replace(job, training=Training(recipe="paper", epochs=2, engine="ray")))
    assert joined == [2]
    assert made.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=TOLERANCE)
