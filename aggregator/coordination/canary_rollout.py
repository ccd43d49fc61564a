"""Which head the fleet uses: a pure state machine, (state, event) -> (state, actions).

The first head of a task goes to every device, and so does every later one if no canaries are configured. Otherwise a
new head is a candidate: a fraction of the devices, the canaries, evaluate it first. It becomes current once all
canaries have evaluated it and its accuracy on their held-out images is at most `margin` below the previous head's. It
is rejected after the last evaluation if it is worse, and at once if too many canaries cannot use it. A newer head
replaces a candidate.

No canary of three or more decides alone (`aggregator.coordination.canary_comparison`).

Canaries that do not answer within a timeout are replaced by other devices. Where there are no others, or a newer head
arrives, the candidate is decided without as many of them as may fail to use it, and without those that are offline.

After that all devices evaluate the head. If more of them cannot use it than are tolerated, at least two of at least
`min_canaries`, it is rejected, and the head before it is current again. An operator's command overrides all of it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from aggregator.coordination.canary_comparison import (
    CanaryResult,
    is_accepted,
    one_decides,
    summary,
    tolerated,
)
from protocol.wire.canary_rank import canary_rank

RETAINED_HEADS = 5
"""Newest heads that a rollback can return to."""

_ROUNDING = 1e-9

CommandKind = Literal["rollback", "promote"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rollout]`: which devices evaluate a new head first, and how good it must be."""

    canary_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Fraction of the devices that are canaries; 0 gives every head to all devices at once."""
    min_canaries: Annotated[int, Meta(ge=1, le=65535)] = 3
    """Least number of canaries; fewer if the fleet has fewer devices, or after `canary_timeout_s` fewer are online.

    Also the least number of devices of which some can have the current head rejected.
    """
    tolerated_fraction: Annotated[float, Meta(ge=0, lt=0.5)] = 0.2
    """Fraction of the canaries, at least one of three or more, that does not decide; 0 lets each one decide.

    Also the fraction of all devices that may fail to use the current head.
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

    @property
    def awaited(self) -> tuple[str, ...]:
        """Canaries that have not answered yet."""
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


@dataclass(frozen=True)
class HeadAdded:
    """A head was trained; it is `now_s` (elapsed seconds)."""

    version: int
    now_s: float


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
class CommandReceived:
    """An operator's command to make a head current: an earlier one, or with `promote` the candidate.

    `heads` maps every head's version to True if all blobs that devices need for it are stored.
    """

    kind: CommandKind
    version: int | None
    heads: Mapping[int, bool]


Event = HeadAdded | Ticked | Evaluated | FailuresReported | CommandReceived


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


def initial_state(versions: Iterable[int]) -> State:
    """Return the state of a task whose heads all went to every device, one after the other."""
    state = State()
    for version in sorted(versions):
        state = replace(_activated(state, version), newest=version)
    return state


def retained_heads(state: State, versions: Iterable[int]) -> set[int]:
    """Return the heads, of all versions, that devices use or a rollback can return to."""
    candidate = {state.trial.version} if state.trial else set()
    return {state.current, *candidate, *state.earlier[-1:], *sorted(versions)[-RETAINED_HEADS:]}


def step(state: State, event: Event, *, settings: Settings) -> Step:
    """Apply an event."""
    match event:
        case HeadAdded(version=version, now_s=now_s) if version > state.newest:
            return _added(replace(state, newest=version), now_s, settings)
        case Ticked() if state.trial is not None:
            return _ticked(state, state.trial, event, settings)
        case Evaluated(device=device, version=version, result=result):
            if state.trial is not None and state.trial.version == version:
                trial = replace(state.trial, answers={**state.trial.answers, device: result})
                return _decide(replace(state, trial=trial), trial, settings)
        case FailuresReported(version=version) if version == state.current and state.is_watched:
            return _failures_reported(state, event, settings)
        case CommandReceived():
            return _commanded(state, event)
    return state, ()


def _added(state: State, now_s: float, settings: Settings) -> Step:
    version = state.newest
    if not state.current or not settings.canary_fraction:
        return _activated(state, version), (Activate(version, ""),)
    actions: tuple[Action, ...] = ()
    if (
        state.trial is not None
    ):  # decided if possible: heads may arrive faster than a silent canary is replaced
        state, actions = _decide(state, state.trial, settings, is_late=True)
    if state.trial is not None:
        state, actions = _rejected(state, state.trial.version, f"head {version} has replaced it")
    return replace(state, trial=Trial(version, now_s)), actions


def _ticked(state: State, trial: Trial, tick: Ticked, settings: Settings) -> Step:
    if not settings.canary_fraction:
        return _activated(state, trial.version), (
            Activate(trial.version, "canaries are no longer configured"),
        )
    reachable = tick.online.intersection(trial.canaries) | trial.answers.keys()
    wanted = max(min(len(trial.canaries), max(1, len(reachable))), _wanted(tick, settings))
    is_waiting = bool(trial.canaries) or len(tick.online) < min(settings.min_canaries, tick.devices)
    if is_waiting and tick.now_s < trial.since_s:  # a reboot has cost the clock some seconds
        return replace(state, trial=replace(trial, since_s=tick.now_s)), ()
    if is_waiting and tick.now_s < trial.since_s + settings.canary_timeout_s:
        return state, ()
    chosen = _choose_canaries(trial, wanted, tick.online)
    limit = max([trial.rank_limit, *(canary_rank(device, trial.version) + 1 for device in chosen)])
    offered = replace(trial, since_s=tick.now_s, canaries=chosen, rank_limit=limit)
    is_late = bool(chosen) and chosen == trial.canaries
    state, actions = _decide(replace(state, trial=offered), offered, settings, is_late=is_late)
    has_changed = (chosen, limit) != (trial.canaries, trial.rank_limit) and not actions
    return state, (OfferToCanaries(offered),) if has_changed else actions


def _wanted(tick: Ticked, settings: Settings) -> int:
    share = math.ceil(settings.canary_fraction * len(tick.online) - _ROUNDING)
    return min(len(tick.online), max(settings.min_canaries, share))


def _choose_canaries(trial: Trial, wanted: int, online: frozenset[str]) -> tuple[str, ...]:
    """Return devices by rank: first those that have answered, then online ones not asked yet, then the others."""

    def rank(device: str) -> int:
        return canary_rank(device, trial.version)

    answered = {device for device in trial.answers if rank(device) < trial.rank_limit}
    fresh = online - answered - set(trial.canaries)
    silent = set(trial.canaries) - answered
    order = [device for group in (answered, fresh, silent) for device in sorted(group, key=rank)]
    return tuple(sorted(order[:wanted], key=rank))


def _decide(state: State, trial: Trial, settings: Settings, *, is_late: bool = False) -> Step:
    """Reject a head that too many cannot use; after the last answer, activate the candidate or reject it.

    With `is_late`, silent canaries count like those that cannot use it, and as many are tolerated. Of three, the two
    others must agree: a device that uploads often can make newer heads arrive before the third has answered.
    """
    answered = {device for device in trial.answers if canary_rank(device, trial.version) < trial.rank_limit}
    problems = [
        f"{device} cannot use it: {trial.answers[device].problem}"
        for device in sorted(answered)
        if trial.answers[device].problem
    ]
    others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if len(problems) > tolerated(len(answered.union(trial.canaries)), settings.tolerated_fraction):
        return _rejected(state, trial.version, problems[0] + others)
    is_decided = not trial.awaited or (
        is_late
        and len(problems) + len(trial.awaited) <= tolerated(len(trial.canaries), settings.tolerated_fraction)
    )
    if not trial.canaries or not is_decided:
        return state, ()
    answers, limits = _answers(trial), (settings.tolerated_fraction, settings.margin)
    if trial.awaited and one_decides(answers, *limits):
        return state, ()
    result = summary_of(trial, settings)
    if is_accepted(answers, *limits):
        reason = "; ".join([result, *problems[:1]]) + others
        reason += "".join(f"; {device} has not answered" for device in trial.awaited[:1])
        return _activated(state, trial.version), (Activate(trial.version, reason),)
    return _rejected(state, trial.version, result)


def summary_of(trial: Trial, settings: Settings) -> str:
    """Return the candidate's accuracy on the canaries that count, beside the previous head's."""
    return summary(_answers(trial), tolerated_fraction=settings.tolerated_fraction)


def _answers(trial: Trial) -> list[CanaryResult]:
    return [trial.answers[device] for device in trial.canaries if device in trial.answers]


def _activated(state: State, version: int) -> State:
    """Return the state with this head current; another candidate remains one."""
    earlier = (*state.earlier, state.current)[-RETAINED_HEADS:] if state.current else state.earlier
    trial = None if state.trial is not None and state.trial.version == version else state.trial
    rejected = {other: reason for other, reason in state.rejected.items() if other != version}
    is_watched = bool(state.current)
    return replace(
        state, current=version, earlier=earlier, is_watched=is_watched, trial=trial, rejected=rejected
    )


def _failures_reported(state: State, reported: FailuresReported, settings: Settings) -> Step:
    """Return to the head before if too many devices cannot use the current one; a candidate remains one.

    No device decides alone, whatever is tolerated. The head before was used already, and is not watched again.
    """
    number = len(reported.failed)
    limit = max(1, tolerated(reported.devices, settings.tolerated_fraction))
    if not state.earlier or reported.devices < settings.min_canaries or number <= limit:
        return state, ()
    *earlier, before = state.earlier
    device = min(reported.failed)
    reason = (
        f"{number} of {reported.devices} devices cannot use it, such as {device}: {reported.failed[device]}"
    )
    restored = replace(
        state,
        current=before,
        earlier=tuple(earlier),
        is_watched=False,
        rejected={**state.rejected, state.current: reason},
    )
    return restored, (Reject(state.current, reason), Activate(before, f"head {state.current} was rejected"))


def _rejected(state: State, version: int, reason: str) -> Step:
    rejected = {**state.rejected, version: reason}
    return replace(state, trial=None, rejected=rejected), (Reject(version, reason),)


def _commanded(state: State, command: CommandReceived) -> Step:
    version = command.version
    if command.kind == "promote":
        if state.trial is None:
            return state, (RefuseCommand("there is no candidate to promote"),)
        if version not in (None, state.trial.version):
            return state, (RefuseCommand(f"head {version} is no longer the candidate"),)
        version = state.trial.version
    elif version is None:
        version = state.earlier[-1] if state.earlier else None
    reason = _objection(state, command, version)
    if reason or version is None:
        return state, (RefuseCommand(reason),)
    if command.kind == "promote":
        state = replace(_activated(state, version), is_watched=False)
        return state, (Activate(version, "promoted by an operator"),)
    return _rolled_back(state, version), (Activate(version, "rolled back by an operator"),)


def _objection(state: State, command: CommandReceived, version: int | None) -> str:
    """Return why a command cannot be carried out; empty if it can."""
    known = ", ".join(map(str, sorted(command.heads)[-10:])) or "none"
    if version is None:
        return f"no other head was current before: name one of the existing heads ({known})"
    if version not in command.heads or version > state.newest:
        return f"there is no head {version}; there are {known}"
    if version == state.current:
        return f"head {version} is current already"
    if command.kind == "rollback" and state.trial is not None and version == state.trial.version:
        return f"head {version} is the candidate: give it to all devices with `aggregator promote`"
    if not command.heads[version]:
        return f"head {version} cannot be used any more: its files were deleted"
    return ""


def _rolled_back(state: State, version: int) -> State:
    """Return the state with the candidate and the current head rejected; the next rollback goes further back."""
    rejected, reason = dict(state.rejected), f"rolled back to head {version}"
    if state.trial is not None:
        rejected[state.trial.version] = reason
    if version < state.current:
        rejected[state.current] = reason
    if version in state.earlier:
        earlier = state.earlier[: len(state.earlier) - 1 - state.earlier[::-1].index(version)]
    else:
        earlier = (*state.earlier, state.current)[-RETAINED_HEADS:]
    rejected.pop(version, None)
    return replace(state, current=version, earlier=earlier, is_watched=False, trial=None, rejected=rejected)
