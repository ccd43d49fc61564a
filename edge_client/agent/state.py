"""What a device knows of itself: the state that `agent.step` takes from one event to the next."""

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
    """When the program ends."""

    SERVICE = "service"
    ONCE = "once"
    DRY_RUN = "dry-run"


@dataclass(frozen=True)
class Upload:
    """Something on its way to the aggregator.

    Args:
        item: what it is.
        missing: what the aggregator has said last that it misses.
        ranges: those of its bytes that are still to be sent, before it is asked what is missing now.
        sent: all that was missing was sent, and the question after it.
        attempts: questions since the last answer that was new.
        broken: times that it has arrived as something else.
        due_s: when to ask; None while frames are with the session.
    """

    item: UploadItem
    missing: Ranges = ()
    ranges: Ranges = ()
    sent: bool = False
    attempts: int = 0
    broken: int = 0
    due_s: float | None = 0.0

    @property
    def digest(self) -> bytes:
        """Names the transfer."""
        return self.item.digest


@dataclass(frozen=True)
class Download:
    """A blob on its way here.

    Args:
        blob: what it is.
        offset: its first bytes, so many, are on the disk.
        ahead: pieces that have come before their turn, by their offset; none begins at `offset` or before.
        until: where the last frame ends that was asked for or is on its way to the whole fleet; 0 if none is.
        attempts: requests since the last frame that was new.
        broken: times that it has arrived as something else.
        due_s: when to ask again; infinite before it is known how much is on the disk.
    """

    blob: BlobRef
    offset: int
    ahead: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)
    until: int = 0
    attempts: int = 0
    broken: int = 0
    due_s: float = 0.0


def head_key(head: HeadRef) -> bytes:
    """What tells a head from the one before: its file, or with a program what is bound to it."""
    return (head.tensors or head.head).digest


@dataclass(frozen=True)
class State:
    """Everything a decision depends on.

    Args:
        device: the device's name.
        chunk_bytes: payload in a frame, for the broker of the last connection.
        stored: digests of the blobs on the disk.
        task: identity of the current task; None before one was seen.
        confirmed: the broker has said that this is the task, or another one.
        working: a submission is being made now.
        stale: images changed since the submission that was made or is being made.
        submitted: the submission of the current task that has its receipt.
        round: the newest round seen, of whatever task.
        joined: number of the round that a submission was made for or is being made for.
        head: the newest head manifest seen, of whatever task.
        installed: key of the head in use (`head_key`).
        evaluated: key of the last head whose evaluation has its receipt.
        refused: key of the last head that was not taken into use, and why.
        hindrance: what keeps the device from uploading; empty if nothing does.
    """

    mode: Mode
    device: str = ""
    stored: frozenset[bytes] = frozenset()
    connected: bool = False
    chunk_bytes: int = MAX_CHUNK_BYTES
    task: bytes | None = None
    manifest: TaskManifest | None = None
    confirmed: bool = False
    working: bool = False
    stale: bool = True
    submitted: UploadItem | None = None
    round: RoundManifest | None = None
    joined: int | None = None
    head: HeadManifest | None = None
    installing: bytes | None = None
    installed: bytes | None = None
    evaluated: bytes | None = None
    refused: tuple[bytes, str] | None = None
    download: Download | None = None
    uploads: tuple[Upload, ...] = ()
    hindrance: str = ""
