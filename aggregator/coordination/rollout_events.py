"""Events of a rollout, and the actions that follow: the inputs and outputs of its state machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from aggregator.coordination.canary_comparison import CanaryResult
from aggregator.coordination.rollout_state import State, Trial

CommandKind = Literal["rollback", "promote"]


@dataclass(frozen=True)
class HeadAdded:
    """A head was made; it is `now_s` (elapsed seconds)."""

    version: int
    now_s: float
    calibrates: int = 0
    """The head of which it is the calibrated version; 0 for a trained one."""


@dataclass(frozen=True)
class Ticked:
    """Time has passed: it is `now_s` (elapsed seconds), and these devices are online."""

    now_s: float
    online: frozenset[str]
    devices: int = 0
    """Devices whose prototypes are in the candidate."""


@dataclass(frozen=True)
class Evaluated:
    """A device has evaluated a head."""

    device: str
    version: int
    result: CanaryResult


@dataclass(frozen=True)
class FailuresReported:
    """Devices have reported, with reasons, that they cannot use the current head."""

    version: int
    failed: Mapping[str, str]
    devices: int
    """All devices that have evaluated it or are online."""


@dataclass(frozen=True)
class HeadCommand:
    """An operator's command to make a head current: an earlier one, or with `promote` the candidate."""

    kind: CommandKind
    version: int | None = None
    """None for the candidate, or the head before the current one."""
    heads: Mapping[int, bool] = field(default_factory=dict)
    """Every head's version with True; that of the command's with False unless the blobs that devices need are stored.

    It is empty until the command is carried out.
    """


Event = HeadAdded | Ticked | Evaluated | FailuresReported | HeadCommand


@dataclass(frozen=True)
class Activate:
    """Make a head current."""

    version: int
    reason: str


@dataclass(frozen=True)
class OfferToCanaries:
    """Offer the candidate to its canaries."""

    trial: Trial


@dataclass(frozen=True)
class Reject:
    """Give up a candidate."""

    version: int
    reason: str


@dataclass(frozen=True)
class RefuseCommand:
    """Refuse an operator's command."""

    reason: str


Action = Activate | OfferToCanaries | Reject | RefuseCommand
Step = tuple[State, tuple[Action, ...]]
