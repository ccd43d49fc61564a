"""Files that devices and trainings need: verified before use, and restored from another file with the same contents."""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from aggregator.algorithms.tensors import pack_tensors
from aggregator.storage.store import Store
from aggregator.storage.stored_values import LostFiles
from aggregator.tasks.task_preparation import Task
from protocol.errors import BlobLost, StateError
from protocol.log import event
from protocol.storage.blobstore import file_digest
from protocol.wire.codec import digest_of, encode

log = logging.getLogger(__name__)

VERIFY_S = 60.0
"""Seconds for which a verified file is used without being read as a whole again."""


class Restoration:
    """Verifies the blobs of a task."""

    def __init__(self, task: Task, store: Store) -> None:
        self._task = task
        self._store = store
        self._verified_s: dict[bytes, float] = {}
        """The time until which each blob counts as verified."""
        self._lost: set[bytes] = set()
        store.facts.delete(LostFiles)

    def verify(self, digests: Iterable[bytes]) -> None:
        """Verify blobs, and restore those that are missing or damaged.

        Raises:
            BlobLost: one cannot be restored.
            StateError: one cannot be read or written.
        """
        for digest in digests:
            now_s = time.monotonic()
            if now_s >= self._verified_s.get(digest, 0.0):
                self._verify(digest)
                self._verified_s[digest] = now_s + VERIFY_S

    def verify_all(self, digests: Iterable[bytes]) -> None:
        """Verify blobs now; those that cannot be restored are logged, and `status` shows them."""
        self._verified_s.clear()
        for digest in digests:
            with contextlib.suppress(StateError):
                self.verify([digest])

    def _verify(self, digest: bytes) -> None:
        try:
            self._store.blobs.verified_path(digest)
        except BlobLost as error:
            event(log, logging.ERROR, "blob missing or damaged on disk", reason=error)
            if not self._restore(digest):
                self._show(self._lost | {digest})
                raise
        self._show(self._lost - {digest})

    def _restore(self, digest: bytes) -> bool:
        """Store a blob again; return False if no other file has its contents."""
        for file in self._copies():
            with contextlib.suppress(StateError):
                if file_digest(file) == digest:
                    self._store.put_file(file)
                    event(log, logging.WARNING, "blob restored: check the disk", digest=digest, copy=file)
                    return True
        for data in self._made():
            if digest_of(data) == digest:
                self._store.blobs.put(data)
                event(log, logging.WARNING, "blob restored: check the disk", digest=digest)
                return True
        return False

    def _copies(self) -> Iterator[Path]:
        """Yield the files that are stored as blobs too."""
        folder = self._store.folder
        yield from self._task.backbone_files
        yield folder / "head.onnx"
        yield from (folder / "training").glob("*/*.onnx")
        yield from (folder / "training").glob("*/*.bin")

    def _made(self) -> Iterator[bytes]:
        """Yield what follows from the task file."""
        file = self._task.file
        yield encode(self._task.manifest)
        if (feature_map := self._task.feature_map) is not None:
            from aggregator.graphs.head_export import map_to_onnx

            yield map_to_onnx(feature_map, num_classes=len(file.classes))
        if file.learning is not None:
            yield pack_tensors(
                file.learning.first_tensors(
                    feature_size=self._task.feature_size,
                    num_classes=len(file.classes),
                    seed=file.client.seed,
                )
            )

    def _show(self, lost: set[bytes]) -> None:
        """Store for `status` what is lost."""
        if lost != self._lost:
            self._lost = lost
            self._store.facts.put(LostFiles(tuple(sorted(digest.hex() for digest in lost))))
