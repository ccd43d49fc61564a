"""Which head the fleet uses: canaries, decisions and replacements."""

from dataclasses import replace

import pytest

from aggregator.coordination.canary_comparison import CanaryResult
from aggregator.coordination.canary_rollout import summary_of
from aggregator.coordination.rollout_state import (
    Action,
    Activate,
    Evaluated,
    FailuresReported,
    HeadAdded,
    OfferToCanaries,
    Reject,
    Settings,
    State,
    Ticked,
    Trial,
    initial_state,
)
from protocol.wire.canary_rank import canary_rank
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
    """The other canary is not waited for; a device that is no canary does not count."""
    state, trial = trying()
    bystander, canary = ranked(2)[5], trial.canaries[0]
    state, done = play(state, Evaluated(bystander, 2, BROKEN))
    assert done == []
    state, done = play(state, Evaluated(canary, 2, BROKEN))
    assert done == [Reject(2, f"{canary} cannot use it: it gives NaN")]


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
    outdated = Evaluated(ranked(2)[0], 2, BROKEN), HeadAdded(2, 6.0), HeadAdded(3, 7.0)
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
