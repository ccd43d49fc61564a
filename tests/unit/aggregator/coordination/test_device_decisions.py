"""Quarantined, released and unenrolled devices in the round logic."""

import pytest

from aggregator.coordination.rounds import (
    Action,
    DeviceDecisions,
    Entry,
    Event,
    Settings,
    State,
    SubmissionReceived,
    Ticked,
    Train,
    Trained,
    step,
    waiting,
)

SETTINGS = Settings(quorum=3, deadline_s=100.0)
IN_ROUNDS = Settings(quorum=3, deadline_s=100.0, grace_s=10.0, rounds=5)


def _submitted(device: str, number: int = 0) -> SubmissionReceived:
    return SubmissionReceived(device, Entry(1, f"{device}{number}".encode(), 0.0, number))


def _without(devices: str) -> DeviceDecisions:
    return DeviceDecisions(quarantined=frozenset(devices))


def _run(
    *events: Event, state: State | None = None, settings: Settings = SETTINGS
) -> tuple[State, list[str]]:
    """Apply events; return the state and the members of each training."""
    state, actions = state or State(), list[Action]()
    for event in events:
        state, done = step(state, event, settings=settings)
        actions += done
    trainings = [action for action in actions if isinstance(action, Train)]
    return state, ["".join(device for device, _ in training.members) for training in trainings]


def _trained(*excluded: str) -> State:
    """A head of a, b and c that was made without the submissions of some of them."""
    return _run(*map(_submitted, "abc"), Trained(1, frozenset(excluded)))[0]


def test_excluded_submission_makes_no_further_head() -> None:
    """Only a new submission of the device counts as new."""
    state, trained = _run(Ticked(1e6), state=_trained("b"))
    assert (trained, waiting(state, SETTINGS)) == ([], {})
    assert _run(_submitted("b", number=7), state=state)[1] == ["abc"]


def test_released_device_makes_the_next_head() -> None:
    """Once, if the newest head excluded it; releasing another device changes nothing."""
    state, trained = _run(DeviceDecisions(released=frozenset("a")), Ticked(1.0), state=_trained("b"))
    assert trained == []
    state, trained = _run(DeviceDecisions(released=frozenset("ab")), Ticked(2.0), state=state)
    assert trained == ["abc"]
    assert _run(Trained(2), Ticked(3.0), state=state)[1] == []


def test_head_is_made_again_without_a_quarantined_device() -> None:
    """At once, and once; later submissions of the device do not wait; a head that excluded it stays."""
    state, trained = _run(_without("b"), Ticked(1.0), state=_trained())
    assert trained == ["ac"]
    state, trained = _run(Trained(2), _submitted("b", number=7), Ticked(1e6), state=state)
    assert (trained, waiting(state, SETTINGS)) == ([], {})
    assert _run(_without("b"), Ticked(1.0), state=_trained("b"))[1] == []


def test_quarantined_devices_do_not_count_for_the_quorum() -> None:
    """The collection waits for other devices, and no head is trained without any."""
    state, trained = _run(_without("ab"), *map(_submitted, "abc"))
    assert trained == []
    state, trained = _run(Ticked(100.0), state=state)
    assert trained == ["c"]
    assert _run(_without("abc"), Trained(1), Ticked(1e6), state=state)[1] == []


@pytest.mark.parametrize("decisions", [_without("d"), DeviceDecisions(enrolled=frozenset("abc"))])
def test_round_does_not_wait_for_devices_that_do_not_count(decisions: DeviceDecisions) -> None:
    """A round waits for the devices of the previous round, except quarantined and unenrolled ones."""
    state, _ = _run(*map(_submitted, "abcd"), Ticked(10.0), Trained(1), settings=IN_ROUNDS)
    assert state.covered.keys() == set("abcd")
    then = [_submitted(device, 1) for device in "abc"]
    assert _run(*then, Ticked(0.0), state=state, settings=IN_ROUNDS)[1] == []
    assert _run(decisions, *then, state=state, settings=IN_ROUNDS)[1] == ["abc"]


def test_round_does_not_wait_for_listed_devices_in_quarantine() -> None:
    """With all listed devices quarantined it stays open."""
    listed = Settings(quorum=4, deadline_s=100.0, grace_s=10.0, rounds=5, devices=frozenset("abcd"))
    first = [_submitted(device) for device in "abcd"]
    assert _run(_without("d"), *first[:3], settings=listed)[1] == ["abc"]
    assert _run(_without("abcd"), *first, Ticked(1e6), settings=listed)[1] == []


def test_unenrolled_devices_do_not_count_in_a_closed_fleet() -> None:
    """Their submissions wait for enrollment, and are no reason for another head."""
    state, trained = _run(DeviceDecisions(enrolled=frozenset("a")), Ticked(1.0), state=_trained())
    assert trained == []
    assert _run(_submitted("a", number=7), state=state)[1] == ["a"]
    enrolled = DeviceDecisions(enrolled=frozenset("ac"))
    assert _run(enrolled, _submitted("a", number=7), state=state)[1] == ["ac"]
