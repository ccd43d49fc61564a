"""Which head the fleet uses: canaries, their quorum, decisions and replacements."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from aggregator.coordination.bounds import median_limits
from aggregator.coordination.canary_comparison import CANARY_MULTIPLE, CanaryResult, compare
from aggregator.coordination.canary_rollout import summary_of
from aggregator.coordination.rollout_state import (
    Action,
    Activate,
    Evaluated,
    Event,
    FailuresReported,
    HeadAdded,
    OfferToCanaries,
    Reject,
    Settings,
    State,
    Ticked,
    Trial,
)
from protocol.wire.canary_rank import canary_rank
from tests.support.messages.heads import initial_state
from tests.unit.aggregator.coordination.rollout_events import (
    BROKEN,
    CANARY,
    FLEET,
    GOOD,
    QUORUM,
    WORSE,
    play,
    ranked,
    trying,
)


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
    events = [Evaluated(2, {device: answer}) for device, answer in zip(trial.canaries, answers, strict=True)]
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
    assert play(state, *[Evaluated(2, {device: answer}) for device in trial.canaries])[1] == [decision]


def test_head_that_one_of_two_canaries_cannot_use_is_rejected_at_once() -> None:
    """The other canary is not waited for; a device that is no canary does not count."""
    state, trial = trying()
    bystander, canary = ranked(2)[5], trial.canaries[0]
    state, done = play(state, Evaluated(2, {bystander: BROKEN}))
    assert done == []
    state, done = play(state, Evaluated(2, {canary: BROKEN}))
    assert done == [Reject(2, f"{canary} cannot use it: it gives NaN")]


def test_silent_canaries_are_replaced() -> None:
    """After the timeout, by the next online devices; a former canary may still answer."""
    state, first = trying()
    slow = first.canaries[1]
    state, done = play(state, Evaluated(2, {first.canaries[0]: GOOD}), Ticked(600.0, FLEET))
    assert done == []
    state, done = play(state, Ticked(601.0, FLEET - {ranked(2)[2]}))
    assert state.trial is not None
    assert done == [OfferToCanaries(state.trial)]
    assert state.trial.canaries == (first.canaries[0], ranked(2)[3])
    assert state.trial.rank_limit == canary_rank(ranked(2)[3], 2) + 1
    again, done = play(state, Evaluated(2, {slow: GOOD}), Ticked(1201.0, frozenset()))
    assert done == [
        Activate(2, summary_of(replace(first, answers=dict.fromkeys(first.canaries, GOOD)), CANARY))
    ]
    assert again.current == 2


def test_candidate_waits_without_other_devices() -> None:
    only = frozenset(ranked(2)[:1])
    state, _ = trying(online=only)
    state, done = play(state, *(Ticked(601.0 * n, only) for n in range(1, 9)))
    assert done == []
    assert state.trial is not None
    assert set(state.trial.canaries) == only


def test_timeout_restarts_when_the_clock_is_set_back() -> None:
    state, _ = play(trying()[0], Ticked(-1e6, FLEET), Ticked(-1e6 + 601.0, FLEET))
    assert state.trial is not None
    assert set(state.trial.canaries) == set(ranked(2)[2:4])


def test_newer_head_replaces_the_candidate() -> None:
    """Later evaluations of the older one are ignored."""
    state, done = play(trying()[0], HeadAdded(3, 5.0))
    assert done == [Reject(2, "head 3 has replaced it")]
    assert (state.current, state.trial) == (1, Trial(3, 5.0))
    outdated = Evaluated(2, {ranked(2)[0]: BROKEN}), HeadAdded(2, 6.0), HeadAdded(3, 7.0)
    assert play(state, *outdated) == (state, [])


def test_newer_heads_do_not_restart_the_wait_for_canaries() -> None:
    """A device that uploads every five minutes would otherwise keep all heads from a fleet of which two are online."""
    online, state = frozenset(["d1", "d2"]), initial_state([1])
    for version, now_s in ((2, 0.0), (3, 300.0)):
        state, _ = play(state, HeadAdded(version, now_s), Ticked(now_s + 299, online, devices=10), by=QUORUM)
        assert state.trial == Trial(version, 0.0)
    state, _ = play(state, HeadAdded(4, 600.0), Ticked(600.5, online, devices=10), by=QUORUM)
    assert state.trial is not None
    assert set(state.trial.canaries) == online
    # The next canaries have their own time to answer.
    state, _ = play(state, HeadAdded(5, 900.0), by=QUORUM)
    assert state.trial == Trial(5, 900.0)


def test_candidate_does_not_follow_a_newer_head_when_canaries_are_switched_off() -> None:
    """The aggregator ended between a head and its rollout, and was started without canaries."""
    state, _ = trying()
    state, done = play(state, HeadAdded(3, 2.0), Ticked(3.0, FLEET), by=Settings())
    assert (state.current, state.trial, state.earlier) == (3, None, (1,))
    assert done == [Reject(2, "head 3 has replaced it"), Activate(3, "")]


def test_candidate_is_activated_when_canaries_are_switched_off() -> None:
    state, done = play(trying()[0], Ticked(2.0, FLEET), by=Settings())
    assert (state.current, state.trial) == (2, None)
    assert [type(action) for action in done] == [Activate]


def test_calibrated_head_has_no_canaries() -> None:
    """It replaces the head that it calibrates: a rollback and failures return to the head before that."""
    state, done = play(initial_state([1, 2]), HeadAdded(3, 0.0, calibrates=2))
    assert (state.current, state.newest, state.earlier, state.trial) == (3, 3, (1,), None)
    assert done == [Activate(3, "head 2, calibrated")]
    assert play(state, HeadAdded(3, 9.0, calibrates=2)) == (state, [])
    failures = FailuresReported(3, {"d1": "old runtime", "d2": "old runtime"}, 3)
    assert play(state, failures)[0].current == 1


def test_calibrated_head_of_another_than_the_current_one_is_rejected() -> None:
    """And the candidate remains one."""
    trial, _ = trying()
    state, done = play(trial, HeadAdded(3, 5.0, calibrates=2))
    assert (state.current, state.newest, state.trial) == (1, 3, trial.trial)
    assert done == [Reject(3, "head 2, which it calibrates, is not current")]


def of_quorum(
    answers: Sequence[CanaryResult], *, online: frozenset[str] = FLEET, by: Settings = QUORUM
) -> tuple[State, list[Action]]:
    """Return the decision of canaries with these answers."""
    state, _ = play(initial_state([1]), HeadAdded(2, 0.0), Ticked(1.0, online, len(online)), by=by)
    assert state.trial is not None
    assert len(state.trial.canaries) == len(answers)
    events = [
        Evaluated(2, {device: each}) for device, each in zip(state.trial.canaries, answers, strict=True)
    ]
    return play(state, *events, by=by)


FALSE_RESULTS = {
    "a problem": BROKEN,
    "all incorrect": CanaryResult(0, 10**7, 10**7),
    "all correct": CanaryResult(10**7, 10**7, 0),
}


@pytest.mark.parametrize("falsified", FALSE_RESULTS.values(), ids=FALSE_RESULTS.keys())
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(("honest", "current"), [(GOOD, 2), (WORSE, 1)])
def test_one_canary_of_three_does_not_decide(
    falsified: CanaryResult, honest: CanaryResult, current: int, place: int
) -> None:
    """Whatever it answers, and first or last: the head is the one that the two others would have."""
    answers = [honest, honest]
    answers.insert(place, falsified)
    state, _ = of_quorum(answers)
    assert (state.current, state.trial) == (current, None)


def test_problem_of_a_tolerated_canary_is_in_the_reason() -> None:
    _, (action,) = of_quorum([GOOD, BROKEN, GOOD])
    assert isinstance(action, Activate)
    assert action.reason.startswith("accuracy 90.0% (180/200) on 2 canaries, 91.0% (182/200) with")
    assert action.reason.endswith(" cannot use it: it gives NaN")
    assert of_quorum([BROKEN, BROKEN, GOOD])[0].rejected.keys() == {2}


def test_tolerated_fraction_is_a_setting() -> None:
    """By default two of ten canaries are tolerated; with 0, each one decides."""
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


def test_all_images_of_two_canaries_count() -> None:
    """As everywhere, two devices have no median that outweighs one of them."""
    few, many = CanaryResult(9, 10, 9), CanaryResult(900, 1000, 880)
    assert (compare([few, many], 0.2).correct, compare([few, many], 0.2).images) == (909, 1010)


def test_images_of_canaries_are_limited_as_those_of_submissions() -> None:
    """Of three and more, by the rule of `bounds`."""
    for images in ([7, 90, 4000], [900, 8, 8, 9], [1, 5, 60, 60, 900], [30, 2]):
        limits = median_limits(np.array(images), CANARY_MULTIPLE)
        compared = compare([CanaryResult(0, each, 0) for each in images], 0.0)
        assert compared.images == pytest.approx(np.minimum(images, limits).sum())


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


@pytest.mark.parametrize(("number", "online", "current"), [(2, 1, 2), (3, 1, 2), (2, 2, 1), (2, 0, 2)])
def test_canaries_that_are_switched_off_are_not_waited_for(number: int, online: int, current: int) -> None:
    """In a fleet of two or three, of which one has answered; one that is online and silent may yet reject the head."""
    fleet = ranked(2)[:number]
    state, _ = play(initial_state([1]), HeadAdded(2, 0.0), Ticked(0.0, frozenset(fleet), number), by=QUORUM)
    assert state.trial is not None
    assert state.trial.canaries == tuple(fleet)
    ticks = [Ticked(600.0 * n, frozenset(fleet[:online]), number) for n in range(1, 4)]
    state, _ = play(state, Evaluated(2, {fleet[0]: GOOD}), *ticks, by=QUORUM)
    assert state.current == current


@pytest.mark.parametrize("later", [Ticked(601.0, frozenset(ranked(2)[:3]), 3), HeadAdded(3, 5.0)])
@pytest.mark.parametrize("falsified", [FALSE_RESULTS["all incorrect"], FALSE_RESULTS["all correct"]])
@pytest.mark.parametrize(("honest", "current"), [(GOOD, 2), (WORSE, 1)])
def test_one_canary_does_not_decide_while_the_third_is_silent(
    falsified: CanaryResult, honest: CanaryResult, current: int, later: Event
) -> None:
    """It uploads all the time, so that newer heads arrive before slow canaries have answered."""
    fleet = ranked(2)[:3]
    by = msgspec.structs.replace(QUORUM, min_canaries=3)
    attacker, other, slow = fleet
    answers = [Evaluated(2, {attacker: falsified}), Evaluated(2, {other: honest})]
    tick = Ticked(1.0, frozenset(fleet), 3)
    state, _ = play(initial_state([1]), HeadAdded(2, 0.0), tick, *answers, later, by=by)
    is_attacker_correct = (falsified.correct > 0) == (honest == GOOD)
    assert state.current == (current if is_attacker_correct else 1)
    if not is_attacker_correct and isinstance(later, Ticked):
        assert state.trial is not None
        assert play(state, Evaluated(2, {slow: honest}), by=by)[0].current == current


@pytest.mark.parametrize("device", [0, 1])
def test_silent_canary_of_two_waits_for_a_third_device(device: int) -> None:
    """Both are offered the candidate, and every newer one; with a third canary, one silent one is tolerated."""
    fleet = ranked(2)[:3]
    two, silent = frozenset(fleet[:2]), fleet[device]
    state, done = play(initial_state([1]), HeadAdded(2, 0.0), Ticked(0.0, two, 2), by=QUORUM)
    assert [type(action) for action in done] == [OfferToCanaries]
    answer = Evaluated(2, {fleet[1 - device]: GOOD})
    state, done = play(state, answer, *(Ticked(600.0 * n, two, 2) for n in range(1, 9)), by=QUORUM)
    assert done == []
    newer, done = play(state, HeadAdded(3, 5000.0), Ticked(5001.0, two, 2), by=QUORUM)
    assert newer.trial is not None
    assert set(newer.trial.canaries) == two
    assert done == [Reject(2, "head 3 has replaced it"), OfferToCanaries(newer.trial)]
    third = frozenset(fleet)
    state, done = play(
        state,
        *(Ticked(5400.0, third, 3), Evaluated(2, {fleet[2]: GOOD}), Ticked(6000.0, third, 3)),
        by=QUORUM,
    )
    assert state.current == 2
    assert isinstance(done[-1], Activate)
    assert done[-1].reason.endswith(f"; {silent} has not answered")
