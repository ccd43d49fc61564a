"""What can happen to a device, and what it can do about it: the alphabet of `agent.step`."""

from dataclasses import dataclass

from edge_client.agent.upload_item import UploadItem
from protocol.wire.messages import BlobRef, Frame, HeadManifest, HeadRef, Receipt, RoundManifest, TaskManifest
from protocol.wire.transfer import Ranges


@dataclass(frozen=True)
class Connected:
    """There is a connection, to a broker that takes packets of so many bytes, if it says."""

    max_packet_bytes: int | None = None


@dataclass(frozen=True)
class Disconnected:
    """The connection is gone."""


@dataclass(frozen=True)
class Drained:
    """All that was sent has reached the broker."""


@dataclass(frozen=True)
class Unsendable:
    """The broker does not take what is sent up, and why."""

    reason: str


@dataclass(frozen=True)
class Ticked:
    """Time has passed."""


@dataclass(frozen=True)
class AggregatorBack:
    """The aggregator has connected again: what it was asked before may have met nobody."""


@dataclass(frozen=True)
class AggregatorStarted:
    """The aggregator has come back and may have forgotten what was on its way."""


@dataclass(frozen=True)
class TaskSeen:
    """The retained task, by the digest of its bytes; or the one that was known before there is a connection."""

    digest: bytes
    manifest: TaskManifest
    recalled: bool = False


@dataclass(frozen=True)
class OutboxSeen:
    """All that is in the outbox."""

    items: tuple[UploadItem, ...]


@dataclass(frozen=True)
class RoundSeen:
    """The retained round; or the one that was known before there is a connection."""

    manifest: RoundManifest


@dataclass(frozen=True)
class HeadSeen:
    """The retained head manifest."""

    manifest: HeadManifest


@dataclass(frozen=True)
class BlockSeen:
    """A piece of a blob."""

    frame: Frame


@dataclass(frozen=True)
class ReceiptSeen:
    """The aggregator's word on a transfer."""

    receipt: Receipt


@dataclass(frozen=True)
class DownloadStarts:
    """How many bytes of a wanted blob are on the disk already."""

    digest: bytes
    offset: int


@dataclass(frozen=True)
class DownloadEnded:
    """A blob is complete; `good` if its digest is right."""

    digest: bytes
    good: bool


@dataclass(frozen=True)
class SubmissionBuilt:
    """A submission was made, or could not be, and why; `may_pass` if the next round or task may go better."""

    task: bytes
    item: UploadItem | None
    round: int | None = None
    reason: str = ""
    may_pass: bool = False


@dataclass(frozen=True)
class HeadInstalled:
    """A head is in use and was evaluated, or was refused, and why; `report` is the word on it in the outbox.

    `head` is what `head_key` says of it.
    """

    head: bytes
    report: UploadItem
    reason: str = ""


@dataclass(frozen=True)
class ImagesChanged:
    """There are other images than before."""


Event = (
    Connected | Disconnected | Drained | Unsendable | Ticked | AggregatorBack | AggregatorStarted | TaskSeen
    | OutboxSeen | RoundSeen | HeadSeen | BlockSeen | ReceiptSeen | DownloadStarts | DownloadEnded | SubmissionBuilt
    | HeadInstalled | ImagesChanged
)  # fmt: skip


@dataclass(frozen=True)
class Announce:
    """Publish presence and info."""


@dataclass(frozen=True)
class BuildSubmission:
    """Make a submission for the task, in the place of one being made; its sequence is above `above`.

    With a program it is for the round.
    """

    task: bytes
    manifest: TaskManifest
    round: RoundManifest | None = None
    above: int = 0


@dataclass(frozen=True)
class OpenDownload:
    """Find out how much of a blob is there."""

    blob: BlobRef


@dataclass(frozen=True)
class Request:
    """Ask for bytes of a blob."""

    digest: bytes
    offset: int
    length: int


@dataclass(frozen=True)
class Append:
    """Write the next bytes of a blob."""

    digest: bytes
    data: bytes


@dataclass(frozen=True)
class Finish:
    """Check a complete blob."""

    digest: bytes


@dataclass(frozen=True)
class InstallHead:
    """Take a head into use and evaluate it; as a canary, if others do not get it yet."""

    task: bytes
    manifest: TaskManifest
    head: HeadRef
    as_canary: bool = False


@dataclass(frozen=True)
class RefuseHead:
    """Report that a head cannot be taken into use, and why."""

    task: bytes
    manifest: TaskManifest
    head: HeadRef
    reason: str


@dataclass(frozen=True)
class Send:
    """Send these bytes of something in the outbox, a frame for each range."""

    item: UploadItem
    ranges: Ranges


@dataclass(frozen=True)
class KeepReceipt:
    """Remember that something was received for good."""

    item: UploadItem


@dataclass(frozen=True)
class ReportBlocked:
    """Remember, and say to the operator, what keeps the device from uploading; nothing any more if empty."""

    reason: str


@dataclass(frozen=True)
class Log:
    """Say something to the person."""

    text: str
    error: bool = False


@dataclass(frozen=True)
class Exit:
    """End the program."""

    code: int
    text: str = ""


Action = (
    Announce | BuildSubmission | OpenDownload | Request | Append | Finish | InstallHead | RefuseHead | Send
    | KeepReceipt | ReportBlocked | Log | Exit
)  # fmt: skip
