"""The state of a device that `machine.step` takes from one event to the next."""

import enum
from dataclasses import dataclass, field

from edge_client.agent.upload_item import UploadItem
from protocol.wire.messages import (
    MAX_CHUNK_BYTES,
    BlobRef,
    HeadManifest,
    HeadRef,
    RoundManifest,
    TaskManifest,
)
from protocol.wire.transfer import Ranges


class Mode(enum.Enum):
    """When the program exits."""

    SERVICE = "service"
    ONCE = "once"
    DRY_RUN = "dry-run"


@dataclass(frozen=True)
class Upload:
    """A transfer to the aggregator.

    Args:
        item: what is uploaded.
        missing: the ranges that the aggregator reported missing last.
        ranges: the ranges still to be sent before the next query.
        sent: everything missing and the query after it were sent.
        attempts: queries since the last new answer.
        damaged: times that the aggregator received another digest.
        due_s: time of the next query; None while frames are with the MQTT session.
    """

    item: UploadItem
    missing: Ranges = ()
    ranges: Ranges = ()
    sent: bool = False
    attempts: int = 0
    damaged: int = 0
    due_s: float | None = 0.0

    @property
    def digest(self) -> bytes:
        """Identifies the transfer."""
        return self.item.digest


@dataclass(frozen=True)
class Download:
    """A transfer of a blob to this device.

    Args:
        blob: what is downloaded.
        offset: bytes on disk, from the first one on.
        ahead: frames beyond `offset`, sorted by their offset.
        until: end of the last frame that was requested or is being broadcast; 0 if there is none.
        attempts: requests since the last new frame.
        damaged: times that the blob arrived with another digest.
        due_s: time of the next request; infinite until the bytes on disk are known.
    """

    blob: BlobRef
    offset: int
    ahead: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)
    until: int = 0
    attempts: int = 0
    damaged: int = 0
    due_s: float = 0.0


def head_key(head: HeadRef) -> bytes:
    """Return what distinguishes a head from the previous one: its file, or in rounds the tensors bound to it."""
    return (head.tensors or head.head).digest


@dataclass(frozen=True)
class State:
    """Everything that decisions depend on.

    Args:
        mode: when the program exits.
        device: the device's id.
        stored: digests of the blobs on disk.
        connected: there is a connection to the broker.
        chunk_bytes: payload of a frame, for the broker of the last connection.
        task: digest of the current task; None before the first one.
        manifest: the current task.
        task_confirmed: the broker has delivered a task, so it is not only the stored one.
        building: a submission is being built.
        images_changed: images changed since the last build began.
        received_submission: the task's submission that the aggregator has received.
        round: the newest round of any task.
        joined_round: number of the round of the last build.
        head: the newest head manifest of any task.
        installing: key of the head being installed.
        installed: key of the head in use.
        evaluated: key of the last head whose evaluation the aggregator has received.
        refused: key of the last head that was refused, and why.
        download: the download in progress.
        uploads: the uploads, the current one first.
        blocked_reason: what prevents uploads; empty if nothing does.
    """

    mode: Mode
    device: str = ""
    stored: frozenset[bytes] = frozenset()
    connected: bool = False
    chunk_bytes: int = MAX_CHUNK_BYTES
    task: bytes | None = None
    manifest: TaskManifest | None = None
    task_confirmed: bool = False
    building: bool = False
    images_changed: bool = True
    received_submission: UploadItem | None = None
    round: RoundManifest | None = None
    joined_round: int | None = None
    head: HeadManifest | None = None
    installing: bytes | None = None
    installed: bytes | None = None
    evaluated: bytes | None = None
    refused: tuple[bytes, str] | None = None
    download: Download | None = None
    uploads: tuple[Upload, ...] = ()
    blocked_reason: str = ""
