"""Which head the fleet uses, pure: (state, event) -> (state, actions). No clock, no file, no network.

The first head of a task goes to every device, and so does each after it where no share of canaries is set. Else a new
head is a candidate: a share of the devices tries it first. It becomes current when all canaries have answered and got
not fewer of their held-out images right than with the head before, but for a margin. It is rejected at once when a
canary cannot use it, and when all have answered and it is worse. A newer head takes the place of a waiting candidate.

Canaries that do not answer are replaced after a while by others, so that a decision needs devices and nothing else. An
operator's order stands above all of it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from protocol.wire.canary import canary_rank

KEPT_HEADS = 5
"""Of the newest heads, those that can be gone back to."""

_ROUNDING = 1e-9

OrderKind = Literal["rollback", "promote"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who tries a new head first, and what is good enough.

    Args:
        canary: share of the devices; 0 gives every head to all at once.
        margin: share of held-out images that a new head may get wrong more than the one before.
        patience_s: seconds after which canaries that have not answered are replaced.
    """

    canary: float = 0.0
    margin: float = 0.02
    patience_s: float = 600.0


@dataclass(frozen=True)
class Answer:
    """What a device says of a head: held-out images right, with this and with the head before, of how many.

    Args:
        correct: with this head.
        images: all of them.
        before: with the head before; None if there was none.
        problem: why the device does not use the head; empty if it does.
    """

    correct: int
    images: int
    previous_correct: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class Trial:
    """A candidate that some devices try.

    Args:
        version: the head's.
        since_s: when it was given to canaries, or to others last (unix seconds).
        canaries: who has to answer, in the order of their ranks; empty as long as no device is there.
        below: a device whose rank is below this tries it.
        answers: all that have come.
    """

    version: int
    since_s: float
    canaries: tuple[str, ...] = ()
    below: int = 0
    answers: Mapping[str, Answer] = field(default_factory=dict)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Canaries that have not answered yet."""
        return tuple(device for device in self.canaries if device not in self.answers)


@dataclass(frozen=True)
class State:
    """Everything a decision depends on.

    Args:
        newest: the newest head that is known; nothing up to it is proposed again.
        current: the head that devices use; 0 if there is none.
        earlier: heads that were current before, the last one last.
        trial: the candidate.
        rejected: heads that are not to be used, and why.
    """

    newest: int = 0
    current: int = 0
    earlier: tuple[int, ...] = ()
    trial: Trial | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """There is a new head; it is `now_s` (unix seconds)."""

    version: int
    now_s: float


@dataclass(frozen=True)
class Ticked:
    """Time has passed: it is `now_s` (unix seconds), and these devices are online."""

    now_s: float
    online: frozenset[str]


@dataclass(frozen=True)
class Evaluated:
    """A device has tried a head."""

    device: str
    version: int
    answer: Answer


@dataclass(frozen=True)
class Ordered:
    """An operator wants a head to be current: an earlier one, or with `promote` the candidate.

    `heads` are all there are, and whether everything is there that devices need of them.
    """

    kind: OrderKind
    version: int | None
    heads: Mapping[int, bool]


Event = Made | Ticked | Evaluated | Ordered


@dataclass(frozen=True)
class Use:
    """A head is current from now on, and why."""

    version: int
    why: str


@dataclass(frozen=True)
class Try:
    """These devices are the candidate's canaries."""

    trial: Trial


@dataclass(frozen=True)
class Reject:
    """A candidate is given up, and why."""

    version: int
    why: str


@dataclass(frozen=True)
class Decline:
    """An order cannot be carried out, and why."""

    why: str


Action = Use | Try | Reject | Decline
Step = tuple[State, tuple[Action, ...]]


def begun(versions: Iterable[int]) -> State:
    """The state of a task whose heads were given to all of its devices, one after the other."""
    state = State()
    for version in sorted(versions):
        state = replace(_used(state, version), newest=version)
    return state


def kept(state: State, versions: Iterable[int]) -> set[int]:
    """Of all heads, those that devices use or may be told to go back to."""
    candidate = {state.trial.version} if state.trial else set()
    return {state.current, *candidate, *state.earlier[-1:], *sorted(versions)[-KEPT_HEADS:]}


def step(state: State, event: Event, *, settings: Settings) -> Step:
    """Take one event."""
    match event:
        case Made(version=version, now_s=now_s) if version > state.newest:
            return _made(replace(state, newest=version), now_s, settings)
        case Ticked(now_s=now_s, online=online) if state.trial is not None:
            return _ticked(state, state.trial, now_s=now_s, online=online, settings=settings)
        case Evaluated(device=device, version=version, answer=answer):
            if state.trial is not None and state.trial.version == version:
                trial = replace(state.trial, answers={**state.trial.answers, device: answer})
                return _decide(replace(state, trial=trial), trial, settings)
        case Ordered():
            return _ordered(state, event)
    return state, ()


def _made(state: State, now_s: float, settings: Settings) -> Step:
    version = state.newest
    if not state.current or not settings.canary:
        return _used(state, version), (Use(version, ""),)
    rejects: tuple[Action, ...] = ()
    if state.trial is not None:
        state, reject = _rejected(state, state.trial.version, f"head {version} has taken its place")
        rejects = (reject,)
    return replace(state, trial=Trial(version, now_s)), rejects


def _ticked(state: State, trial: Trial, *, now_s: float, online: frozenset[str], settings: Settings) -> Step:
    if not settings.canary:
        return _used(state, trial.version), (Use(trial.version, "no canaries are asked for any more"),)
    if trial.canaries and now_s < trial.since_s:  # a clock was set back
        return replace(state, trial=replace(trial, since_s=now_s)), ()
    if trial.canaries and now_s < trial.since_s + settings.patience_s:
        return state, ()
    if not trial.canaries:
        wanted = min(len(online), max(1, math.ceil(settings.canary * len(online) - _ROUNDING)))
    else:
        wanted = len(trial.canaries)
    chosen = _canaries(trial, wanted, online)
    below = max([trial.below, *(canary_rank(device, trial.version) + 1 for device in chosen)])
    asked = replace(trial, since_s=now_s, canaries=chosen, below=below)
    state, actions = _decide(replace(state, trial=asked), asked, settings)
    is_news = (chosen, below) != (trial.canaries, trial.below) and not actions
    return state, (Try(asked),) if is_news else actions


def _canaries(trial: Trial, wanted: int, online: frozenset[str]) -> tuple[str, ...]:
    """Who has to answer: first those who have, then who is there and was not asked, then the rest; by their ranks."""

    def rank(device: str) -> int:
        return canary_rank(device, trial.version)

    answered = {device for device in trial.answers if rank(device) < trial.below}
    fresh = online - answered - set(trial.canaries)
    silent = set(trial.canaries) - answered
    order = [device for group in (answered, fresh, silent) for device in sorted(group, key=rank)]
    return tuple(sorted(order[:wanted], key=rank))


def _decide(state: State, trial: Trial, settings: Settings) -> Step:
    """Reject a head that a canary cannot use; with all answers there, take the candidate or reject it."""
    problems = [
        f"{device} does not use it: {answer.problem}"
        for device, answer in sorted(trial.answers.items())
        if answer.problem and canary_rank(device, trial.version) < trial.below
    ]
    if problems:
        others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        state, reject = _rejected(state, trial.version, problems[0] + others)
        return state, (reject,)
    if trial.awaited or not trial.canaries:
        return state, ()
    pooled, figures = _pooled(trial), figures_of(trial)
    if pooled.correct >= (pooled.previous_correct or 0) - settings.margin * pooled.images - _ROUNDING:
        return _used(state, trial.version), (Use(trial.version, figures),)
    state, reject = _rejected(state, trial.version, figures)
    return state, (reject,)


def figures_of(trial: Trial) -> str:
    """How the candidate does, by the canaries that have answered."""
    answers, pooled = _answers(trial), _pooled(trial)
    if not answers:
        return "no canary has answered"
    if not pooled.images:
        return f"it runs on {canaries(len(answers))}, without images to compare it on"
    return (
        f"{pooled.correct / pooled.images:.1%} of {pooled.images} held-out images right on "
        f"{canaries(len(answers))}, {(pooled.previous_correct or 0) / pooled.images:.1%} with the head before"
    )


def canaries(count: int) -> str:
    """So many of them, in words."""
    return "1 canary" if count == 1 else f"{count} canaries"


def _answers(trial: Trial) -> list[Answer]:
    return [trial.answers[device] for device in trial.canaries if device in trial.answers]


def _pooled(trial: Trial) -> Answer:
    """All images that were tried with both heads, as if they were of one device."""
    comparable = [answer for answer in _answers(trial) if answer.previous_correct is not None]
    return Answer(
        correct=sum(answer.correct for answer in comparable),
        images=sum(answer.images for answer in comparable),
        previous_correct=sum(answer.previous_correct or 0 for answer in comparable),
    )


def _used(state: State, version: int) -> State:
    """A head is current; a candidate that is another one waits on."""
    earlier = (*state.earlier, state.current)[-KEPT_HEADS:] if state.current else state.earlier
    trial = None if state.trial is not None and state.trial.version == version else state.trial
    rejected = {other: why for other, why in state.rejected.items() if other != version}
    return replace(state, current=version, earlier=earlier, trial=trial, rejected=rejected)


def _rejected(state: State, version: int, why: str) -> tuple[State, Reject]:
    rejected = {**state.rejected, version: why}
    return replace(state, trial=None, rejected=rejected), Reject(version, why)


def _ordered(state: State, order: Ordered) -> Step:
    version = order.version
    if order.kind == "promote":
        if state.trial is None:
            return state, (Decline("no head is being tried: there is nothing to promote"),)
        if version not in (None, state.trial.version):
            return state, (Decline(f"head {version} is not being tried any more"),)
        version = state.trial.version
    elif version is None:
        version = state.earlier[-1] if state.earlier else None
    why = _objection(state, order, version)
    if why or version is None:
        return state, (Decline(why),)
    if order.kind == "promote":
        return _used(state, version), (Use(version, "promoted by an operator"),)
    return _rolled_back(state, version), (Use(version, "an operator went back to it"),)


def _objection(state: State, order: Ordered, version: int | None) -> str:
    """Why an order cannot be carried out; empty if it can."""
    known = ", ".join(map(str, sorted(order.heads)[-10:])) or "none"
    if version is None:
        return f"no other head was current before: name one of the heads there are ({known})"
    if version not in order.heads or version > state.newest:
        return f"there is no head {version}; there are {known}"
    if version == state.current:
        return f"head {version} is current already"
    if order.kind == "rollback" and state.trial is not None and version == state.trial.version:
        return f"head {version} is being tried: give it to all devices with `aggregator promote`"
    if not order.heads[version]:
        return f"head {version} cannot be used any more: what devices need of it is gone from the disk"
    return ""


def _rolled_back(state: State, version: int) -> State:
    """What was tried or current gives way, and is not proposed again; the next rollback goes further back."""
    rejected, why = dict(state.rejected), f"rolled back to head {version}"
    if state.trial is not None:
        rejected[state.trial.version] = why
    if version < state.current:
        rejected[state.current] = why
    if version in state.earlier:
        earlier = state.earlier[: len(state.earlier) - 1 - state.earlier[::-1].index(version)]
    else:
        earlier = (*state.earlier, state.current)[-KEPT_HEADS:]
    rejected.pop(version, None)
    return replace(state, current=version, earlier=earlier, trial=None, rejected=rejected)
