"""Rounds one after the other: when each closes, and which devices count in it."""

from dataclasses import replace
from functools import partial

import pytest

from aggregator.coordination.round_state import Settings, State, closes_at_s, is_over, waiting
from aggregator.coordination.rounds import Ticked, Trained, TrainingFailed, Verdict, judged
from tests.unit.aggregator.coordination.round_events import entry, play, submitted

SETTINGS = Settings(quorum=2, deadline_s=100.0, grace_s=10.0, min_devices=2, staleness=1, rounds=3)
AB = [submitted("a"), submitted("b")]
run = partial(play, settings=SETTINGS)


def _after_round_0(devices: str) -> State:
    """Return the state with round 1 open, and these devices in round 0."""
    state, closed, _ = run(*map(submitted, devices), Ticked(100), Trained(1))
    assert len(closed) == 1
    return state


def test_quorum_closes_after_the_grace_period() -> None:
    """It begins with the submission that completes the quorum; later ones are in the round."""
    state, closed, _ = run(submitted("a", now_s=1), submitted("b", now_s=5), submitted("c", now_s=14))
    assert (closed, closes_at_s(state, SETTINGS)) == ([], 15)
    assert run(Ticked(14.9), state=state)[1] == []
    assert run(Ticked(15), state=state)[1] == [(1, ["a0.1", "b0.1", "c0.1"])]


def test_repeated_submission_does_not_postpone_the_close() -> None:
    """The newest submission counts, with the time of the device's first one for the round."""
    state, _, _ = run(submitted("a", now_s=1), submitted("b", now_s=2), submitted("b", sequence=2, now_s=9))
    assert closes_at_s(state, SETTINGS) == 12
    assert run(Ticked(12), state=state)[1] == [(1, ["a0.1", "b0.2"])]
    state, _, _ = run(submitted("a", 1, now_s=200), submitted("b", 1, now_s=300), state=_after_round_0("abc"))
    assert closes_at_s(state, SETTINGS) == 300


def test_grace_period_ends_at_the_deadline() -> None:
    state, _, _ = run(submitted("a", now_s=1), submitted("b", now_s=95))
    assert closes_at_s(state, SETTINGS) == 101
    assert run(Ticked(101), state=state)[1] == [(1, ["a0.1", "b0.1"])]


def test_round_closes_with_the_devices_of_the_previous_round() -> None:
    """Once all of them have submitted, without grace; other devices are not waited for."""
    state, closed, _ = run(
        submitted("a", 1), submitted("d", 1), submitted("b", 1), state=_after_round_0("abc")
    )
    assert closed == []
    assert run(submitted("c", 1), state=state)[1] == [(2, ["a1.1", "b1.1", "c1.1", "d1.1"])]


def test_devices_of_the_previous_round_need_the_quorum() -> None:
    """A round that closed at its deadline with one device does not let the next one close with that one alone."""
    settings = replace(SETTINGS, min_devices=1)
    state, _, _ = run(submitted("a"), Ticked(100), Trained(1), submitted("a", 1), settings=settings)
    assert (state.head_version, state.training) == (1, None)


def test_round_of_listed_devices_closes_when_all_have_submitted() -> None:
    """This holds in the first round too, and for any quorum."""
    settings = replace(SETTINGS, devices=frozenset("ab"), quorum=9, min_devices=1)
    assert run(submitted("a"), settings=settings)[1] == []
    assert run(*AB, settings=settings)[1] == [(1, ["a0.1", "b0.1"])]


def test_deadline_closes_with_enough_devices() -> None:
    """At the deadline it closes with `min_devices`; with fewer, as soon as they have submitted."""
    settings = replace(SETTINGS, quorum=3)
    state, closed, _ = run(submitted("a", now_s=5), Ticked(10**6), settings=settings)
    assert (closed, closes_at_s(state, settings)) == ([], None)
    closed = run(submitted("b", now_s=10**6), state=state, settings=settings)[1]
    assert closed == [(1, ["a0.1", "b0.1"])]
    state, _, _ = run(submitted("a", now_s=5), submitted("b", now_s=60), settings=settings)
    assert closes_at_s(state, settings) == 105
    assert run(Ticked(104), state=state, settings=settings)[1] == []
    assert run(Ticked(105), state=state, settings=settings)[1] == [(1, ["a0.1", "b0.1"])]


def test_submission_counts_until_it_is_stale() -> None:
    """A device without a submission for round 1 is carried over into it, but not into round 2."""
    state, closed, _ = run(
        submitted("a", 1), submitted("b", 1), Ticked(10), Trained(2), state=_after_round_0("abc")
    )
    assert closed == [(2, ["a1.1", "b1.1", "c0.1"])]
    closed = run(submitted("a", 2), submitted("b", 2), Ticked(10), state=state)[1]
    assert closed == [(3, ["a2.1", "b2.1"])]


def test_submission_while_a_round_is_aggregated_is_in_the_next() -> None:
    """It counts there by its age, unless the device uploads for that round as well."""
    state, _, _ = run(*AB, Ticked(10), submitted("c"), submitted("d"))
    _, closed, verdicts = run(
        Trained(1), submitted("d", 1), submitted("a", 1), submitted("b", 1), state=state
    )
    assert set(verdicts) == {"new"}
    assert closed == [(2, ["a1.1", "b1.1", "c0.1", "d1.1"])]


def test_stale_and_future_submissions_are_refused() -> None:
    """Late: older than `staleness`, or than what the device has uploaded; a future round is unknown."""
    state = _after_round_0("ab")
    events = submitted("c", 0), submitted("a", 2), submitted("a", 0, sequence=9)
    assert run(*events, state=state)[2] == ["new", "unknown_round", "new"]
    state, _, _ = run(submitted("a", 1), submitted("b", 1), Trained(2), state=state)
    state, _, verdicts = run(submitted("d", 0), submitted("d", 1), submitted("d", 2), state=state)
    assert verdicts == ["late", "new", "new"]
    events = submitted("d", 1, sequence=8), submitted("d", 2), submitted("d", 2, sequence=0)
    assert run(*events, state=state)[2] == ["late", "duplicate", "superseded"]


def test_after_the_last_round_everything_is_late() -> None:
    """Nothing closes any more, and no deadline runs; accepted submissions are still known."""
    state = _after_round_0("ab")
    for number in (1, 2):
        state, _, _ = run(submitted("a", number), submitted("b", number), Trained(number + 1), state=state)
    assert is_over(state.head_version, SETTINGS)
    state, _, verdicts = run(*(submitted("c", number) for number in range(5)), state=state)
    assert verdicts == ["late"] * 5
    assert run(submitted("a", 2), Ticked(10**9), state=state)[1:] == ([], ["duplicate"])
    assert (waiting(state, SETTINGS), closes_at_s(state, SETTINGS)) == ({}, None)


def test_lowered_number_of_rounds_leaves_the_open_round() -> None:
    state, _, _ = run(submitted("a", 1), submitted("b", 1), state=_after_round_0("abc"))
    settings = replace(SETTINGS, rounds=1)
    assert run(Ticked(10**9), state=state, settings=settings)[1] == []
    assert waiting(state, settings) == {}


def test_failed_round_is_retried() -> None:
    """At once when a submission changes, otherwise after the delay: a full disk must not end the rounds."""
    state, _, _ = run(*AB, Ticked(10), TrainingFailed(20))
    assert run(Ticked(29), state=state)[1] == []
    assert run(Ticked(30), state=state)[1] == [(1, ["a0.1", "b0.1"])]
    assert run(submitted("c", now_s=21), state=state)[1] == [(1, ["a0.1", "b0.1", "c0.1"])]


@pytest.mark.parametrize(
    ("number", "sequence", "verdict"),
    [
        (1, 3, "duplicate"),
        (1, 2, "superseded"),
        (0, 9, "late"),  # of a round that may still count, but the device has submitted to a later one
        (1, 4, "new"),
        (2, 1, "new"),
        (3, 1, "unknown_round"),
    ],
)
def test_verdict_needs_the_devices_own_entry_only(number: int, sequence: int, verdict: Verdict) -> None:
    """The refused leave the entry that counts; a new one has the time of the device's first one for the round."""
    settings, counted = replace(SETTINGS, staleness=2), entry("a", 1, sequence=3, now_s=5.0)
    sent = entry("a", number, sequence=sequence, now_s=9.0)
    outcome = judged(sent, counted, head_version=2, settings=settings)
    expected = counted if verdict != "new" else replace(sent, received_s=5.0 if number == 1 else 9.0)
    assert (outcome.verdict, outcome.counted_entry) == (verdict, expected)
    assert judged(sent, None, head_version=9, settings=settings).verdict == "late"
