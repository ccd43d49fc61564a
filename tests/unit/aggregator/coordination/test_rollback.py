"""The current head: rollbacks and promotions by an operator and after failures, and laws for any order of events."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.coordination.canary_comparison import CanaryResult
from aggregator.coordination.rollout_state import (
    RETAINED_HEADS,
    Activate,
    CommandKind,
    Evaluated,
    Event,
    FailuresReported,
    HeadAdded,
    HeadCommand,
    RefuseCommand,
    Reject,
    Settings,
    State,
    Ticked,
    Trial,
    retained_heads,
    without_forgotten,
)
from tests.support.messages.heads import initial_state
from tests.unit.aggregator.coordination.rollout_events import BROKEN, FLEET, GOOD, QUORUM, heads, play, trying


def failures(version: int, failed: int, *, of: int) -> FailuresReported:
    """Return the event that so many devices cannot use a head."""
    return FailuresReported(version, {f"d{number}": "it gives NaN" for number in range(failed)}, devices=of)


def test_each_rollback_goes_further_back() -> None:
    """The head that was current before is current again; a later head is rolled out as usual."""
    known = heads(1, 2, 3)
    back = HeadCommand("rollback", None, known)
    state, done = play(initial_state([1, 2, 3]), back, back)
    assert [action.version for action in done if isinstance(action, Activate)] == [2, 1]
    assert state.rejected == {3: "rolled back to head 2", 2: "rolled back to head 1"}
    assert play(state, back)[1] == [
        RefuseCommand("no other head was current before: name one of the existing heads (1, 2, 3)")
    ]
    state, _ = play(state, HeadAdded(4, 0.0), by=Settings())
    assert (state.current, state.earlier) == (4, (1,))


def test_rollback_to_a_version() -> None:
    """A newer or rejected head can be named too; the next rollback starts from it."""
    known = heads(1, 2, 3)
    state, _ = play(
        initial_state([1, 2, 3]), HeadCommand("rollback", 1, known), HeadCommand("rollback", 3, known)
    )
    assert (state.current, state.earlier, state.rejected) == (3, (1,), {})
    state, _ = play(state, HeadCommand("rollback", None, known))
    assert state.current == 1


@pytest.mark.parametrize(
    ("state", "kind", "version", "reason"),
    [
        (trying()[0], "rollback", 9, "there is no head 9; there are 1, 2"),
        (trying()[0], "rollback", 1, "head 1 is current already"),
        (trying()[0], "rollback", 2, "is the candidate: give it to all devices with `aggregator promote`"),
        (replace(trying()[0], trial=Trial(3, 0.0), newest=3), "promote", 3, "its files were deleted"),
        (replace(initial_state([1, 2]), forgotten=1), "rollback", 1, "from a device that was forgotten"),
        (trying()[0], "promote", 1, "head 1 is no longer the candidate"),
        (initial_state([1]), "promote", None, "no candidate to promote"),
    ],
)
def test_impossible_commands_are_refused(
    state: State, kind: CommandKind, version: int | None, reason: str
) -> None:
    known = heads(1, 2) if version != 3 else heads(1, 2, 3, gone=[3])
    after, (refused,) = play(state, HeadCommand(kind, version, known))
    assert after == state
    assert isinstance(refused, RefuseCommand)
    assert reason in refused.reason


def test_operator_promotes_or_rolls_back_a_candidate() -> None:
    """Promoted without its canaries; rolled back together with the current head."""
    known = heads(1, 2, 3)
    state, done = play(trying()[0], HeadCommand("promote", None, known))
    assert done == [Activate(2, "promoted by an operator")]
    assert (state.current, state.trial, state.earlier) == (2, None, (1,))
    state, _ = play(initial_state([1, 2]), HeadAdded(3, 0.0), HeadCommand("rollback", None, known))
    assert (state.current, state.trial) == (1, None)
    assert state.rejected == {2: "rolled back to head 1", 3: "rolled back to head 1"}
    assert play(state, HeadAdded(3, 9.0)) == (state, [])


def test_retained_heads_allow_a_rollback() -> None:
    """The current head, the previous one, the candidate, and the newest few."""
    state = State(newest=20, current=3, earlier=(1, 2), trial=Trial(9, 0.0))
    assert retained_heads(state, range(1, 21)) == {2, 3, 9, *range(21 - RETAINED_HEADS, 21)}


def test_heads_that_learned_from_a_forgotten_device_are_left() -> None:
    """All but the current one, until a newer head is current."""
    state = State(newest=20, current=17, earlier=(1, 2, 18), trial=Trial(19, 0.0))
    assert without_forgotten(state, 0) == state
    left = without_forgotten(state, 19)
    assert (left.current, left.trial, left.earlier) == (17, None, ())
    assert left.rejected == {19: "it learned from a device that was forgotten"}
    assert retained_heads(left, range(1, 21)) == {17, 20}
    assert without_forgotten(state, 17).trial == state.trial


@pytest.mark.parametrize(
    ("failed", "devices", "current"),
    [(1, 3, 2), (2, 3, 1), (2, 10, 2), (3, 10, 1), (200, 1000, 2), (201, 1000, 1), (2, 2, 2)],
)
def test_current_head_that_too_many_devices_cannot_use_is_rejected(
    failed: int, devices: int, current: int
) -> None:
    """More than the tolerated fraction, at least two of at least `min_canaries`; the one before is current again."""
    state, done = play(initial_state([1, 2]), failures(2, failed, of=devices), by=QUORUM)
    assert state.current == current
    if current == 1:
        reason = f"{failed} of {devices} devices cannot use it, such as d0: it gives NaN"
        assert done == [Reject(2, reason), Activate(1, "head 2 was rejected")]
        assert (state.earlier, state.rejected) == ((), {2: reason})
        assert play(state, HeadAdded(2, 0.0), HeadAdded(3, 0.0), by=Settings())[0].current == 3


def test_no_device_alone_has_the_current_head_rejected() -> None:
    """This holds if no failure is tolerated, and in a fleet of one."""
    for devices in (1, 2, 10):
        by = Settings(tolerated_fraction=0.0, min_canaries=1)
        assert play(initial_state([1, 2]), failures(2, 1, of=devices), by=by)[0].current == 2
        assert devices == 1 or play(initial_state([1, 2]), failures(2, 2, of=devices), by=by)[0].current == 1


@pytest.mark.parametrize(
    "state",
    [
        initial_state([1]),
        play(initial_state([1, 2, 3]), failures(3, 9, of=9))[0],
        play(initial_state([1, 2, 3]), HeadCommand("rollback", None, heads(1, 2, 3)))[0],
        play(trying()[0], HeadCommand("promote", None, heads(1, 2)))[0],
    ],
    ids=["the first", "restored", "rolled back by an operator", "promoted by an operator"],
)
def test_heads_that_failures_do_not_reject(state: State) -> None:
    """Devices that report failures of every head do not take the fleet back to the oldest one."""
    assert play(state, failures(state.current, 9, of=9)) == (state, [])


def test_candidate_stays_when_the_current_head_is_rejected() -> None:
    state, _ = play(initial_state([1, 2]), HeadAdded(3, 0.0), failures(2, 9, of=9), failures(1, 9, of=9))
    assert (state.current, state.trial) == (1, Trial(3, 0.0))


DEVICES = st.sampled_from(sorted(FLEET)[:5])


ANSWERS = st.one_of(
    st.just(BROKEN),
    st.builds(CanaryResult, st.just(0), st.just(0)),
    st.builds(CanaryResult, st.integers(0, 9), st.just(9), st.one_of(st.none(), st.integers(0, 9))),
)


@settings(deadline=None)
@given(
    answers=st.lists(ANSWERS, min_size=5, max_size=5),
    order=st.permutations(range(5)),
    again=st.lists(st.integers(0, 4), max_size=4),
    tolerated=st.sampled_from([0.0, 0.2, 0.4]),
)
def test_order_of_answers_does_not_matter(
    answers: list[CanaryResult], order: list[int], again: list[int], tolerated: float
) -> None:
    """Repeated answers and restarts do not change the outcome either."""
    by = Settings(canary_fraction=0.5, tolerated_fraction=tolerated)
    state, _ = play(initial_state([1]), HeadAdded(2, 0.0), Ticked(1.0, FLEET), by=by)
    assert state.trial is not None
    events = [
        Evaluated(2, {device: answer}) for device, answer in zip(state.trial.canaries, answers, strict=True)
    ]
    straight, _ = play(state, *events, by=by)
    shuffled, _ = play(state, *(events[number] for number in [*order[:2], *again, *order]), by=by)
    assert straight.trial is shuffled.trial is None
    assert straight.current == shuffled.current


EVENTS = st.lists(
    st.one_of(
        st.builds(HeadAdded, st.integers(1, 6), st.floats(0, 1e4)),
        st.builds(Ticked, st.floats(0, 1e4), st.frozensets(DEVICES)),
        st.builds(Evaluated, st.integers(1, 6), st.dictionaries(DEVICES, ANSWERS, max_size=3)),
        st.builds(
            FailuresReported,
            st.integers(1, 6),
            st.sets(DEVICES, min_size=1).map(lambda failed: dict.fromkeys(sorted(failed), "it gives NaN")),
            st.just(5),
        ),
        st.builds(
            HeadCommand,
            st.sampled_from(["rollback", "promote"]),
            st.one_of(st.none(), st.integers(1, 6)),
            st.just(heads(*range(1, 7), gone=[2])),
        ),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(events=EVENTS)
def test_there_is_always_a_usable_head(events: list[Event]) -> None:
    """Never a rejected one without a command; once devices answer, the candidate is decided."""
    state, before = State(), State()
    for event in events:
        before, (state, done) = state, play(state, event)
        assert state.current not in state.rejected
        assert state.current or not state.newest
        assert state.trial is None or state.trial.version == state.newest
        if before.trial and state.trial and before.trial.version == state.trial.version:
            assert state.trial.rank_limit >= before.trial.rank_limit
        used = [action.version for action in done if isinstance(action, Activate)]
        assert not used or used == [state.current]
        if used and not isinstance(event, HeadCommand):
            assert used[0] not in before.rejected
    last_s = state.trial.since_s if state.trial else 0.0
    state, _ = play(state, Ticked(last_s + 1e5, FLEET), Ticked(last_s + 2e5, FLEET))
    state, _ = play(state, *(Evaluated(state.newest, {device: GOOD}) for device in FLEET))
    assert state.trial is None
