"""What a device knows of itself: the state that `agent.step` takes from one event to the next."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.messages import BlobRef, HeadManifest, HeadRef, RoundManifest, TaskManifest


class Mode(enum.Enum):
    """When the program ends."""

    SERVICE = "service"
    ONCE = "once"
    DRY_RUN = "dry-run"


@dataclass(frozen=True)
class Upload:
    """Something on its way to the aggregator: a submission, or the evaluation of `head`.

    Without `due_s` its bytes are still with the session.
    """

    digest: bytes
    head: bytes | None = None
    attempts: int = 0
    broken: int = 0
    due_s: float | None = 0.0


@dataclass(frozen=True)
class Download:
    """A blob on its way here: `offset` bytes are on the disk, asked for up to `until`."""

    blob: BlobRef
    offset: int
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
        stored: digests of the blobs on the disk.
        task: identity of the current task; None before one was seen.
        confirmed: the broker has said that this is the task, or another one.
        working: a submission is being made now.
        stale: pictures changed since the submission that was made or is being made.
        submitted: the submission of the current task that has its receipt.
        round: the newest round seen, of whatever task.
        joined: number of the round that a submission was made for or is being made for.
        head: the newest head manifest seen, of whatever task.
        releases: the newest release seen of each task.
        installed: key of the head in use (`head_key`).
        evaluated: key of the last head whose evaluation has its receipt.
        refused: key of the last head that was not taken into use, and why.
    """

    mode: Mode
    device: str = ""
    stored: frozenset[bytes] = frozenset()
    connected: bool = False
    task: bytes | None = None
    manifest: TaskManifest | None = None
    confirmed: bool = False
    working: bool = False
    stale: bool = True
    submitted: bytes | None = None
    round: RoundManifest | None = None
    joined: int | None = None
    head: HeadManifest | None = None
    releases: Mapping[bytes, int] = field(default_factory=dict)
    installing: bytes | None = None
    installed: bytes | None = None
    evaluated: bytes | None = None
    refused: tuple[bytes, str] | None = None
    download: Download | None = None
    uploads: tuple[Upload, ...] = ()
