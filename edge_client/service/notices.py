"""Events that an embedded device reports to its program."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class BrokerConnected:
    """The device is connected."""

    broker: str


@dataclass(frozen=True, kw_only=True)
class BrokerDisconnected:
    """The connection is lost, or an attempt to connect has failed; the next one follows."""

    broker: str
    reason: str
    retry_s: float


@dataclass(frozen=True, kw_only=True)
class TaskReceived:
    """The device follows a task, also one of an earlier run."""

    task: str
    """Digest of the manifest, in hex."""
    algorithm: str
    classes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SubmissionReceived:
    """The aggregator has received a submission."""

    submission: str
    """Digest of the submission, in hex."""


@dataclass(frozen=True, kw_only=True)
class HeadInstalled:
    """A head is in use."""

    version: int
    """The head's number in its task."""
    round: int | None
    """The round that trained it; None without rounds."""
    correct: int
    """Held-out images that it classifies correctly."""
    images: int
    """Held-out images that it was evaluated on."""


@dataclass(frozen=True, kw_only=True)
class ProblemReported:
    """Something fails, and the device goes on."""

    kind: str
    """`task`, `space`, `download`, `manifest`, `build` (of a submission), `head`, `upload` or `link`."""
    text: str


DeviceEvent: TypeAlias = (
    BrokerConnected | BrokerDisconnected | TaskReceived | SubmissionReceived | HeadInstalled | ProblemReported
)
