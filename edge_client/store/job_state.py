"""A device's state as a job has it: what it reads was given, and what it writes is its result."""

import contextlib
import time
from pathlib import Path

import msgspec

from edge_client.core.state import Kind, UploadItem
from edge_client.store.disk_space import require_space
from edge_client.store.job_folder import BLOBS, ITEM, LAST_SUBMISSION, Changes, Snapshot
from edge_client.store.outbox import require_room
from protocol.errors import BlobLost
from protocol.storage.blobstore import BlobStore, state_errors
from protocol.storage.facts import Fact
from protocol.wire.codec import digest_of


class JobBlobs(BlobStore):
    """The device's blobs, of which a job deletes none; what it puts is in its own folder."""

    def __init__(self, folder: Path, own: Path) -> None:
        super().__init__(folder)
        self._own = own
        self.added: list[bytes] = []

    def create(self) -> None:
        """The folder exists."""

    def path(self, digest: bytes) -> Path:
        """Return the path of a blob, whether it exists or not."""
        return (self._own if digest in self.added else self.folder) / digest.hex()

    def put(self, data: bytes) -> bytes:
        """Store `data` and return its digest."""
        digest = digest_of(data)
        if digest not in self.added:  # the service may delete its own until the result refers to it
            with state_errors(self._own):
                self._own.mkdir(exist_ok=True)
                (self._own / digest.hex()).write_bytes(data)
            self.added.append(digest)
        return digest

    def _deleted(self, digest: bytes) -> BlobLost:
        return BlobLost(digest, f"{self.path(digest)} was damaged on disk")


class JobState:
    """A job's view of the state in `folder`: what it reads was given, and what it changes is in a folder of its own.

    Args:
        own: the job's folder.
        secret: the device's, from which shuffles and noise are derived; empty if the job gets none.
    """

    def __init__(self, folder: Path, own: Path, given: Snapshot, *, secret: bytes) -> None:
        self.folder, self.secret = folder, secret
        self.number, self.last = given.number, given.last
        self.partition = given.partition
        """The groups of images, which a build replaces."""
        self.blobs = JobBlobs(folder / "blobs", own / BLOBS)
        self.own, self._given = own, given
        self._set: dict[str, msgspec.Raw] = {}
        self._item: UploadItem | None = None
        self._ahead_s = given.now_s - time.monotonic()

    @property
    def changes(self) -> Changes:
        """Return what the job has changed."""
        return Changes(
            facts=self._set,
            partition=None if self.partition is self._given.partition else self.partition,
            item=self._item,
            blobs=tuple(self.blobs.added),
        )

    def now_s(self) -> float:
        """Return the elapsed time of the state directory, seconds."""
        return self._ahead_s + time.monotonic()

    def get(self, kind: type[Fact]) -> Fact:
        """Return the fact of a type, or its default."""
        value = self._set.get(kind.__name__) or self._given.facts.get(kind.__name__)
        return kind() if value is None else msgspec.json.decode(value, type=kind)

    def set(self, *facts: msgspec.Struct) -> None:
        """Note facts, which are stored with the result."""
        self._set.update({type(fact).__name__: msgspec.Raw(msgspec.json.encode(fact)) for fact in facts})

    def last_submission(self) -> bytes | None:
        """Return the bytes of the newest submission; None if they are not given, or have changed."""
        file = self.own / LAST_SUBMISSION
        with state_errors(file), contextlib.suppress(FileNotFoundError):
            data = file.read_bytes()
            return data if self.last is not None and digest_of(data) == self.last.digest else None
        return None

    def leave(self, kind: Kind, payload: bytes, *, task: bytes, about: str) -> UploadItem:
        """Leave an item for the outbox.

        Raises:
            ProtofleetError: the submission is larger than the outbox.
            StateError: the disk is full or fails; DiskAlmostFull if a submission would use the reserve.
        """
        item = UploadItem(digest_of(payload), len(payload), kind, task, about)
        if kind == "submission":
            require_room(len(payload))
            # Here, in SQLite's log, and in SQLite.
            require_space(self.own, 3 * len(payload), what="the submission")
        with state_errors(self.own):
            (self.own / ITEM).write_bytes(payload)
        self._item = item
        return item
