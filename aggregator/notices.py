"""Events that an embedded aggregator reports to its program."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class SubmissionAccepted:
    """A device's submission is stored."""

    device: str
    round: int | None
    """Its round; None without rounds."""
    images: int
    """Images that the device has read."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class HeadActivated:
    """The fleet is to use a head."""

    version: int
    reason: str
    """Why it is this one; empty for a new one."""


@dataclass(frozen=True, kw_only=True)
class HeadRejected:
    """A head is not to be used: it is less accurate, or fails on devices."""

    version: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class AggregatorFailed:
    """The aggregator has ended because of a failure, and starts again."""

    reason: str
    retry_s: float
    """Seconds until its next start."""


AggregatorEvent: TypeAlias = SubmissionAccepted | HeadActivated | HeadRejected | AggregatorFailed
