"""Events and actions: what `state_machine.step` takes and returns; received messages are events as well."""

from typing import Literal

import msgspec

from edge_client.core.state import Job, MissingSpace, State, UploadItem, Work
from protocol.mqtt import events as mqtt
from protocol.wire.messages import BlobRef, Frame, HeadManifest, HeadRef, Receipt, RoundManifest, TaskManifest
from protocol.wire.transfer import Ranges

HEAD_IN_USE = "head in use"
"""The log event of a head that is installed."""


class Occurrence(msgspec.Struct, frozen=True):
    """An event that is not a received message."""


class Ticked(Occurrence, frozen=True):
    """Time has passed."""


class AggregatorReconnected(Occurrence, frozen=True):
    """The aggregator has connected again; earlier requests may be lost."""


class AggregatorStarted(Occurrence, frozen=True):
    """The aggregator has restarted and may have lost unfinished transfers."""


class TaskSeen(Occurrence, frozen=True):
    """The retained task, as received in `payload`, or the stored one before the first connection (`recalled`).

    The aggregator has signed it anew if it `is_renewed`.
    """

    digest: bytes
    manifest: TaskManifest
    payload: bytes = b""
    is_renewed: bool = False
    recalled: bool = False


class OutboxSeen(Occurrence, frozen=True):
    """All items in the outbox."""

    items: tuple[UploadItem, ...]


class DownloadOpened(Occurrence, frozen=True):
    """The number of bytes of a blob that are on disk."""

    digest: bytes
    offset: int


class DownloadFinished(Occurrence, frozen=True):
    """A blob is complete; `valid` if its digest matches."""

    digest: bytes
    valid: bool


class SubmissionBuilt(Occurrence, frozen=True):
    """A submission, or why there is none.

    `may_pass` if the next round, the next task or more images may succeed; `no_images` if the device has none;
    `retries` if the same build may succeed, or have more images, later.
    """

    task: bytes
    item: UploadItem | None
    round: int | None = None
    reason: str = ""
    may_pass: bool = False
    no_images: bool = False
    retries: bool = False


class HeadInstalled(Occurrence, frozen=True):
    """A head is in use, or was refused for a reason; `report` is its evaluation, `head` its `head_key`.

    There is no report if the reason is this device's own.
    """

    head: bytes
    report: UploadItem | None
    reason: str = ""


class HeadReturned(Occurrence, frozen=True):
    """The head in use has failed, for a reason, and the previous one, by its `head_key`, is in use again."""

    head: bytes | None
    reason: str = ""


class BlobsMissing(Occurrence, frozen=True):
    """Blobs are missing or were damaged on disk; `during` is the job that ended for lack of them, if there was one."""

    digests: frozenset[bytes]
    during: Job | Literal[""] = ""


class BlobsStored(Occurrence, frozen=True):
    """All blobs on the disk: others were added or deleted."""

    digests: frozenset[bytes]


class ManifestsExpired(Occurrence, frozen=True):
    """The channels whose newest manifest has expired."""

    channels: frozenset[str]


class TaskRefused(Occurrence, frozen=True):
    """The fleet's task cannot be followed, for a reason: the device keeps the one that it has."""

    reason: str


class SpaceMissing(Occurrence, frozen=True):
    """The disk has too little space for some work, which has ended."""

    space: MissingSpace
    during: Work = "download"


class SpaceFreed(Occurrence, frozen=True):
    """The disk has the space that some work lacked."""

    works: frozenset[Work]


class RecordAdopted(Occurrence, frozen=True):
    """The device has what the aggregator names of its releases under differential privacy.

    The aggregator has the device's own, too, if it `is_complete`. `ends_task`: the device had lost its own, and takes
    part in no task without differential privacy any more.
    """

    is_complete: bool
    ends_task: bool = False


class ImagesChanged(Occurrence, frozen=True):
    """The images differ from those of the last build."""


Connection = mqtt.Connected | mqtt.Disconnected | mqtt.Drained | mqtt.Unsendable
"""Events of the broker's connection; an `Unsendable` is about the topic of uploads."""

Event = Occurrence | Connection | RoundManifest | HeadManifest | Frame | Receipt
"""The round is the retained one, or the stored one before the first connection."""


class Action(msgspec.Struct, frozen=True):
    """Something that the device program must do."""


class BuildSubmission(Action, frozen=True):
    """Build a submission for the task, or for the round if it has rounds, with a sequence above `above`.

    It replaces a build in progress.
    """

    task: bytes
    manifest: TaskManifest
    round: RoundManifest | None = None
    above: int = 0


class CancelJobs(Action, frozen=True):
    """Cancel jobs whose results are no longer needed: their processes are killed."""

    jobs: tuple[Job, ...]


class OpenDownload(Action, frozen=True):
    """Find out how much of a blob is on disk; the result is DownloadOpened, DownloadFinished or SpaceMissing.

    `missing` are all blobs that are to be downloaded, this one included.
    """

    blob: BlobRef
    missing: tuple[BlobRef, ...]


class RequestBlob(Action, frozen=True):
    """Request bytes of a blob."""

    digest: bytes
    offset: int
    length: int


class AppendBlob(Action, frozen=True):
    """Write the next bytes of a blob, of which `done` are on disk then; a complete one is verified."""

    blob: BlobRef
    data: bytes
    done: int


class InstallHead(Action, frozen=True):
    """Install and evaluate a head; `as_canary` is True if other devices do not get it yet."""

    task: bytes
    manifest: TaskManifest
    head: HeadRef
    as_canary: bool = False


class SendFrames(Action, frozen=True):
    """Send these bytes of an item in the outbox, one frame per range."""

    item: UploadItem
    ranges: Ranges


class SendRecord(Action, frozen=True):
    """Send the record of the device's releases, which the aggregator answers with its own; RecordAdopted follows."""


class CheckOutbox(Action, frozen=True):
    """Verify the items in the outbox: the aggregator has received other bytes than their digests are of."""


class DropForbidden(Action, frozen=True):
    """Delete what the device must not upload any more; OutboxSeen follows."""


class StoreReceipt(Action, frozen=True):
    """Record that the aggregator has received an item."""

    item: UploadItem


class Log(Action, frozen=True):
    """Log a line for the operator."""

    text: str
    error: bool = False


class Exit(Action, frozen=True):
    """End the program."""

    code: int
    text: str = ""


Step = tuple[State, tuple[Action, ...]]
"""The next state and the actions that an event leads to."""
