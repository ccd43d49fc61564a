"""The state of a rollout: which head the fleet uses, the candidate and its canaries. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from aggregator.coordination.canary_comparison import CanaryResult

RETAINED_HEADS = 5
"""Newest heads that a rollback can return to."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rollout]`: which devices evaluate a new head first, and how good it must be."""

    canary_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the devices that try a new head first; 0: every head goes to all devices at once."""
    min_canaries: Annotated[int, Meta(ge=1, le=65535)] = 3
    """Least number of canaries; fewer only if fewer devices are online.

    Also the least number of devices of which some can have the current head rejected.
    """
    tolerated_fraction: Annotated[float, Meta(ge=0, lt=0.5)] = 0.2
    """Share of canaries ignored as extremes; 0: a single canary can stop a head.

    At least one of three or more canaries. Also the fraction of all devices that may fail to use the current head.
    """
    margin: Annotated[float, Meta(ge=0, le=1)] = 0.02
    """Accuracy by which a new head may fall below the previous one."""
    canary_timeout_s: Annotated[float, Meta(gt=0, le=1e9)] = 600.0
    """Seconds after which canaries that have not answered are replaced."""


@dataclass(frozen=True)
class Trial:
    """A candidate and its canaries."""

    version: int
    since_s: float
    """When it was offered to canaries, or last to others (elapsed seconds)."""
    canaries: tuple[str, ...] = ()
    """Devices that must answer, by rank; empty until a device is online."""
    rank_limit: int = 0
    """Devices with a rank below this evaluate it."""
    answers: Mapping[str, CanaryResult] = field(default_factory=dict)
    """The evaluations of all devices, canaries or not."""

    @property
    def awaited(self) -> tuple[str, ...]:
        return tuple(device for device in self.canaries if device not in self.answers)


@dataclass(frozen=True)
class State:
    """Everything that a decision depends on."""

    newest: int = 0
    """The newest head known; it and older ones do not become candidates again."""
    current: int = 0
    """The head that devices use; 0 if there is none."""
    earlier: tuple[int, ...] = ()
    """Heads that were current before, the last one last."""
    is_watched: bool = False
    """The current head is rejected if too many devices cannot use it; not one that an operator has chosen."""
    trial: Trial | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)
    """Heads that are not to be used, with reasons."""
    forgotten: int = 0
    """Heads up to this one may have learned from a device that was forgotten; 0 if there is none."""


def retained_heads(state: State, versions: Iterable[int]) -> set[int]:
    """Return the heads, of all versions, that devices use or a rollback can return to."""
    candidate = {state.trial.version} if state.trial else set()
    before = {*state.earlier[-1:], *sorted(versions)[-RETAINED_HEADS:]}
    return {state.current, *candidate, *(version for version in before if version > state.forgotten)}


def without_forgotten(state: State, forgotten: int) -> State:
    """Return the state in which no head up to `forgotten` becomes current: it may contain a forgotten device.

    The current one stays until a newer head takes its place.
    """
    trial, rejected = state.trial, state.rejected
    if trial is not None and trial.version <= forgotten:
        rejected = {**rejected, trial.version: "it learned from a device that was forgotten"}
        trial = None
    earlier = tuple(version for version in state.earlier if version > forgotten)
    return replace(state, forgotten=forgotten, trial=trial, rejected=rejected, earlier=earlier)


def activated(state: State, version: int) -> State:
    """Return the state with this head current; another candidate remains one."""
    earlier = (*state.earlier, state.current)[-RETAINED_HEADS:] if state.current else state.earlier
    trial = None if state.trial is not None and state.trial.version == version else state.trial
    rejected = {other: reason for other, reason in state.rejected.items() if other != version}
    is_watched = bool(state.current)
    return replace(
        state, current=version, earlier=earlier, is_watched=is_watched, trial=trial, rejected=rejected
    )


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
    """Devices have evaluated a head."""

    version: int
    answers: Mapping[str, CanaryResult]


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
    """Every head's version with True; the one named with False unless the blobs that devices need are stored."""


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
