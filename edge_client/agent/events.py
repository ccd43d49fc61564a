"""Events and actions: what `machine.step` takes and returns."""

from dataclasses import dataclass

from edge_client.agent.upload_item import UploadItem
from protocol.wire.messages import BlobRef, Frame, HeadManifest, HeadRef, Receipt, RoundManifest, TaskManifest
from protocol.wire.transfer import Ranges


@dataclass(frozen=True)
class Connected:
    """A connection, with the broker's limit for packets if it sends one."""

    max_packet_bytes: int | None = None


@dataclass(frozen=True)
class Disconnected:
    """The connection is lost."""


@dataclass(frozen=True)
class Drained:
    """The broker has acknowledged everything that was sent."""


@dataclass(frozen=True)
class Unsendable:
    """The broker does not accept uploads, and why."""

    reason: str


@dataclass(frozen=True)
class Ticked:
    """Time has passed."""


@dataclass(frozen=True)
class AggregatorReconnected:
    """The aggregator has connected again; earlier requests may be lost."""


@dataclass(frozen=True)
class AggregatorStarted:
    """The aggregator has restarted and may have lost unfinished transfers."""


@dataclass(frozen=True)
class TaskSeen:
    """The retained task, or the stored one before the first connection (`recalled`)."""

    digest: bytes
    manifest: TaskManifest
    recalled: bool = False


@dataclass(frozen=True)
class OutboxSeen:
    """All items in the outbox."""

    items: tuple[UploadItem, ...]


@dataclass(frozen=True)
class RoundSeen:
    """The retained round, or the stored one before the first connection."""

    manifest: RoundManifest


@dataclass(frozen=True)
class HeadSeen:
    """The retained head manifest."""

    manifest: HeadManifest


@dataclass(frozen=True)
class FrameSeen:
    """A frame of a blob."""

    frame: Frame


@dataclass(frozen=True)
class ReceiptSeen:
    """The aggregator's answer on a transfer."""

    receipt: Receipt


@dataclass(frozen=True)
class DownloadOpened:
    """The number of bytes of a blob that are on disk."""

    digest: bytes
    offset: int


@dataclass(frozen=True)
class DownloadFinished:
    """A blob is complete; `valid` if its digest matches."""

    digest: bytes
    valid: bool


@dataclass(frozen=True)
class SubmissionBuilt:
    """A submission, or why there is none; `may_pass` if the next round or task may succeed."""

    task: bytes
    item: UploadItem | None
    round: int | None = None
    reason: str = ""
    may_pass: bool = False


@dataclass(frozen=True)
class HeadInstalled:
    """A head is in use, or was refused for a reason; `report` is its evaluation, `head` its `head_key`."""

    head: bytes
    report: UploadItem
    reason: str = ""


@dataclass(frozen=True)
class ImagesChanged:
    """The images differ from those of the last build."""


Event = (
    Connected | Disconnected | Drained | Unsendable | Ticked | AggregatorReconnected | AggregatorStarted | TaskSeen
    | OutboxSeen | RoundSeen | HeadSeen | FrameSeen | ReceiptSeen | DownloadOpened | DownloadFinished | SubmissionBuilt
    | HeadInstalled | ImagesChanged
)  # fmt: skip


@dataclass(frozen=True)
class Announce:
    """Publish presence and info."""


@dataclass(frozen=True)
class BuildSubmission:
    """Build a submission for the task, or for the round if it has rounds, with a sequence above `above`.

    It replaces a build in progress.
    """

    task: bytes
    manifest: TaskManifest
    round: RoundManifest | None = None
    above: int = 0


@dataclass(frozen=True)
class OpenDownload:
    """Find out how much of a blob is on disk; the result is DownloadOpened or DownloadFinished."""

    blob: BlobRef


@dataclass(frozen=True)
class RequestBlob:
    """Request bytes of a blob."""

    digest: bytes
    offset: int
    length: int


@dataclass(frozen=True)
class AppendBlob:
    """Write the next bytes of a blob."""

    digest: bytes
    data: bytes


@dataclass(frozen=True)
class FinishBlob:
    """Verify a complete blob."""

    digest: bytes


@dataclass(frozen=True)
class InstallHead:
    """Install and evaluate a head; `as_canary` if other devices do not get it yet."""

    task: bytes
    manifest: TaskManifest
    head: HeadRef
    as_canary: bool = False


@dataclass(frozen=True)
class RefuseHead:
    """Report that a head cannot be used, and why."""

    task: bytes
    manifest: TaskManifest
    head: HeadRef
    reason: str


@dataclass(frozen=True)
class SendFrames:
    """Send these bytes of an item in the outbox, one frame per range."""

    item: UploadItem
    ranges: Ranges


@dataclass(frozen=True)
class StoreReceipt:
    """Record that the aggregator has received an item."""

    item: UploadItem


@dataclass(frozen=True)
class ReportBlocked:
    """Store and publish what prevents uploads; empty if nothing does."""

    reason: str


@dataclass(frozen=True)
class Log:
    """Log a line for the operator."""

    text: str
    error: bool = False


@dataclass(frozen=True)
class Exit:
    """End the program."""

    code: int
    text: str = ""


Action = (
    Announce | BuildSubmission | OpenDownload | RequestBlob | AppendBlob | FinishBlob | InstallHead | RefuseHead
    | SendFrames | StoreReceipt | ReportBlocked | Log | Exit
)  # fmt: skip
