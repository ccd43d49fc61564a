"""The files of the current head in the state directory: `head.onnx`, and `model.onnx` with the backbones.

The training's `model.onnx` is linked. Without it, as after a rollback, a child process fuses another one, which takes
seconds: devices have the head meanwhile. The model is written first, so that the digest of `head.onnx` shows that both
are written.
"""

import contextlib
import logging
import os
import queue
import shutil
import sys
import time
from pathlib import Path

import msgspec

from aggregator.storage.blobs import open_blobs
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.tasks.restoration import report_damage
from aggregator.tasks.task_preparation import Task
from aggregator.training.jobs import folder_name
from protocol.children import Child, connect, ending
from protocol.errors import BackboneMismatch, BlobLost, StateError
from protocol.log import event
from protocol.storage.blobstore import deleted_on_failure, file_digest, state_errors, write_atomically

log = logging.getLogger(__name__)

RETRY_S = 15.0
"""Seconds between attempts to write them, while the object store or the disk fails."""


class Fusion(msgspec.Struct, frozen=True, kw_only=True):
    """A model to fuse and write."""

    blobs: str
    """Location of the blobs."""
    backbones: tuple[bytes, ...]
    head: bytes
    path: str


class Fused(msgspec.Struct, frozen=True):
    """The outcome of a fusion."""

    problem: str = ""
    """Why there is no model; empty if it is written."""
    lost: bytes = b""
    """Digest of a backbone that is lost."""


class CurrentFiles:
    """Writes the files of the current head."""

    def __init__(self, task: Task, store: Store) -> None:
        self._task, self._store = task, store
        self._written = 0
        """The version of the head whose files are written, or cannot be."""
        self._retry_s = 0.0
        self._fusing: tuple[HeadRecord, Child] | None = None
        self._ends = queue.SimpleQueue[Fused | int]()

    def tick(self, head: HeadRecord) -> None:
        """Write the files of a head, without waiting for a fusion; raises StateError if they cannot be written."""
        if self._fusing is not None:
            self._end_fusion(head)
        if head.version == self._written or time.monotonic() < self._retry_s or self._fusing is not None:
            return
        path = self._store.folder / "head.onnx"
        if head.file and _is_file(path, head.file):
            self._written = head.version
            return
        if not head.file:
            self._finish(head, None, has_model=False)
            return
        try:
            data = self._store.blobs.read(head.file)
        except BlobLost as error:
            report_damage(self._task, self._store, error)
            self._finish(head, None, has_model=False)
            return
        except StateError as error:
            self._retry(head, str(error))
            return
        if self._link_model(head):
            self._finish(head, data, has_model=True)
        else:
            self._fuse(head)

    def stop(self) -> None:
        """End a fusion."""
        if self._fusing is not None:
            self._fusing[1].kill()

    def _link_model(self, head: HeadRecord) -> bool:
        """Link the training's model, if it is still there; return False if it is not."""
        name = folder_name(head.task.hex(), head.version, head.attempt)
        made, path = self._store.folder / "training" / name, self._store.folder / "model.onnx"
        if not (made / "model.onnx").is_file() or not _is_file(made / "head.onnx", head.file):
            return False
        link = path.with_name(".model.onnx-hardlink")  # as the temporary files that a start deletes
        with state_errors(path), deleted_on_failure(link):
            link.unlink(missing_ok=True)
            try:
                os.link(made / "model.onnx", link)
            except OSError:  # a file system without links
                shutil.copyfile(made / "model.onnx", link)
            link.replace(path)
        return True

    def _fuse(self, head: HeadRecord) -> None:
        job = Fusion(
            blobs=self._store.blobs.location,
            backbones=tuple(backbone.digest for backbone in self._task.manifest.backbones),
            head=head.file,
            path=str(self._store.folder / "model.onnx"),
        )
        child = Child(
            __name__,
            on_message=lambda data: self._ends.put(msgspec.msgpack.decode(data, type=Fused)),
            on_line=log.debug,
            on_end=self._ends.put,
            on_failure=lambda failure: self._ends.put(Fused(str(failure))),
        )
        child.send(msgspec.msgpack.encode(job))
        self._fusing = head, child

    def _end_fusion(self, head: HeadRecord) -> None:
        """Take what the fusion has sent; one of a head that is no longer current ends."""
        if self._fusing is None:
            return
        fused, child = self._fusing
        if fused.version != head.version:
            child.kill()
        with contextlib.suppress(queue.Empty):
            while True:
                end = self._ends.get_nowait()
                if isinstance(end, Fused):
                    self._fused(fused, end, is_current=fused.version == head.version)
                else:
                    self._fusing = None
                    if end and self._written != fused.version:
                        self._retry(fused, ending(end))

    def _fused(self, head: HeadRecord, fused: Fused, *, is_current: bool) -> None:
        if fused.lost:
            report_damage(self._task, self._store, BlobLost(fused.lost, fused.problem))
        elif fused.problem:
            event(log, logging.WARNING, "cannot write model.onnx", head=head.version, reason=fused.problem)
        if is_current:
            self._finish(head, self._store.blobs.read(head.file), has_model=not fused.problem)

    def _finish(self, head: HeadRecord, data: bytes | None, *, has_model: bool) -> None:
        """Write `head.onnx`, and delete older files that are of no use."""
        if not has_model:
            _delete(self._store.folder / "model.onnx")
        path = self._store.folder / "head.onnx"
        if data is None:
            _delete(path)
        else:
            write_atomically(path, data)
        self._written = head.version

    def _retry(self, head: HeadRecord, reason: str) -> None:
        self._retry_s = time.monotonic() + RETRY_S
        event(log, logging.WARNING, "cannot read a head's file: retrying", head=head.version, reason=reason)


def _is_file(path: Path, digest: bytes) -> bool:
    """Return True if a file can be read and has a digest."""
    with contextlib.suppress(StateError):
        return path.is_file() and file_digest(path) == digest
    return False


def _delete(path: Path) -> None:
    with state_errors(path):
        path.unlink(missing_ok=True)


def fused(job: Fusion) -> Fused:
    """Fuse a model, and write it."""
    from aggregator.graphs.fused_model import fuse

    blobs = open_blobs(job.blobs)
    try:
        backbones = [blobs.read(digest) for digest in job.backbones]
        write_atomically(Path(job.path), fuse(backbones, blobs.read(job.head)))
    except BlobLost as error:
        return Fused(str(error), lost=error.digest)
    except BackboneMismatch as error:
        return Fused(str(error))
    return Fused()


def main() -> None:
    """Fuse the model that the aggregator sends."""
    pipe = connect(sys.argv[1:])
    job = msgspec.msgpack.decode(pipe.recv_bytes(), type=Fusion)
    try:
        outcome = fused(job)
    except StateError:  # it is tried again
        sys.exit(1)
    pipe.send_bytes(msgspec.msgpack.encode(outcome))


if __name__ == "__main__":
    main()
