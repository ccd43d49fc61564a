"""Which head the fleet uses: canaries, decisions, replacements and commands, for any order of events."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.coordination.canary_comparison import CanaryResult
from aggregator.coordination.canary_rollout import (
    RETAINED_HEADS,
    Action,
    Activate,
    CommandKind,
    CommandReceived,
    Evaluated,
    Event,
    HeadAdded,
    OfferToCanaries,
    RefuseCommand,
    Reject,
    Settings,
    State,
    Ticked,
    Trial,
    initial_state,
    retained_heads,
    step,
    summary_of,
)
from protocol.wire.canary_rank import canary_rank

CANARY = Settings(canary_fraction=0.2, min_canaries=1, margin=0.02, canary_timeout_s=600.0)
FLEET = frozenset(f"d{number}" for number in range(10))
GOOD = CanaryResult(correct=90, images=100, previous_correct=91)
WORSE = CanaryResult(correct=88, images=100, previous_correct=91)
BROKEN = CanaryResult(correct=0, images=0, problem="it gives NaN")


def play(state: State, *events: Event, by: Settings = CANARY) -> tuple[State, list[Action]]:
    """Apply events, each followed by a restart."""
    done: list[Action] = []
    for event in events:
        state, actions = step(state, event, settings=by)
        state = msgspec.json.decode(msgspec.json.encode(state), type=State)
        done.extend(actions)
    return state, done


def ranked(version: int, devices: frozenset[str] = FLEET) -> list[str]:
    return sorted(devices, key=lambda device: canary_rank(device, version))


def trying(online: frozenset[str] = FLEET) -> tuple[State, Trial]:
    """Return the state of a fleet that uses head 1, and the trial of head 2."""
    state, _ = play(initial_state([1]), HeadAdded(2, 0.0), Ticked(1.0, online))
    assert state.trial is not None
    return state, state.trial


def heads(*versions: int, gone: Sequence[int] = ()) -> dict[int, bool]:
    return {version: version not in gone for version in versions}


def test_first_head_and_without_canaries_every_head_is_activated() -> None:
    assert play(State(), HeadAdded(1, 0.0))[1] == [Activate(1, "")]
    state, done = play(State(), HeadAdded(1, 0.0), Ticked(1.0, FLEET), HeadAdded(2, 2.0), by=Settings())
    assert (state.current, state.trial, state.earlier) == (2, None, (1,))
    assert done == [Activate(1, ""), Activate(2, "")]


def test_canaries_are_the_devices_of_lowest_rank() -> None:
    """The fraction is rounded up to at least one device."""
    state, trial = trying()
    assert state.current == 1
    assert list(trial.canaries) == ranked(2)[:2]
    assert trial.rank_limit == canary_rank(ranked(2)[1], 2) + 1
    for devices, wanted in ((1, 1), (5, 1), (6, 2)):
        _, trial = trying(online=frozenset(ranked(2)[:devices]))
        assert len(trial.canaries) == wanted


def test_candidate_waits_for_the_first_device() -> None:
    """Without a device online, time changes nothing."""
    state, done = play(
        initial_state([1]), HeadAdded(2, 0.0), Ticked(1.0, frozenset()), Ticked(1e6, frozenset())
    )
    assert state.trial == Trial(2, 1e6)
    assert done == []
    state, done = play(state, Ticked(1e6 + 1, frozenset({"late"})))
    assert state.trial is not None
    assert done == [OfferToCanaries(state.trial)]
    assert state.trial.canaries == ("late",)


@pytest.mark.parametrize(
    ("answers", "current"),
    [
        ((GOOD, GOOD), 2),
        ((GOOD, WORSE), 2),
        ((WORSE, WORSE), 1),
        ((CanaryResult(89, 100, 91), CanaryResult(89, 100, 91)), 2),
        ((CanaryResult(889, 1000, 910), CanaryResult(0, 0)), 1),
        ((CanaryResult(0, 9), CanaryResult(0, 0, 0)), 2),
        ((CanaryResult(0, 0, 0), BROKEN), 1),
        ((CanaryResult(5, 5), WORSE), 1),
        ((GOOD, BROKEN), 1),
    ],
)
def test_accuracy_over_all_canaries_decides(answers: tuple[CanaryResult, CanaryResult], current: int) -> None:
    """At most the margin worse over all images; without a comparison, running is enough."""
    state, trial = trying()
    events = [Evaluated(device, 2, answer) for device, answer in zip(trial.canaries, answers, strict=True)]
    state, done = play(state, *events)
    assert (state.current, state.trial) == (current, None)
    assert isinstance(done[-1], Activate if current == 2 else Reject)
    assert state.rejected.keys() == ({2} if current == 1 else set())


@pytest.mark.parametrize(
    ("answer", "decision"),
    [
        (WORSE, Reject(2, "accuracy 88.0% (176/200) on 2 canaries, 91.0% (182/200) with the previous head")),
        # Under differential privacy all counts are 0.
        (CanaryResult(0, 0, 0), Activate(2, "it runs on 2 canaries, without images to compare it on")),
    ],
)
def test_decision_has_the_summary(answer: CanaryResult, decision: Action) -> None:
    state, trial = trying()
    assert summary_of(trial, CANARY) == "no canary has answered"
    assert play(state, *[Evaluated(device, 2, answer) for device in trial.canaries])[1] == [decision]


def test_head_that_one_of_two_canaries_cannot_use_is_rejected_at_once() -> None:
    """Without waiting for the other; a device that is no canary does not count."""
    state, trial = trying()
    bystander, canary = ranked(2)[5], trial.canaries[0]
    state, done = play(state, Evaluated(bystander, 2, BROKEN))
    assert done == []
    state, done = play(state, Evaluated(canary, 2, BROKEN))
    assert done == [Reject(2, f"{canary} cannot use it: it gives NaN")]


QUORUM = Settings(canary_fraction=0.2)


def of_quorum(
    answers: Sequence[CanaryResult], *, online: frozenset[str] = FLEET, by: Settings = QUORUM
) -> tuple[State, list[Action]]:
    """Return the decision of canaries with these answers."""
    state, _ = play(initial_state([1]), HeadAdded(2, 0.0), Ticked(1.0, online, len(online)), by=by)
    assert state.trial is not None
    assert len(state.trial.canaries) == len(answers)
    events = [Evaluated(device, 2, each) for device, each in zip(state.trial.canaries, answers, strict=True)]
    return play(state, *events, by=by)


LIARS = {
    "a problem": BROKEN,
    "all incorrect": CanaryResult(0, 10**7, 10**7),
    "all correct": CanaryResult(10**7, 10**7, 0),
}


@pytest.mark.parametrize("lie", LIARS.values(), ids=LIARS.keys())
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(("honest", "current"), [(GOOD, 2), (WORSE, 1)])
def test_one_canary_of_three_does_not_decide(
    lie: CanaryResult, honest: CanaryResult, current: int, place: int
) -> None:
    """Whatever it answers, and first or last: the head is the one that the two others would have."""
    answers = [honest, honest]
    answers.insert(place, lie)
    state, _ = of_quorum(answers)
    assert (state.current, state.trial) == (current, None)


def test_problem_of_a_tolerated_canary_is_in_the_reason() -> None:
    _, (action,) = of_quorum([GOOD, BROKEN, GOOD])
    assert isinstance(action, Activate)
    assert action.reason.startswith("accuracy 90.0% (180/200) on 2 canaries, 91.0% (182/200) with")
    assert action.reason.endswith(" cannot use it: it gives NaN")
    assert of_quorum([BROKEN, BROKEN, GOOD])[0].rejected.keys() == {2}


def test_tolerated_fraction_is_a_setting() -> None:
    """Of ten canaries two by default; with 0, each one decides."""
    by = msgspec.structs.replace(QUORUM, canary_fraction=1.0)
    assert of_quorum([BROKEN] * 2 + [GOOD] * 8, by=by)[0].current == 2
    assert of_quorum([BROKEN] * 3 + [GOOD] * 7, by=by)[0].current == 1
    strict = msgspec.structs.replace(by, tolerated_fraction=0.0)
    assert of_quorum([BROKEN] + [GOOD] * 9, by=strict)[0].current == 1


def test_images_that_a_canary_claims_hardly_count() -> None:
    """Beyond ten times the median canary's, and not at all if it is the best or the worst."""
    same, better = CanaryResult(9_100_000, 10**7, 9_100_000), CanaryResult(99, 100, 91)
    by = msgspec.structs.replace(QUORUM, canary_fraction=0.5)
    state, done = of_quorum([better, GOOD, same, WORSE, better], by=by)
    assert state.current == 2
    assert isinstance(done[-1], Activate)
    assert done[-1].reason.startswith("accuracy 91.6% (1099/1200) on 3 of 5 canaries, 91.0% (1092/1200)")


def test_few_devices_online_do_not_decide_for_many() -> None:
    """The candidate waits for `min_canaries` devices, and after the timeout decides with those online."""
    alone = frozenset(ranked(2)[:1])
    state, done = play(initial_state([1]), HeadAdded(2, 0.0), Ticked(1.0, alone, 10), by=QUORUM)
    assert (state.trial, done) == (Trial(2, 0.0), [])
    enough, _ = play(state, Ticked(2.0, FLEET, 10), by=QUORUM)
    assert enough.trial is not None
    assert len(enough.trial.canaries) == 3
    late, done = play(state, Ticked(600.0, alone, 10), by=QUORUM)
    assert late.trial is not None
    assert late.trial.canaries == tuple(alone)
    more, _ = play(late, Ticked(1200.0, FLEET, 10), by=QUORUM)
    assert more.trial is not None
    assert len(more.trial.canaries) == 3


def test_fleet_of_two_devices_does_not_wait_for_a_third() -> None:
    state, _ = of_quorum([GOOD, GOOD], online=frozenset(ranked(2)[:2]))
    assert state.current == 2


def test_silent_canaries_are_replaced() -> None:
    """After the timeout, by the next online devices; a former canary may still answer."""
    state, first = trying()
    slow = first.canaries[1]
    state, done = play(state, Evaluated(first.canaries[0], 2, GOOD), Ticked(600.0, FLEET))
    assert done == []
    state, done = play(state, Ticked(601.0, FLEET - {ranked(2)[2]}))
    assert state.trial is not None
    assert done == [OfferToCanaries(state.trial)]
    assert state.trial.canaries == (first.canaries[0], ranked(2)[3])
    assert state.trial.rank_limit == canary_rank(ranked(2)[3], 2) + 1
    again, done = play(state, Evaluated(slow, 2, GOOD), Ticked(1201.0, frozenset()))
    assert done == [
        Activate(2, summary_of(replace(first, answers=dict.fromkeys(first.canaries, GOOD)), CANARY))
    ]
    assert again.current == 2


@pytest.mark.parametrize(("number", "online", "current"), [(2, 1, 2), (3, 1, 2), (2, 2, 1), (2, 0, 2)])
def test_canaries_that_are_switched_off_are_not_waited_for(number: int, online: int, current: int) -> None:
    """In a fleet of two or three, of which one has answered; one that is online and silent may yet reject the head."""
    fleet = ranked(2)[:number]
    state, _ = play(initial_state([1]), HeadAdded(2, 0.0), Ticked(0.0, frozenset(fleet), number), by=QUORUM)
    assert state.trial is not None
    assert state.trial.canaries == tuple(fleet)
    ticks = [Ticked(600.0 * n, frozenset(fleet[:online]), number) for n in range(1, 4)]
    state, _ = play(state, Evaluated(fleet[0], 2, GOOD), *ticks, by=QUORUM)
    assert state.current == current


def test_candidate_waits_without_other_devices() -> None:
    only = frozenset(ranked(2)[:1])
    state, _ = trying(online=only)
    state, done = play(state, *(Ticked(601.0 * n, only) for n in range(1, 9)))
    assert done == []
    assert state.trial is not None
    assert set(state.trial.canaries) == only


@pytest.mark.parametrize("later", [Ticked(601.0, FLEET, 3), HeadAdded(3, 5.0)], ids=["timeout", "newer head"])
@pytest.mark.parametrize(("honest", "current"), [(GOOD, 2), (WORSE, 1)])
def test_one_silent_canary_of_three_does_not_decide(later: Event, honest: CanaryResult, current: int) -> None:
    """Where no device can replace it, online or not, and if heads arrive faster than the timeout."""
    fleet = frozenset(ranked(2)[:3])
    by = msgspec.structs.replace(QUORUM, min_canaries=3)
    state, _ = play(initial_state([1]), HeadAdded(2, 0.0), Ticked(1.0, fleet, 3), by=by)
    silent, *others = sorted(fleet)
    answers = [Evaluated(device, 2, honest) for device in others]
    if isinstance(later, Ticked):
        later = replace(later, online=fleet)
        gone = replace(later, online=frozenset(others))
        assert play(state, *answers, gone, by=by)[0].current == current
    assert play(state, *answers[:1], later, by=by)[0].current == 1
    state, done = play(state, *answers, later, by=by)
    assert state.current == current
    assert isinstance(done[0], Activate if current == 2 else Reject)
    assert current == 1 or done[0].reason.endswith(f"; {silent} has not answered")
    strict = msgspec.structs.replace(by, tolerated_fraction=0.0)
    state, _ = play(initial_state([1]), HeadAdded(2, 0.0), Ticked(1.0, fleet, 3), *answers, later, by=strict)
    assert state.current == 1


def test_timeout_restarts_when_the_clock_is_set_back() -> None:
    state, _ = play(trying()[0], Ticked(-1e6, FLEET), Ticked(-1e6 + 601.0, FLEET))
    assert state.trial is not None
    assert set(state.trial.canaries) == set(ranked(2)[2:4])


def test_newer_head_replaces_the_candidate() -> None:
    """Later evaluations of the older one are ignored."""
    state, done = play(trying()[0], HeadAdded(3, 5.0))
    assert done == [Reject(2, "head 3 has replaced it")]
    assert (state.current, state.trial) == (1, Trial(3, 5.0))
    outdated = Evaluated(ranked(2)[0], 2, BROKEN), HeadAdded(2, 6.0), HeadAdded(3, 7.0)
    assert play(state, *outdated) == (state, [])


def test_candidate_is_activated_when_canaries_are_switched_off() -> None:
    state, done = play(trying()[0], Ticked(2.0, FLEET), by=Settings())
    assert (state.current, state.trial) == (2, None)
    assert [type(action) for action in done] == [Activate]


def test_each_rollback_goes_further_back() -> None:
    """To the head that was current before; a later head is rolled out as usual."""
    known = heads(1, 2, 3)
    back = CommandReceived("rollback", None, known)
    state, done = play(initial_state([1, 2, 3]), back, back)
    assert [action.version for action in done if isinstance(action, Activate)] == [2, 1]
    assert state.rejected == {3: "rolled back to head 2", 2: "rolled back to head 1"}
    assert play(state, back)[1] == [
        RefuseCommand("no other head was current before: name one of the existing heads (1, 2, 3)")
    ]
    state, _ = play(state, HeadAdded(4, 0.0), by=Settings())
    assert (state.current, state.earlier) == (4, (1,))


def test_rollback_to_a_version() -> None:
    """Also to a newer or rejected one; the next rollback returns from there."""
    known = heads(1, 2, 3)
    state, _ = play(
        initial_state([1, 2, 3]), CommandReceived("rollback", 1, known), CommandReceived("rollback", 3, known)
    )
    assert (state.current, state.earlier, state.rejected) == (3, (1,), {})
    state, _ = play(state, CommandReceived("rollback", None, known))
    assert state.current == 1


@pytest.mark.parametrize(
    ("state", "kind", "version", "reason"),
    [
        (trying()[0], "rollback", 9, "there is no head 9; there are 1, 2"),
        (trying()[0], "rollback", 1, "head 1 is current already"),
        (trying()[0], "rollback", 2, "is the candidate: give it to all devices with `aggregator promote`"),
        (replace(trying()[0], trial=Trial(3, 0.0), newest=3), "promote", 3, "its files were deleted"),
        (trying()[0], "promote", 1, "head 1 is no longer the candidate"),
        (initial_state([1]), "promote", None, "no candidate to promote"),
    ],
)
def test_impossible_commands_are_refused(
    state: State, kind: CommandKind, version: int | None, reason: str
) -> None:
    known = heads(1, 2) if version != 3 else heads(1, 2, 3, gone=[3])
    after, (refused,) = play(state, CommandReceived(kind, version, known))
    assert after == state
    assert isinstance(refused, RefuseCommand)
    assert reason in refused.reason


def test_operator_promotes_or_rolls_back_a_candidate() -> None:
    """Promoted without its canaries; rolled back together with the current head."""
    known = heads(1, 2, 3)
    state, done = play(trying()[0], CommandReceived("promote", None, known))
    assert done == [Activate(2, "promoted by an operator")]
    assert (state.current, state.trial, state.earlier) == (2, None, (1,))
    state, _ = play(initial_state([1, 2]), HeadAdded(3, 0.0), CommandReceived("rollback", None, known))
    assert (state.current, state.trial) == (1, None)
    assert state.rejected == {2: "rolled back to head 1", 3: "rolled back to head 1"}
    assert play(state, HeadAdded(3, 9.0)) == (state, [])


def test_retained_heads_allow_a_rollback() -> None:
    """The current head, the previous one, the candidate, and the newest few."""
    state = State(newest=20, current=3, earlier=(1, 2), trial=Trial(9, 0.0))
    assert retained_heads(state, range(1, 21)) == {2, 3, 9, *range(21 - RETAINED_HEADS, 21)}


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
    """Nor repetitions or restarts: the outcome is the same."""
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
            CommandReceived,
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
        if used and not isinstance(event, CommandReceived):
            assert used[0] not in before.rejected
    last_s = state.trial.since_s if state.trial else 0.0
    state, _ = play(state, Ticked(last_s + 1e5, FLEET), Ticked(last_s + 2e5, FLEET))
    state, _ = play(state, *(Evaluated(device, state.newest, GOOD) for device in FLEET))
    assert state.trial is None
