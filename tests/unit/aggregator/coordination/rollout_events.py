"""Events of the rollout logic, and its outcome in short."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from aggregator.coordination.canary_comparison import CanaryResult
from aggregator.coordination.canary_rollout import step
from aggregator.coordination.rollout_state import (
    Action,
    Event,
    HeadAdded,
    Settings,
    State,
    Ticked,
    Trial,
)
from aggregator.storage.heads import HeadRecord, placed, rollout_of
from protocol.wire.canary_rank import canary_rank
from tests.support.messages.heads import initial_state

CANARY = Settings(canary_fraction=0.2, min_canaries=1, margin=0.02, canary_timeout_s=600.0)
QUORUM = Settings(canary_fraction=0.2)
FLEET = frozenset(f"d{number}" for number in range(10))
GOOD = CanaryResult(correct=90, images=100, previous_correct=91)
WORSE = CanaryResult(correct=88, images=100, previous_correct=91)
BROKEN = CanaryResult(correct=0, images=0, problem="it gives NaN")


def play(state: State, *events: Event, by: Settings = CANARY) -> tuple[State, list[Action]]:
    """Apply events, each followed by a restart."""
    done: list[Action] = []
    for event in events:
        state, actions = step(state, event, settings=by)
        state = restarted(state)
        done.extend(actions)
    return state, done


def restarted(state: State) -> State:
    """Return a state as a restart reads it from the heads; the answers of canaries are their evaluations."""
    heads = [HeadRecord(task=b"", version=version, state="made") for version in range(1, state.newest + 1)]
    stored = [
        msgspec.json.decode(msgspec.json.encode(placed(head, state)), type=HeadRecord) for head in heads
    ]
    again = replace(rollout_of(stored), forgotten=state.forgotten)
    if state.trial is not None and again.trial is not None:
        again = replace(again, trial=replace(again.trial, answers=state.trial.answers))
    assert again == state
    return again


def ranked(version: int, devices: frozenset[str] = FLEET) -> list[str]:
    return sorted(devices, key=lambda device: canary_rank(device, version))


def trying(online: frozenset[str] = FLEET) -> tuple[State, Trial]:
    """Return the state of a fleet that uses head 1, and the trial of head 2."""
    state, _ = play(initial_state([1]), HeadAdded(2, 0.0), Ticked(1.0, online))
    assert state.trial is not None
    return state, state.trial


def heads(*versions: int, gone: Sequence[int] = ()) -> dict[int, bool]:
    return {version: version not in gone for version in versions}
