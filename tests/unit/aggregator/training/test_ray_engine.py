"""A head that is made on a Ray cluster has the same bytes as one that is made in one process."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aggregator.storage.blobs import FolderBlobs, open_blobs
from aggregator.training import statistics_sums as blocks
from aggregator.training.jobs import Result, StatisticsJob
from aggregator.training.statistics_job import run
from protocol.errors import BlobLost, ProtofleetError, RuntimeMissing
from protocol.wire.codec import encode
from protocol.wire.messages import Submission
from tests.support.messages.jobs import statistics_job
from tests.support.messages.statistics import GROUPS_EXPECTATION, groups_of, images, sums_of
from tests.support.ray_cluster import machines, workers
from tests.support.stores.object_store import BUCKET, moto_server, object_store

pytest.importorskip("ray", reason="needs ray")


class KillingJob(StatisticsJob, frozen=True, kw_only=True, dict=True):
    """Its first reader is killed after its first submission, as when memory runs out."""

    def submissions(self, devices: Iterable[str] | None = None) -> Iterator[tuple[str, Submission]]:
        for each in super().submissions(devices):
            yield each
            with contextlib.suppress(FileExistsError):
                (Path(self.folder) / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)


def job_in(folder: Path, blobs: str = "") -> StatisticsJob:
    """40 devices: one has a second class's images as its first, one many images, and one an invalid submission."""
    parts = {f"{device:02}": groups_of(*images(device, 40)) for device in range(37)}
    features, labels = images(50, 40)
    parts["flipped"] = groups_of(np.roll(features, 40, axis=0), labels)
    parts["large"] = groups_of(*images(51, 800))
    parts["invalid"] = sums_of(*images(52))
    return statistics_job(open_blobs(blobs or str(folder / "blobs")), folder, parts, GROUPS_EXPECTATION)


def made(job: StatisticsJob, **changes: object) -> tuple[Result, bytes]:
    """The result without the times, and the head."""
    result = run(msgspec.structs.replace(job, **changes))
    metrics = {name: value for name, value in result.metrics.items() if "seconds" not in name}
    return msgspec.structs.replace(result, metrics=metrics), (Path(job.folder) / "head.onnx").read_bytes()


def test_same_bytes_at_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a worker is killed; outliers, limits and refused submissions are the same."""
    monkeypatch.setattr(blocks, "BLOCK_DEVICES", 3)
    job = job_in(tmp_path)
    result, head = made(job)
    assert sorted(result.quarantined) == ["flipped", "invalid"]
    assert len(result.counting.limited) == 1
    for number in (1, 2, 4):
        with workers(number):
            assert made(job, engine="ray") == (result, head)
            if number == 2:
                fields = {name: getattr(job, name) for name in job.__struct_fields__}
                assert made(KillingJob(**fields), engine="ray") == (result, head)
                assert (tmp_path / "killed").exists()
                Path(job.blobs, job.members["00"]).unlink()
                with pytest.raises(BlobLost) as lost:
                    made(job, engine="ray")
                assert lost.value.digest.hex() == job.members["00"]
                FolderBlobs(Path(job.blobs)).put(encode(groups_of(*images(0, 40))))


def test_machines_read_submissions_from_an_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no folder in common; each has the credentials in its own environment."""
    monkeypatch.setattr(blocks, "BLOCK_DEVICES", 3)
    with moto_server(tmp_path) as server, object_store(server, monkeypatch):
        job = job_in(tmp_path, f"s3://{BUCKET}/fleet")
        expected = made(job)
        with machines(2) as address:
            monkeypatch.setenv("RAY_ADDRESS", address)
            assert made(job, engine="ray") == expected


def test_cluster_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1")
    with pytest.raises(ProtofleetError, match=r"RAY_ADDRESS 127\.0\.0\.1"):
        made(job_in(tmp_path), engine="ray")


def test_missing_ray_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "aggregator.training.ray_engine", raising=False)
    with pytest.raises(RuntimeMissing, match=r"pip install 'protofleet-.*\.whl\[ray\]'"):
        made(job_in(tmp_path), engine="ray")
