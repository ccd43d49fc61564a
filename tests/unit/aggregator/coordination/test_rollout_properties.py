"""Which head the fleet uses, for any order of events."""

from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.coordination.canary_comparison import CanaryResult
from aggregator.coordination.rollout_state import (
    Activate,
    Evaluated,
    Event,
    FailuresReported,
    HeadAdded,
    HeadCommand,
    Settings,
    State,
    Ticked,
    initial_state,
)
from tests.unit.aggregator.coordination.rollout_events import BROKEN, FLEET, GOOD, heads, play

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
        Evaluated(device, 2, answer) for device, answer in zip(state.trial.canaries, answers, strict=True)
    ]
    straight, _ = play(state, *events, by=by)
    shuffled, _ = play(state, *(events[number] for number in [*order[:2], *again, *order]), by=by)
    assert straight.trial is shuffled.trial is None
    assert straight.current == shuffled.current


EVENTS = st.lists(
    st.one_of(
        st.builds(HeadAdded, st.integers(1, 6), st.floats(0, 1e4)),
        st.builds(Ticked, st.floats(0, 1e4), st.frozensets(DEVICES)),
        st.builds(Evaluated, DEVICES, st.integers(1, 6), ANSWERS),
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
    state, _ = play(state, *(Evaluated(device, state.newest, GOOD) for device in FLEET))
    assert state.trial is None
