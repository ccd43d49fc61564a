"""Settings of collections and rounds, and which submissions and devices count. Pure.

Without rounds, a submission waits until a head is trained on it. With rounds, it belongs to the round of its number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a task that close its collections or rounds."""

    quorum: int
    deadline_s: float
    retrain_after: int = 1
    grace_s: float = 0.0
    min_devices: int = 1
    staleness: int = 0
    """Rounds that a submission may be behind and still count."""
    rounds: int | None = None
    """Number of rounds; None for an endless sequence of collections without rounds."""
    devices: frozenset[str] | None = None
    """The only devices that may take part; None for any."""


@dataclass(frozen=True)
class Entry:
    """A device's submission: its sequence number, digest, time of arrival (elapsed seconds) and round."""

    sequence: int
    digest: bytes
    received_s: float
    round: int = 0

    @property
    def rank(self) -> tuple[int, int, bytes]:
        """The sort key: a device's greatest counts. The digest breaks ties, never the order of arrival."""
        return self.round, self.sequence, self.digest


@dataclass(frozen=True)
class DeviceDecisions:
    """Decisions about devices: quarantine, release, enrollment."""

    quarantined: frozenset[str] = frozenset()
    """Devices whose submissions do not count."""
    released: frozenset[str] = frozenset()
    """Devices whose submissions count even if the newest head excluded them."""
    enrolled: frozenset[str] | None = None
    """The only devices whose submissions count; None for any."""
    forgotten: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Devices whose submissions were deleted, and the newest head that may have learned from each."""

    def counts(self, device: str) -> bool:
        return device not in self.quarantined and (self.enrolled is None or device in self.enrolled)


def is_over(head_version: int, settings: Settings) -> bool:
    """Return True if all rounds have closed, the newest head being `head_version`."""
    return settings.rounds is not None and head_version >= settings.rounds


def still_counts(entry: Entry, head_version: int, settings: Settings) -> bool:
    """Return True if a submission may be part of the open collection or a later one."""
    return settings.rounds is None or (
        entry.round >= head_version - settings.staleness and not is_over(head_version, settings)
    )
