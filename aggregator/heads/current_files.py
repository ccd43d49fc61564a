"""The current head as files in the state directory: `head.onnx`, and with one backbone `model.onnx`."""

import logging
from pathlib import Path

import onnx

from aggregator.graphs.fused_model import fuse
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.tasks.task import Task
from protocol.errors import BackboneMismatch, StateError
from protocol.log import event
from protocol.storage.blobstore import file_digest, state_errors, write_atomically

log = logging.getLogger(__name__)


def write_current_files(task: Task, store: Store, head: HeadRecord) -> None:
    """Write a head's files; the model first, so that the digest of `head.onnx` shows that both are written.

    Raises:
        StateError: they cannot be written.
    """
    path = store.folder / "head.onnx"
    if not (path.is_file() and file_digest(path) == head.file):
        data = _read(store, head.file, head) if head.file else None
        _replace(store.folder / "model.onnx", _model(task, store, head, data))
        _replace(path, data)


def _model(task: Task, store: Store, head: HeadRecord, data: bytes | None) -> bytes | None:
    """Return backbone and head as one file: the training's if it is still there, otherwise fused again."""
    if data is None or len(task.manifest.backbones) != 1:
        return None
    name = f"head-{head.version}" if head.tensors is None else f"round-{head.version - 1}"
    made = store.folder / "training" / name
    if (made / "model.onnx").is_file() and file_digest(made / "head.onnx") == head.file:
        with state_errors(made):
            return (made / "model.onnx").read_bytes()
    backbone = _read(store, task.manifest.backbones[0].digest, head)
    try:
        return None if backbone is None else fuse(backbone, data)
    except (BackboneMismatch, onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        event(log, logging.WARNING, "cannot write model.onnx", head=head.version, reason=error)
        return None


def _read(store: Store, digest: bytes, head: HeadRecord) -> bytes | None:
    try:
        return store.blobs.read(digest)
    except StateError as error:
        event(log, logging.ERROR, "cannot read a head's file", head=head.version, reason=error)
        return None


def _replace(path: Path, data: bytes | None) -> None:
    """Write a file, or delete an older one."""
    if data is not None:
        write_atomically(path, data)
    else:
        with state_errors(path):
            path.unlink(missing_ok=True)
