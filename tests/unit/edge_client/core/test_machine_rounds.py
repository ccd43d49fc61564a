"""The state machine in rounds, against a simulated aggregator that does not wait for the device."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_client.core import events
from edge_client.core.downloads import BROADCAST_WAIT_S, PROBE_BYTES
from edge_client.core.state import Mode, State
from edge_client.core.state_machine import step
from protocol.wire.codec import digest_of
from protocol.wire.messages import Frame, Reason, Receipt
from tests.support.simulation.fleet import (
    BACKBONE,
    GRAPHS,
    MANIFEST,
    ROUNDS,
    TASK,
    TENSORS,
    RoundsWorld,
    item_of,
    round_manifest,
)

ITEM = item_of(b"submission", about="0")


@dataclass(frozen=True)
class Mishap:
    after: int
    kind: str


open_for_s = st.tuples(*[st.floats(1, 120)] * ROUNDS)
mishaps = st.lists(
    st.builds(Mishap, st.integers(1, 120), st.sampled_from(["cut", "restart", "restart_aggregator"])),
    max_size=6,
)


def live(world: RoundsWorld, happens: list[Mishap]) -> None:
    for mishap in happens:
        world.run(steps=mishap.after)
        if world.exit is None:
            getattr(world, mishap.kind)()
    world.run()


def begin(mode: Mode = Mode.ONCE, *, seed: int = 0, loss: float = 0.0, **more: object) -> RoundsWorld:
    return RoundsWorld(State(mode=mode), random.Random(seed), loss, **more)  # type: ignore[arg-type]


def check_laws(world: RoundsWorld) -> None:
    assert len(world.counted) == len(set(world.counted)), "one submission a round"
    assert all(number == seen for number, seen in world.begun), (
        "no work for an older round than the newest seen"
    )
    requests = {action.digest for action in world.done if isinstance(action, events.RequestBlob)}
    assert not requests & world.whole, "what came to the whole fleet was not asked for again"


@settings(max_examples=100, deadline=None)
@example(
    seed=80,
    loss=0.3,
    lasts_s=(2.0, 31.0, 2.0, 1.0),
    joins_s=0.0,
    works_s=0.0,
    happens=[Mishap(50, "cut"), Mishap(43, "restart_aggregator")],
    more={"crashes": [], "packets": [None], "full_until_s": 0.0},
)
@given(
    seed=st.integers(0, 10**6),
    loss=st.sampled_from([0.0, 0.05, 0.3, 0.5]),
    lasts_s=open_for_s,
    joins_s=st.floats(0, 300),
    works_s=st.floats(0, 100),
    happens=mishaps,
    more=st.fixed_dictionaries(
        {
            "crashes": st.lists(st.integers(1, 60), max_size=4),
            "packets": st.lists(st.sampled_from([None, 20_000, 3_000]), min_size=1, max_size=2),
            "full_until_s": st.sampled_from([0.0, 0.0, 150.0]),
        }
    ),
)
def test_a_single_run_ends_with_the_last_rounds_head(
    seed: int,
    loss: float,
    lasts_s: tuple[float, ...],
    joins_s: float,
    works_s: float,
    happens: list[Mishap],
    more: dict[str, Any],
) -> None:
    """Lost frames, lost connections, a full disk and restarts do not change that."""
    world = begin(seed=seed, loss=loss, lasts_s=lasts_s, joins_s=joins_s, works_s=works_s, **more)
    live(world, happens)
    assert world.exit == events.Exit(0)
    assert world.state.evaluated == digest_of(TENSORS[ROUNDS])
    check_laws(world)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), lasts_s=open_for_s, failing=st.dictionaries(st.integers(0, 3), st.just(True))
)
def test_a_service_continues_after_failed_rounds(
    seed: int, lasts_s: tuple[float, ...], failing: dict[int, bool]
) -> None:
    """It joins the other rounds, and has the last head."""
    world = begin(Mode.SERVICE, seed=seed, loss=0.1, lasts_s=lasts_s, failing=failing)
    world.run(steps=1_500)
    assert world.exit is None
    assert world.state.evaluated == digest_of(TENSORS[ROUNDS])
    assert not set(world.counted) & set(failing)
    logged = [action for action in world.done if action == events.Log("no", error=True)]
    assert len(logged) == len(world.failed)
    check_laws(world)


@pytest.mark.parametrize(("mode", "may_pass"), [(Mode.ONCE, True), (Mode.ONCE, False), (Mode.SERVICE, False)])
def test_a_first_failure_ends_the_program(mode: Mode, *, may_pass: bool) -> None:
    """Unless it may pass in a later round of a service."""
    world = begin(mode, failing={0: may_pass})
    world.run(steps=1_500)
    assert world.exit == events.Exit(1, "no")


def test_a_later_failure_is_logged_and_the_next_round_joined() -> None:
    """After a submission, no failure ends a service."""
    world = begin(Mode.SERVICE, failing={1: False})
    world.run(steps=1_500)
    assert (world.exit, world.counted) == (None, [0, 2, 3])
    assert events.Log("no", error=True) in world.done


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), before=st.dictionaries(st.integers(0, 3), st.integers(1, 99)))
def test_a_superseded_round_submission_is_renumbered(seed: int, before: dict[int, int]) -> None:
    """It is uploaded again for the same round."""
    world = begin(seed=seed, counts=dict(before))
    world.run()
    assert world.exit == events.Exit(0)
    assert world.counted == [0, 1, 2, 3]
    assert all(world.counts[number] >= sequence for number, sequence in before.items())


@pytest.mark.parametrize(("joins_s", "rounds"), [(150, [2, 3]), (1_000, [])])
def test_a_late_device_joins_the_open_round(joins_s: float, rounds: list[int]) -> None:
    """It does not train the rounds it missed, and after the last one installs its head only."""
    world = begin(joins_s=joins_s)
    world.run()
    assert world.exit == events.Exit(0)
    assert (world.begun, world.counted) == ([(number, number) for number in rounds], rounds)
    last = [action.head.round for action in world.done if isinstance(action, events.InstallHead)][-1]
    assert last == ROUNDS - 1


def test_a_broadcast_that_does_not_arrive_is_requested() -> None:
    """The device waits a short time first, and then requests its last bytes, which show that it is lost."""
    digest, tensors, size = digest_of(TENSORS[1]), round_manifest(1).tensors, len(TENSORS[1])
    state, actions = step(uploaded(), round_manifest(1), now_s=0)
    assert actions == (events.OpenDownload(tensors, (tensors,)),)
    for event, now_s in ((events.DownloadOpened(digest, 0), 0.0), (events.Ticked(), BROADCAST_WAIT_S - 0.1)):
        state, actions = step(state, event, now_s=now_s)
        assert actions == ()
    state, actions = step(state, events.Ticked(), now_s=BROADCAST_WAIT_S)
    left = size - PROBE_BYTES
    assert actions == (events.RequestBlob(digest, left, PROBE_BYTES),)
    probe = Frame(v=1, digest=digest, size_bytes=size, offset=left, data=TENSORS[1][left:])
    _, actions = step(state, probe, now_s=BROADCAST_WAIT_S)
    assert actions == (events.RequestBlob(digest, 0, left),)


def uploaded() -> State:
    """Return a single run that is uploading its submission for round 0."""
    stored = frozenset(digest_of(data) for data in (*GRAPHS.values(), BACKBONE, TENSORS[0]))
    state = State(mode=Mode.ONCE, stored=stored, connected=True, has_record=True)
    for event in (events.TaskSeen(TASK, MANIFEST), round_manifest(0), events.SubmissionBuilt(TASK, ITEM, 0)):
        state, _ = step(state, event, now_s=0)
    assert [upload.item for upload in state.uploads] == [ITEM]
    return state


@pytest.mark.parametrize("reason", ["late", "unknown_round"])
def test_a_late_submission_is_dropped(reason: Reason) -> None:
    """It is logged, and queried again until the device knows that its round is over: receipts are not signed."""
    receipt = Receipt(digest=ITEM.digest, status="refused", reason=reason)
    state, actions = step(uploaded(), receipt, now_s=1)
    assert [type(action) for action in actions] == [events.Log]
    state, actions = step(state, events.Ticked(), now_s=11)
    assert [type(action) for action in actions] == [events.SendFrames]
    state, _ = step(step(state, round_manifest(1), now_s=12)[0], receipt, now_s=12)
    assert state.uploads == ()
    state = replace(state, stored=state.stored | {digest_of(TENSORS[1])})
    _, actions = step(state, round_manifest(1), now_s=2)
    assert actions == (events.BuildSubmission(TASK, MANIFEST, round_manifest(1)),)


def test_a_superseded_submission_of_an_old_round_is_not_built_again() -> None:
    """The newer round's submission is built once its tensors are stored."""
    state, _ = step(uploaded(), round_manifest(1), now_s=1)
    receipt = Receipt(digest=ITEM.digest, status="refused", reason="superseded", sequence=41)
    state, actions = step(state, receipt, now_s=1)
    assert not [action for action in actions if isinstance(action, events.BuildSubmission)]
    state, actions = step(state, events.DownloadFinished(digest_of(TENSORS[1]), valid=True), now_s=2)
    assert actions == (events.BuildSubmission(TASK, MANIFEST, round_manifest(1)),)
