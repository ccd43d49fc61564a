"""The work of the round logic for each submission does not grow with the number of devices."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from aggregator.coordination.round_state import Entry, Settings, State
from aggregator.coordination.rounds import Event, SubmissionReceived, Ticked, Trained, step

ONE_SHOT = Settings(quorum=10**6, deadline_s=1e9)
ROUNDS = Settings(quorum=2, deadline_s=1e9, grace_s=1e6, rounds=5, staleness=1)
FEW = 40
MANY = 400


Prepare = Callable[[int], tuple[State, Settings, list[SubmissionReceived]]]


class Name(str):
    """A device's name that counts how often it is hashed: every lookup of a device in a mapping or set does it."""

    __slots__ = ()
    hashed = 0

    def __hash__(self) -> int:
        Name.hashed += 1
        return super().__hash__()


def submissions(
    count: int, *, sequence: int = 1, number: int = 0, reverse: bool = False
) -> list[SubmissionReceived]:
    """Return submissions of as many devices, one second after another."""
    order = range(count - 1, -1, -1) if reverse else range(count)
    return [
        SubmissionReceived(
            Name(f"device-{index}"),
            Entry(sequence, b"%d.%d.%d" % (number, sequence, index), 1000.0 * sequence + at, number),
        )
        for at, index in enumerate(order)
    ]


def first(count: int) -> tuple[State, Settings, list[SubmissionReceived]]:
    """No quorum yet."""
    return State(), ONE_SHOT, submissions(count)


def minimum(count: int) -> tuple[State, Settings, list[SubmissionReceived]]:
    """The deadline has passed, and too few devices have submitted."""
    settings = replace(ONE_SHOT, min_devices=10**6, deadline_s=1.0)
    return State(), settings, submissions(count)


def training(count: int) -> tuple[State, Settings, list[SubmissionReceived]]:
    """A training is running at that time."""
    settings = replace(ONE_SHOT, quorum=1)
    return step(State(), submissions(1)[0], settings=settings)[0], settings, submissions(count)


def renewed(count: int) -> tuple[State, Settings, list[SubmissionReceived]]:
    """Every device submits again, the last one of the first time first."""
    state = State()
    for event in submissions(count):
        state, _ = step(state, event, settings=ONE_SHOT)
    return state, ONE_SHOT, submissions(count, sequence=2, reverse=True)


def grace(count: int) -> tuple[State, Settings, list[SubmissionReceived]]:
    """The second round waits for one device of the first, and for the grace period."""
    state = State()
    events: list[Event] = [*submissions(count + 1), Ticked(1e9), Trained(1)]
    for event in events:
        state, _ = step(state, event, settings=replace(ROUNDS, quorum=count + 1))
    assert state.head_version == 1
    return state, ROUNDS, submissions(count, number=1)


def duplicates(count: int) -> tuple[State, Settings, list[SubmissionReceived]]:
    """Every device repeats what it has submitted."""
    state = State()
    for event in submissions(count):
        state, _ = step(state, event, settings=ONE_SHOT)
    return state, ONE_SHOT, submissions(count)


@pytest.mark.parametrize("prepare", [first, minimum, training, renewed, grace, duplicates])
def test_work_per_submission_is_constant(prepare: Prepare) -> None:
    """Ten times the devices cost ten times the work: counted as hashes of device names."""
    work = []
    for count in (FEW, MANY):
        state, settings, events = prepare(count)
        Name.hashed = 0
        for event in events:
            state, actions = step(state, event, settings=settings)
            state, _ = step(state, Ticked(event.entry.received_s), settings=settings)
            assert actions
        assert len(state.submissions) >= count
        work.append(Name.hashed / count)
    assert work[1] < 1.5 * work[0], work
    assert work[1] < 60
