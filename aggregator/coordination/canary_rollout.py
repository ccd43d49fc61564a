"""Which head the fleet uses: a pure state machine, (state, event) -> (state, actions).

The first head of a task goes to every device, and so does every later one if no canaries are configured. Otherwise a
new head is a candidate: a fraction of the devices, the canaries, evaluate it first. It becomes current once all
canaries have evaluated it and its accuracy on their held-out images is at most `margin` below the previous head's. It
is rejected after the last evaluation if it is worse, and at once if too many canaries cannot use it. A newer head
replaces a candidate.

The calibrated version of the current head makes the same predictions, and goes to every device at once.

No canary of three or more decides alone (`aggregator.coordination.canary_comparison`).

Canaries that do not answer within a timeout are replaced by other devices. Where there are no others, or a newer head
arrives, the candidate is decided without as many of them as may fail to use it, and without those that are offline.

After that all devices evaluate the head. If more of them cannot use it than are tolerated, at least two of at least
`min_canaries`, it is rejected, and the head before it is current again. An operator's command overrides all of it.
"""

import math
from dataclasses import replace

from aggregator.coordination.canary_comparison import (
    CanaryResult,
    is_accepted,
    one_decides,
    summary,
    tolerated,
)
from aggregator.coordination.rollout_state import (
    RETAINED_HEADS,
    Action,
    Activate,
    Evaluated,
    Event,
    FailuresReported,
    HeadAdded,
    HeadCommand,
    OfferToCanaries,
    RefuseCommand,
    Reject,
    Settings,
    State,
    Step,
    Ticked,
    Trial,
    activated,
)
from protocol.wire.canary_rank import canary_rank


def commanded(state: State, command: HeadCommand) -> Step:
    version = command.version
    if command.kind == "promote":
        if state.trial is None:
            return state, (RefuseCommand("there is no candidate to promote"),)
        if version not in (None, state.trial.version):
            return state, (RefuseCommand(f"head {version} is no longer the candidate"),)
    version = named_head(state, command)
    reason = _objection(state, command, version)
    if reason or version is None:
        return state, (RefuseCommand(reason),)
    if command.kind == "promote":
        state = replace(activated(state, version), is_watched=False)
        return state, (Activate(version, "promoted by an operator"),)
    return _rolled_back(state, version), (Activate(version, "rolled back by an operator"),)


def named_head(state: State, command: HeadCommand) -> int | None:
    """Return the head that a command is about: without a version the candidate, or the head before the current one."""
    if command.version is not None:
        return command.version
    if command.kind == "promote":
        return state.trial.version if state.trial is not None else None
    return state.earlier[-1] if state.earlier else None


def _objection(state: State, command: HeadCommand, version: int | None) -> str:
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
    if (is_forgotten := version <= state.forgotten) or not command.heads[version]:
        reason = "it learned from a device that was forgotten" if is_forgotten else "its files were deleted"
        return f"head {version} cannot be used any more: {reason}"
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


_ROUNDING = 1e-9


def step(state: State, event: Event, *, settings: Settings) -> Step:
    match event:
        case HeadAdded(version=version) if version > state.newest:
            added = replace(state, newest=version)
            return _calibrated(added, event) if event.calibrates else _added(added, event.now_s, settings)
        case Ticked() if state.trial is not None:
            return _ticked(state, state.trial, event, settings)
        case Evaluated(version=version, answers=answers):
            if state.trial is not None and state.trial.version == version:
                trial = replace(state.trial, answers={**state.trial.answers, **answers})
                return _decide(replace(state, trial=trial), trial, settings)
        case FailuresReported(version=version) if version == state.current and state.is_watched:
            return _failures_reported(state, event, settings)
        case HeadCommand():
            return commanded(state, event)
    return state, ()


def _added(state: State, now_s: float, settings: Settings) -> Step:
    version, since_s = state.newest, now_s
    if state.current and version <= state.forgotten:
        reason = "it learned from a device that was forgotten"
        return replace(state, rejected={**state.rejected, version: reason}), (Reject(version, reason),)
    actions: tuple[Action, ...] = ()
    if state.trial is not None:
        # Decided if possible: heads may arrive faster than a silent canary is replaced.
        state, actions = _decide(state, state.trial, settings, is_late=True)
    if state.trial is not None:
        if not state.trial.canaries:  # too few are online, for which the newer one waits no longer
            since_s = state.trial.since_s
        state, actions = _rejected(state, state.trial.version, f"head {version} has replaced it")
    if not state.current or not settings.canary_fraction:
        return activated(state, version), (*actions, Activate(version, ""))
    return replace(state, trial=Trial(version, since_s)), actions


def _calibrated(state: State, added: HeadAdded) -> Step:
    """Replace the current head by its calibrated version without canaries: no prediction is another.

    A rollback, and failures of devices, lead to the head before both: what cannot use one of them cannot use the other.
    If another head is current meanwhile, by an operator's command or because devices cannot use this one, it remains.
    """
    version, before = added.version, added.calibrates
    if state.current == before:
        replaced = replace(activated(state, version), earlier=state.earlier)
        return replaced, (Activate(version, f"head {before}, calibrated"),)
    reason = f"head {before}, which it calibrates, is not current"
    return replace(state, rejected={**state.rejected, version: reason}), (Reject(version, reason),)


def _ticked(state: State, trial: Trial, tick: Ticked, settings: Settings) -> Step:
    if not settings.canary_fraction:
        return activated(state, trial.version), (
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
        return activated(state, trial.version), (Activate(trial.version, reason),)
    return _rejected(state, trial.version, result)


def summary_of(trial: Trial, settings: Settings) -> str:
    """Return the candidate's accuracy on the canaries that count, beside the previous head's."""
    return summary(_answers(trial), tolerated_fraction=settings.tolerated_fraction)


def _answers(trial: Trial) -> list[CanaryResult]:
    return [trial.answers[device] for device in trial.canaries if device in trial.answers]


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
