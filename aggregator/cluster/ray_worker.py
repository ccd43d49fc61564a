"""A job on a machine of a Ray cluster: blobs arrive, the job runs in a folder of its own, and its files are read."""

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aggregator.storage.blobs import open_blobs
from aggregator.training.execution import execute
from aggregator.training.jobs import BlobJob, Result, Workspace
from protocol.errors import ProtofleetError, StateError
from protocol.storage.blobstore import file_digest, state_errors
from protocol.storage.folder_lock import FolderLock

PART_BYTES = 64 * 2**20
"""Bytes that are sent at once: in the memory of the driver, of the object store and of the worker."""

SCRATCH = "protofleet-job-"
"""Begins the name of a worker's folder, which is deleted after the job, or before the next one of the machine."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a blob; a blob has several pieces if it is larger than what is left of a part."""

    digest: bytes
    data: NDArray[np.uint8]
    is_last: bool


class Worker:
    """A job on a machine of the cluster, in a folder of its own."""

    def __init__(self) -> None:
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
                file.write(piece.data.data)
            if piece.is_last:
                require_whole(f"blob {name}", file_digest(path), piece.digest)

    def run(self, job: BlobJob) -> tuple[Result, dict[str, bytes]]:
        """Return the result and the digests of the files."""
        result = execute(job, Workspace(self.blobs, self._made, self._figures.append))
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


def require_whole(name: str, digest: bytes, expected: bytes) -> None:
    """Raise ProtofleetError unless a file has arrived as it was sent."""
    if digest != expected:
        raise ProtofleetError(f"{name} arrived damaged in the Ray cluster: got sha256 {digest.hex()}")


def _delete_left_folders() -> None:
    """Delete what killed workers have left on this machine."""
    for lock in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/lock"):
        with contextlib.suppress(StateError):  # another user's
            if not FolderLock(lock.parent).is_taken():
                shutil.rmtree(lock.parent, ignore_errors=True)
