"""The state of a device as a job has it: what it reads was given, and what it writes is its result."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from edge_client.core.state import Kind, UploadItem
from edge_client.store.disk_space import require_space
from edge_client.store.image_group_record import Partition
from edge_client.store.job_folder import BLOBS, LAST_SUBMISSION, Job, KeptItem, Run
from edge_client.store.outbox import require_room
from edge_client.store.stored_values import Heads, SubmissionSequence
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


class JobOutbox:
    """The outbox as it was at the start of a job, with the items that the job leaves."""

    def __init__(self, folder: Path, job: Job, note: Callable[..., None]) -> None:
        self._folder = folder
        self._note = note
        self._items = job.items
        self.kept: list[KeptItem] = []
        self.was_released = False

    def items(self) -> tuple[UploadItem, ...]:
        """Return all items: submissions first, and waiting ones before acknowledged ones."""
        return self._items

    def newest_submission(self) -> UploadItem | None:
        """Return the submission that waits, or else the one acknowledged last."""
        return next((item for item in self._items if item.kind == "submission"), None)

    def payload(self, item: UploadItem) -> bytes | None:
        """Return all bytes of the newest submission; None if they are not given, or have changed."""
        file = self._folder / LAST_SUBMISSION
        with state_errors(file), contextlib.suppress(FileNotFoundError):
            data = file.read_bytes()
            return data if digest_of(data) == item.digest else None
        return None

    def keep(
        self,
        kind: Kind,
        payload: bytes,
        *,
        task: bytes,
        about: str,
        facts: tuple[msgspec.Struct, ...] = (),
        deletes_keys: bool = False,
    ) -> UploadItem:
        """Leave an item for the outbox; `Outbox.keep` describes the rest.

        Raises:
            ProtofleetError: the submission is larger than the outbox.
            StateError: the disk is full or fails; DiskAlmostFull if a submission would use the reserve.
        """
        item = UploadItem(digest_of(payload), len(payload), kind, task, about)
        if kind == "submission":
            require_room(len(payload))
            require_space(
                self._folder, 3 * len(payload), what="the submission"
            )  # here, in SQLite's log, and in SQLite
        with state_errors(self._folder):
            (self._folder / kind).write_bytes(payload)
        self.kept.append(KeptItem(item=item, file=kind))
        self.was_released |= deletes_keys
        self._note(*facts)
        return item

    def assign(self, item: UploadItem, task: bytes) -> UploadItem:
        """Return an item as one of another task, for which it is valid, too."""
        assigned = replace(item, task=task)
        if item.task != task:
            self.kept.append(KeptItem(item=assigned, file=""))
        return assigned


class JobGroups:
    """The groups of images as a job has them."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition

    def read(self) -> Partition:
        """Return all groups."""
        return self.partition

    def write(self, _before: Partition, after: Partition) -> None:
        """Replace all groups."""
        self.partition = after


class JobClock:
    """The elapsed time of the state directory, continued from the start of the job."""

    def __init__(self, now_s: float) -> None:
        self._ahead_s = now_s - time.monotonic()

    def now_s(self) -> float:
        """Return the elapsed time, seconds."""
        return self._ahead_s + time.monotonic()

    def keep(self) -> None:
        """Store nothing: the service does."""


class JobState:
    """The state in `folder` as a job sees it, with its own folder for what it leaves."""

    def __init__(self, folder: Path, job_folder: Path, job: Job, run: Run) -> None:
        self.folder = folder
        self.blobs = JobBlobs(folder / "blobs", job_folder / BLOBS)
        self.outbox = JobOutbox(job_folder, job, self.set)
        self.image_groups = JobGroups(job.partition)
        self.clock = JobClock(job.now_s)
        self.changes: dict[str, msgspec.Raw] = {}
        self._facts, self._secret, self._number = dict(job.facts), run.secret, job.number

    def get(self, kind: type[Fact]) -> Fact:
        """Return the fact of a type, or its default."""
        value = self._facts.get(kind.__name__)
        return kind() if value is None else msgspec.json.decode(value, type=kind)

    def set(self, *facts: msgspec.Struct) -> None:
        """Note facts, which are stored with the result."""
        for fact in facts:
            value = msgspec.Raw(msgspec.json.encode(fact))
            self._facts[type(fact).__name__] = self.changes[type(fact).__name__] = value

    def heads_in_use(self) -> Heads:
        """Return the head in use and the one before it."""
        return self.get(Heads)

    def secret(self, *, keep: bool = True) -> bytes:  # noqa: ARG002 - as of DeviceState
        """Return the device's secret; empty if this job gets none."""
        return self._secret

    def next_number(self, kind: type[SubmissionSequence], *, above: int = 0) -> int:  # noqa: ARG002 - as of DeviceState
        """Return and note the free number, which is greater than the stored one and `above`."""
        self.set(kind(self._number))
        return self._number
