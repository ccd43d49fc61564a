"""When a collection or a round closes, and which devices count in it."""

from dataclasses import replace
from functools import partial

import pytest

from aggregator.coordination.collection import JUDGED_AGAIN_S
from aggregator.coordination.round_state import Settings
from aggregator.coordination.rounds import Verdict, judged
from tests.unit.aggregator.coordination.round_events import (
    Enrolled,
    Forgotten,
    Happened,
    Lost,
    Released,
    Revoked,
    State,
    Ticked,
    Trained,
    TrainingFailed,
    entry,
    play,
    submitted,
)

SETTINGS = Settings(quorum=3, deadline_s=100.0, retrain_after=2)
ABC = [submitted(device) for device in "abc"]
run = partial(play, settings=SETTINGS)


def test_device_counts_once_for_the_quorum() -> None:
    """Duplicates and newer submissions of a device do not count again."""
    events = [submitted("a", sequence=sequence) for sequence in (1, 1, 2, 3, 3, 2)]
    state, trainings, verdicts = run(*events)
    assert trainings == []
    assert verdicts == ["new", "duplicate", "new", "new", "duplicate", "superseded"]
    assert state.waiting == 1


def test_retrain_after_counts_after_the_first_head() -> None:
    """New and renewed submissions count alike, repetitions do not; fewer wait until the deadline."""
    state, _, _ = run(*ABC, Trained())
    renewed, trainings, _ = run(submitted("a"), submitted("a", sequence=2), Ticked(50), state=state)
    assert trainings == []
    assert run(submitted("d"), state=renewed)[1] == [(2, ["a0.2", "b0.1", "c0.1", "d0.1"])]
    late, trainings, _ = run(submitted("d", now_s=500), Ticked(599), state=state)
    assert trainings == []
    assert run(Ticked(600), state=late)[1] == [(2, ["a0.1", "b0.1", "c0.1", "d0.1"])]


def test_failed_training_is_repeated_after_a_growing_delay() -> None:
    """A changed submission repeats it at once; a trained head resets the delay."""
    now_s, state = 0.0, run(*ABC)[0]
    for failures, delay_s in enumerate([10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0], start=1):
        state, trainings, _ = run(
            TrainingFailed(now_s), Ticked(now_s + delay_s - 1), submitted("a"), state=state
        )
        assert (trainings, state.failures) == ([], failures)
        assert run(submitted("a", sequence=2), state=state)[1] == [(1, ["a0.2", "b0.1", "c0.1"])]
        now_s += delay_s
        state, trainings, _ = run(Ticked(now_s), state=state)
        assert trainings == [(1, ["a0.1", "b0.1", "c0.1"])]
    assert run(Trained(), state=state)[0].failures == 0


def test_training_is_repeated_without_lost_submissions() -> None:
    """At once, with what counts by then and whatever the quorum; a device that submits again makes the next head."""
    state, trainings, _ = run(Lost("b"), state=run(*ABC)[0])
    assert trainings == [(1, ["a0.1", "c0.1"])]
    state, trainings, verdicts = run(submitted("b"), Trained(), submitted("d"), state=state)
    assert (verdicts, trainings) == (["new", "new"], [(2, ["a0.1", "b0.1", "c0.1", "d0.1"])])
    renewed, _, _ = run(submitted("b", sequence=2), state=run(*ABC)[0])
    assert run(Lost("b"), state=renewed)[1] == [(1, ["a0.1", "b0.2", "c0.1"])]
    assert run(Lost("abc"), Ticked(10**6), state=run(*ABC)[0])[1] == []


ALL = Settings(quorum=3, deadline_s=100.0)
IN_ROUNDS = Settings(quorum=3, deadline_s=100.0, grace_s=10.0, rounds=5)


def _decided(
    *events: Happened, state: State | None = None, settings: Settings = ALL
) -> tuple[State, list[str]]:
    """Apply events; return the state and the devices of each training."""
    state, trainings, _ = play(*events, state=state, settings=settings)
    return state, ["".join(digest[0] for digest in members) for _, members in trainings]


def _trained(*excluded: str) -> State:
    return _decided(*ABC, Trained(excluded))[0]


def test_released_device_makes_the_next_head() -> None:
    """Once, if the newest head excluded it; releasing another device changes nothing."""
    state, trained = _decided(Released("a"), Ticked(1.0), state=_trained("b"))
    assert trained == []
    state, trained = _decided(Released("ab"), Ticked(2.0), state=state)
    assert trained == ["abc"]
    assert _decided(Trained(), Ticked(3.0), state=state)[1] == []


def test_head_is_made_again_without_a_quarantined_device() -> None:
    """At once, and once; later submissions of the device do not wait; a head that excluded it stays."""
    state, trained = _decided(Revoked("b"), Ticked(1.0), state=_trained())
    assert trained == ["ac"]
    state, trained = _decided(Trained(), submitted("b", 7), Ticked(1e6), state=state)
    assert (trained, state.waiting) == ([], 0)
    assert _decided(Revoked("b"), Ticked(1.0), state=_trained("b"))[1] == []


def test_head_is_made_again_without_a_forgotten_device() -> None:
    """At once, and once, also if the newest head excluded the device, or the device uploads again before."""
    for excluded, again, expected in (((), (), "ac"), (("b",), (), "ac"), ((), (submitted("b", 7),), "abc")):
        state, trained = _decided(Forgotten("b"), *again, Ticked(1.0), state=_trained(*excluded))
        assert trained == [expected]
        assert _decided(Trained(), Ticked(1e6), state=state)[1] == []


def test_quarantined_devices_do_not_count_for_the_quorum() -> None:
    """The collection waits for other devices, and no head is trained without any."""
    state, trained = _decided(Revoked("ab"), *ABC)
    assert trained == []
    state, trained = _decided(Ticked(100.0), state=state)
    assert trained == ["c"]
    assert _decided(Revoked("abc"), Trained(), Ticked(1e6), state=state)[1] == []


@pytest.mark.parametrize("decisions", [Revoked("d"), Enrolled("abc")])
def test_round_does_not_wait_for_devices_that_do_not_count(decisions: Happened) -> None:
    state, _ = _decided(*ABC, submitted("d"), Ticked(10.0), Trained(), settings=IN_ROUNDS)
    then = [submitted(device, 1) for device in "abc"]
    assert _decided(*then, Ticked(0.0), state=state, settings=IN_ROUNDS)[1] == []
    assert _decided(decisions, *then, state=state, settings=IN_ROUNDS)[1] == ["abc"]


def test_round_does_not_wait_for_listed_devices_in_quarantine() -> None:
    """If all listed devices are quarantined, it stays open."""
    listed = Settings(quorum=4, deadline_s=100.0, grace_s=10.0, rounds=5, devices=frozenset("abcd"))
    assert _decided(Revoked("d"), *ABC, settings=listed)[1] == ["abc"]
    assert _decided(Revoked("abcd"), *ABC, submitted("d"), Ticked(1e6), settings=listed)[1] == []


def test_unenrolled_devices_do_not_count_in_a_closed_fleet() -> None:
    """Their submissions wait for enrollment, and are no reason for another head."""
    state, trained = _decided(Enrolled("a"), Ticked(1.0), state=_trained())
    assert trained == []
    assert _decided(submitted("a", 7), state=state)[1] == ["a"]
    enrolled = Enrolled("ac")
    assert _decided(enrolled, submitted("a", 7), state=state)[1] == ["ac"]


def test_quarantined_device_is_judged_again_an_hour_after_its_last_upload() -> None:
    """However often it uploads; a training that another device causes earlier judges what it uploaded last."""
    state, _, _ = run(*ABC, submitted("d"), Trained("c"), Ticked(10**6), Trained("c"))
    again = [submitted("c", sequence=sequence, now_s=sequence) for sequence in range(2, 500)]
    state, trainings, verdicts = run(*again, Ticked(499 + JUDGED_AGAIN_S - 1), state=state)
    assert (trainings, set(verdicts), state.waiting) == ([], {"new"}, 0)
    later, trainings, _ = run(Ticked(499 + JUDGED_AGAIN_S), state=state)
    assert trainings == [(3, ["a0.1", "b0.1", "c0.499", "d0.1"])]
    assert run(Trained("c"), Ticked(10**9), state=later)[1] == []
    renewed = [submitted(device, sequence=2) for device in "ab"]
    assert run(*renewed, state=state)[1] == [(3, ["a0.2", "b0.2", "c0.499", "d0.1"])]
    released = run(Released("c"), Ticked(10**9), state=state)[1]
    assert [version for version, _ in released] == [3]


def test_rate_limit_postpones_the_next_training() -> None:
    """Submissions are accepted until then; a revocation starts a training anyway."""
    state, _, _ = run(*ABC, Trained())
    renewed = [submitted(device, sequence=2) for device in "abc"]
    state, trainings, verdicts = run(*renewed, Ticked(10**6), state=state, is_rate_limited=True)
    assert (trainings, verdicts) == ([], ["new"] * 3)


def test_revocation_starts_a_training_in_spite_of_the_rate_limit() -> None:
    state, _, _ = run(*ABC, Trained())
    assert run(Revoked("a"), Ticked(0), state=state, is_rate_limited=True)[1] == [(2, ["b0.1", "c0.1"])]


ROUNDS = Settings(quorum=2, deadline_s=100.0, grace_s=10.0, min_devices=2, staleness=1, rounds=3)
AB = [submitted("a"), submitted("b")]
run_rounds = partial(play, settings=ROUNDS)


def _after_round_0(devices: str) -> State:
    """Return the state with round 1 open, and these devices in round 0."""
    state, closed, _ = run_rounds(*map(submitted, devices), Ticked(100), Trained())
    assert len(closed) == 1
    return state


def test_quorum_closes_after_the_grace_period() -> None:
    """It begins with the submission that completes the quorum; later ones are in the round."""
    state, closed, _ = run_rounds(submitted("a", now_s=1), submitted("b", now_s=5), submitted("c", now_s=14))
    assert (closed, state.closes_at_s) == ([], 15)
    assert run_rounds(Ticked(14.9), state=state)[1] == []
    assert run_rounds(Ticked(15), state=state)[1] == [(1, ["a0.1", "b0.1", "c0.1"])]


def test_repeated_submission_does_not_postpone_the_close() -> None:
    """The newest submission counts, with the time of the device's first one for the round."""
    state, _, _ = run_rounds(
        submitted("a", now_s=1), submitted("b", now_s=2), submitted("b", sequence=2, now_s=9)
    )
    assert state.closes_at_s == 12
    assert run_rounds(Ticked(12), state=state)[1] == [(1, ["a0.1", "b0.2"])]
    state, _, _ = run_rounds(
        submitted("a", 1, now_s=200), submitted("b", 1, now_s=300), state=_after_round_0("abc")
    )
    assert state.closes_at_s == 300


def test_grace_period_ends_at_the_deadline() -> None:
    state, _, _ = run_rounds(submitted("a", now_s=1), submitted("b", now_s=95))
    assert state.closes_at_s == 101
    assert run_rounds(Ticked(101), state=state)[1] == [(1, ["a0.1", "b0.1"])]


def test_round_closes_with_the_devices_of_the_previous_round() -> None:
    """Once all of them have submitted, without grace; other devices are not waited for."""
    state, closed, _ = run_rounds(
        submitted("a", 1), submitted("d", 1), submitted("b", 1), state=_after_round_0("abc")
    )
    assert closed == []
    assert run_rounds(submitted("c", 1), state=state)[1] == [(2, ["a1.1", "b1.1", "c1.1", "d1.1"])]


def test_devices_of_the_previous_round_need_the_quorum() -> None:
    """A round that closed at its deadline with one device does not let the next one close with that one alone."""
    settings = replace(ROUNDS, min_devices=1)
    state, _, _ = run_rounds(submitted("a"), Ticked(100), Trained(), submitted("a", 1), settings=settings)
    assert (state.version, state.is_training) == (1, False)


def test_round_of_listed_devices_closes_when_all_have_submitted() -> None:
    """This holds in the first round too, and for any quorum."""
    settings = replace(ROUNDS, devices=frozenset("ab"), quorum=9, min_devices=1)
    assert run_rounds(submitted("a"), settings=settings)[1] == []
    assert run_rounds(*AB, settings=settings)[1] == [(1, ["a0.1", "b0.1"])]


def test_deadline_closes_with_enough_devices() -> None:
    """At the deadline it closes with `min_devices`; with fewer, as soon as they have submitted."""
    settings = replace(ROUNDS, quorum=3)
    state, closed, _ = run_rounds(submitted("a", now_s=5), Ticked(10**6), settings=settings)
    assert (closed, state.closes_at_s) == ([], None)
    closed = run_rounds(submitted("b", now_s=10**6), state=state, settings=settings)[1]
    assert closed == [(1, ["a0.1", "b0.1"])]
    state, _, _ = run_rounds(submitted("a", now_s=5), submitted("b", now_s=60), settings=settings)
    assert state.closes_at_s == 105
    assert run_rounds(Ticked(104), state=state, settings=settings)[1] == []
    assert run_rounds(Ticked(105), state=state, settings=settings)[1] == [(1, ["a0.1", "b0.1"])]


def test_submission_counts_until_it_is_stale() -> None:
    """A device without a submission for round 1 is carried over into it, but not into round 2."""
    state, closed, _ = run_rounds(
        submitted("a", 1), submitted("b", 1), Ticked(10), Trained(), state=_after_round_0("abc")
    )
    assert closed == [(2, ["a1.1", "b1.1", "c0.1"])]
    closed = run_rounds(submitted("a", 2), submitted("b", 2), Ticked(10), state=state)[1]
    assert closed == [(3, ["a2.1", "b2.1"])]


def test_lowered_number_of_rounds_leaves_the_open_round() -> None:
    state, _, _ = run_rounds(submitted("a", 1), submitted("b", 1), state=_after_round_0("abc"))
    after, closed, _ = run_rounds(Ticked(10**9), state=state, settings=replace(ROUNDS, rounds=1))
    assert (closed, after.waiting) == ([], 0)


def test_failed_round_is_retried() -> None:
    """At once when a submission changes, otherwise after the delay: a full disk must not end the rounds."""
    state, _, _ = run_rounds(*AB, Ticked(10), TrainingFailed(20))
    assert run_rounds(Ticked(29), state=state)[1] == []
    assert run_rounds(Ticked(30), state=state)[1] == [(1, ["a0.1", "b0.1"])]
    assert run_rounds(submitted("c", now_s=21), state=state)[1] == [(1, ["a0.1", "b0.1", "c0.1"])]


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
    settings, counted = replace(ROUNDS, staleness=2), entry("a", 1, sequence=3, now_s=5.0)
    sent = entry("a", number, sequence=sequence, now_s=9.0)
    outcome = judged(sent, counted, head_version=2, settings=settings)
    expected = counted if verdict != "new" else replace(sent, received_s=5.0 if number == 1 else 9.0)
    assert (outcome.verdict, outcome.counted_entry) == (verdict, expected)
    assert judged(sent, None, head_version=9, settings=settings).verdict == "late"
