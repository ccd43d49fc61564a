"""Writes downloaded blobs to disk, and deletes blobs that are no longer needed."""

import logging
from collections.abc import Sequence
from pathlib import Path

from edge_client.core import events
from edge_client.core.state import State
from edge_client.progress_bar import Progress
from edge_client.store.device_state import DeviceState
from edge_client.store.disk_space import DiskAlmostFull, require_space
from edge_client.store.stored_values import Heads, StoredInitialModel, StoredLocalModel
from protocol.errors import BackboneMismatch, TransferError
from protocol.log import event
from protocol.storage.blobstore import BlobStore, file_digest
from protocol.wire.messages import BlobRef

log = logging.getLogger(__name__)


class BlobDownloads:
    """The downloads into a device's state directory."""

    def __init__(self, store: DeviceState) -> None:
        self._store = store
        self._blobs = store.blobs
        self._progress = Progress("downloading")

    def open(
        self, blob: BlobRef, missing: Sequence[BlobRef]
    ) -> events.DownloadOpened | events.DownloadFinished:
        """Return how much of a blob is on disk; a complete one is verified.

        Raises:
            DiskAlmostFull: there is no space for all `missing` blobs: nothing of a task that does not fit the disk is
                downloaded.
        """
        offset = self._blobs.partial_bytes(blob.digest)
        left = sum(max(0, each.size_bytes - self._blobs.partial_bytes(each.digest)) for each in missing)
        require_space(self._blobs.folder, left, what=_described(missing))
        fields = {"blob": blob.name, "bytes": blob.size_bytes, "resumed_at": offset or None}
        event(log, logging.INFO, "downloading", **fields)
        self._progress = Progress(f"downloading {blob.name}")
        if offset >= blob.size_bytes:
            return self._finish(blob.digest)
        return events.DownloadOpened(blob.digest, offset)

    def append(self, append: events.AppendBlob) -> events.DownloadFinished | None:
        """Write the next bytes of a blob; a complete one is verified, and deleted if it is damaged.

        Raises:
            DiskAlmostFull: other files have taken the space meanwhile; nothing is written.
        """
        left = append.blob.size_bytes - append.done + len(append.data)
        try:
            require_space(self._blobs.folder, left, what=_described([append.blob]))
        except DiskAlmostFull:
            self._progress.close()
            raise
        self._blobs.append(append.blob.digest, append.data)
        self._progress.update(append.done, append.blob.size_bytes)
        return self._finish(append.blob.digest) if append.done == append.blob.size_bytes else None

    def _finish(self, digest: bytes) -> events.DownloadFinished:
        self._progress.close()
        try:
            self._blobs.finish(digest)
        except TransferError as error:
            log.warning("%s", error)
            return events.DownloadFinished(digest, valid=False)
        return events.DownloadFinished(digest, valid=True)

    def delete_unused(self, state: State) -> frozenset[bytes]:
        """Delete blobs that neither the task nor the heads in use need, and return the digests that remain.

        Nothing is deleted while a head is being installed. The previous head stays, so that going back to it needs no
        network.
        """
        if state.task is None or state.installing is not None:
            return state.stored
        store = self._store
        used = {state.task, *(blob.digest for blob in state.required_blobs)}
        used.add(state.durable.round)
        facts = (store.get(StoredLocalModel), store.get(StoredInitialModel))
        used |= {fact.digest for fact in facts} | store.image_groups.files()
        heads = store.get(Heads)
        for head in filter(None, (heads.installed, heads.previous)):
            # Backbones too: the head of an earlier task stays in use until there is one of this task.
            used |= {head.head, head.tensors, head.local_model, *head.backbones}
        self._blobs.keep_only(used - {b""})
        return frozenset(self._blobs.digests())


def _described(blobs: Sequence[BlobRef]) -> str:
    """Return what is downloaded, for an error message."""
    return repr(blobs[0].name) if len(blobs) == 1 else f"the task's {len(blobs)} missing files"


def import_backbones(store: BlobStore, files: Sequence[Path], blobs: Sequence[BlobRef]) -> None:
    """Store local copies of a task's backbones; one for which there is no space is left to the download, which waits.

    Raises:
        BackboneMismatch: a file is not one of the task's backbones.
    """
    wanted = {blob.digest: blob.name for blob in blobs}
    for path in files:
        digest = file_digest(path)
        if digest not in wanted:
            expected = " or ".join(f"{name} (sha256 {each.hex()})" for each, name in wanted.items())
            raise BackboneMismatch(
                f"{path} is not the task's backbone: expected {expected}, got sha256 {digest.hex()}; "
                "omit --backbone to download it"
            )
        if digest not in store:
            try:
                require_space(store.folder, path.stat().st_size, what=f"a copy of {path}")
            except DiskAlmostFull as error:
                event(log, logging.WARNING, "local backbone not copied", file=path, error=error)
                continue
        store.put(path.read_bytes())
