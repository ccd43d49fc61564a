"""Blobs on their way to a worker, and errors of a cluster; the worker is an object in this process."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aggregator.storage.blobs import FolderBlobs
from protocol import __version__
from protocol.errors import BlobLost, ProtofleetError
from protocol.wire.codec import digest_of
from tests.support.network.brokers import free_address

pytest.importorskip("ray", reason="needs ray")

from aggregator.cluster import ray_driver
from aggregator.cluster.ray_actor import require_version
from aggregator.cluster.ray_connection import connected
from aggregator.cluster.ray_driver import parts, require_machine
from aggregator.cluster.ray_worker import SCRATCH, Piece, Worker

PART = 100


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(ray_driver, "PART_BYTES", PART)
    yield (worker := Worker())
    worker.end()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_blobs_arrive_in_parts(worker: Worker, tmp_path: Path) -> None:
    """Small ones together, a large one in pieces; a lost one is reported."""
    blobs, lost = FolderBlobs(tmp_path / "blobs"), dict[bytes, BlobLost]()
    contents = [bytes([number]) * size for number, size in enumerate((0, 1, 60, 40, 99, 250, 2 * PART, 7))]
    digests = [blobs.put(data) for data in contents]
    gone = digest_of(b"gone")
    sizes = []
    for part in parts(blobs, [*digests[:3], gone, *digests[3:]], lost):
        sizes.append(sum(len(piece.data) for piece in part))
        worker.keep(part)
    assert sizes == [PART] * 6 + [57]
    assert [worker.blobs.read(digest) for digest in digests] == contents
    assert list(lost) == [gone]


def test_damaged_blob_is_not_accepted(worker: Worker, tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    ((whole,),) = parts(blobs, [blobs.put(b"a blob")], {})
    damaged = Piece(whole.digest, whole.data ^ np.uint8(1), whole.is_last)
    with pytest.raises(ProtofleetError, match=f"blob {whole.digest.hex()} arrived damaged"):
        worker.keep([damaged])


def test_folders_of_killed_workers_are_deleted(worker: Worker) -> None:
    """Before the next job of the machine; one that is in use stays."""
    (left := worker.folder.with_name(f"{SCRATCH}left")).mkdir()
    (left / "lock").touch()
    other = Worker()
    assert not left.exists()
    assert worker.folder.is_dir()
    other.end()


@pytest.mark.parametrize(
    ("resources", "gpus", "error"),
    [
        ([{"CPU": 1.0}], 0, None),
        ([{}, {"CPU": 8.0, "GPU": 2.0}], 2, None),
        ([{}], 0, "has a processor for jobs: join one"),
        ([{"CPU": 8.0}, {"GPU": 1.0}], 1, "has a processor for jobs and 1 GPUs"),
        ([{"CPU": 8.0, "GPU": 1.0}] * 2, 2, "has a processor for jobs and 2 GPUs"),
    ],
)
def test_job_does_not_wait_for_a_machine_that_the_cluster_lacks(
    resources: list[dict[str, float]], gpus: int, error: str | None
) -> None:
    """One machine needs a processor and all GPUs of the job; Ray would wait until the time limit."""
    nodes = [{"Alive": True, "Resources": each} for each in resources]
    gone = {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}}
    with contextlib.nullcontext() if error is None else pytest.raises(ProtofleetError, match=error):
        require_machine([gone, *nodes], gpus=gpus)


def test_worker_of_another_version_is_refused() -> None:
    with pytest.raises(
        ProtofleetError, match=rf"has protofleet {__version__}, expected 0\.0\.0: install the same"
    ):
        require_version("0.0.0")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:{port}"])
def test_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    address = address.format(port=free_address().port)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ProtofleetError, match=f"RAY_ADDRESS {address} cannot be used"), connected():
        pass


def test_error_of_a_cluster_names_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself says only that it cannot connect, also where the token is missing."""

    def init(*_: object, **__: object) -> None:
        raise ConnectionError("Failed to connect") from RuntimeError("Traceback\nthe token is missing\n\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("ray.init", init)
        with pytest.raises(ProtofleetError, match=r"cannot be used: the token is missing$"), connected():
            pass
