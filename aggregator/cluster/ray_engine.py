"""The engine `ray`: a job runs on a machine of a Ray cluster. Importing this imports Ray.

This process, the driver, sends the blobs in parts, waits, and writes the files that the job has made. Ray ends the
worker when this process ends.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.cluster.ray_connection import connected, require_version
from aggregator.storage.blobs import Blobs, open_blobs, read_each
from aggregator.training.execution import execute as execute_here
from aggregator.training.jobs import Job, Result, Workspace
from protocol import __version__
from protocol.errors import BlobLost, ProtofleetError, StateError
from protocol.storage.blobstore import file_digest, state_errors
from protocol.storage.folder_lock import FolderLock

import ray  # isort: skip - after ray_connection, which sets variables of Ray
from ray.exceptions import RayActorError  # isort: skip

PART_BYTES = 64 * 2**20
"""Bytes that are sent at once: in the memory of this process, of the object store and of the worker."""

MAX_LOST_WORKERS = 3
"""Workers that may end without a word during a job; the next one that does ends it."""

POLL_S = 0.5

SCRATCH = "protofleet-job-"
"""Begins the name of a worker's folder, which is deleted after the job, or before the next one of the machine."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
"""A worker has these of the driver, as a subprocess would. Ray sets the first one to 1, also on many cores."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a blob; a blob has several pieces if it is larger than a part."""

    digest: bytes
    data: NDArray[np.uint8]
    is_last: bool


def execute(job: Job, workspace: Workspace) -> Result:
    """Run a job on the cluster; a job whose worker has ended is repeated on another one.

    Raises:
        ProtofleetError: the job cannot be done, or the cluster cannot be used.
    """
    with connected():
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus < job.gpus:
            raise ProtofleetError(f"the Ray cluster has {gpus} GPUs, and `[training]` gpus is {job.gpus}")
        for _ in range(MAX_LOST_WORKERS):
            with contextlib.suppress(RayActorError):
                return _attempt(job, workspace)
            sys.stderr.write("a Ray worker has ended: repeating the job\n")
        return _attempt(job, workspace)


def _attempt(job: Job, workspace: Workspace) -> Result:
    variables = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    # Two calls at a time: progress is read while the job runs.
    actor = ray.remote(Worker).options(num_cpus=1, num_gpus=job.gpus, max_concurrency=2)
    worker = actor.remote()
    ray.get(worker.begin.remote(__version__, variables))
    lost = dict[bytes, BlobLost]()
    digests = dict.fromkeys(job.blobs(job.manifest(workspace.blobs)))
    for part in parts(workspace.blobs, list(digests), lost):
        ray.get(worker.keep.remote(part))  # Ray deletes its copy afterwards
    running = worker.run.remote(job)
    while not ray.wait([running], timeout=POLL_S)[0]:
        _report(worker, workspace)
    try:
        result, files = ray.get(running)
    except BlobLost as error:
        raise lost.get(error.digest, error) from None
    _report(worker, workspace)
    for name, digest in files.items():
        _fetch(worker, name, workspace.folder / name, digest=digest)
    ray.get(worker.end.remote())
    return result


def _report(worker: Any, workspace: Workspace) -> None:
    for figures in ray.get(worker.progress.remote()):
        workspace.report(figures)


def _fetch(worker: Any, name: str, path: Path, *, digest: bytes) -> None:
    """Write a file that the worker has made; raises ProtofleetError if it arrives damaged."""
    with state_errors(path), path.open("wb") as file:
        while len(data := ray.get(worker.read.remote(name, file.tell()))):
            file.write(data)
    _require_whole(name, file_digest(path), digest)


def _require_whole(name: str, digest: bytes, expected: bytes) -> None:
    if digest != expected:
        raise ProtofleetError(f"{name} arrived damaged from the Ray cluster: got sha256 {digest.hex()}")


def parts(blobs: Blobs, digests: list[bytes], lost: dict[bytes, BlobLost]) -> Iterator[list[Piece]]:
    """Yield all blobs in parts of at most PART_BYTES; those that are lost are put into `lost`."""
    part, free = list[Piece](), PART_BYTES
    for digest, blob in zip(digests, read_each(blobs, digests), strict=True):
        if isinstance(blob, BlobLost):
            lost[digest] = blob
            continue
        left, is_last = np.frombuffer(blob, np.uint8), False
        while not is_last:
            data, left = left[:free], left[free:]
            is_last = not len(left)
            part.append(Piece(digest, data, is_last))
            free -= len(data)
            if not free:
                yield part
                part, free = [], PART_BYTES
    if part:
        yield part


class Worker:
    """The job on a machine of the cluster, as an actor; the methods are called in their order."""

    def begin(self, version: str, variables: Mapping[str, str | None]) -> None:
        """Make the folder; raises ProtofleetError if this machine has another version of protofleet."""
        require_version(version)
        for name, value in variables.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        _delete_left_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=SCRATCH))
        self._lock = FolderLock(self.folder)
        self._lock.take()
        self.blobs = open_blobs(str(self.folder / "blobs"))
        self._made = self.folder / "job"
        self._made.mkdir()
        self._figures = list[dict[str, float | str]]()

    def keep(self, part: list[Piece]) -> None:
        for piece in part:
            name = piece.digest.hex()
            path = self.folder / "blobs" / name
            with state_errors(path), path.open("ab") as file:
                file.write(piece.data)
            if piece.is_last:
                _require_whole(f"blob {name}", file_digest(path), piece.digest)

    def run(self, job: Job) -> tuple[Result, dict[str, bytes]]:
        """Return the result and the digests of the files."""
        result = execute_here(job, Workspace(self.blobs, self._made, self._figures.append))
        made = [self._made / name for name in job.files if (self._made / name).exists()]
        return result, {path.name: file_digest(path) for path in made}

    def progress(self) -> list[dict[str, float | str]]:
        """Return the figures since the last call."""
        return [self._figures.pop(0) for _ in range(len(self._figures))]

    def read(self, name: str, offset: int) -> NDArray[np.uint8]:
        return np.fromfile(self._made / name, np.uint8, count=PART_BYTES, offset=offset)

    def end(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()


def _delete_left_folders() -> None:
    """Delete what killed workers have left on this machine."""
    for lock in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/lock"):
        with contextlib.suppress(StateError):  # another user's
            if not FolderLock(lock.parent).is_taken():
                shutil.rmtree(lock.parent, ignore_errors=True)
