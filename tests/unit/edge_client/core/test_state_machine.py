"""The state machine: submissions, tasks, blobs, receipts and delays, also over a lossy network."""

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.core import events
from edge_client.core.state import MAX_DAMAGED, Mode, State, head_key
from edge_client.core.state_machine import step
from edge_client.core.uploads import QUERY_BYTES
from protocol.wire.codec import digest_of
from protocol.wire.messages import DifferentialPrivacy, HeadManifest, HeadRef, Receipt, TaskManifest
from tests.support.simulation.fleet import World, item_of, reference

BACKBONE = bytes(range(256)) * 1200
HEAD = b"head" * 50_000
SUBMISSION = b"submission" * 30_000
EVALUATION = b"evaluation"
TASK, OTHER_TASK = b"t" * 32, b"u" * 32
MANIFEST = TaskManifest(
    fleet="default", algorithm="fedtc", classes=("a", "b"), backbones=(reference(BACKBONE, "backbone"),), alpha=0.99,
    batch_size=5, min_images=2, seed=0,
)  # fmt: skip
ITEM = item_of(SUBMISSION)
QUERY = events.SendFrames(ITEM, ((len(SUBMISSION) - QUERY_BYTES, len(SUBMISSION)),))
HEAD_MANIFEST = HeadManifest(
    task=TASK, current=HeadRef(version=1, head=reference(HEAD, "head"), devices=1, prototypes=1)
)
INSTALL = events.InstallHead(TASK, MANIFEST, HEAD_MANIFEST.current)


def begin(mode: Mode = Mode.ONCE, *, loss: float = 0.0, seed: int = 0, **more: Any) -> World:
    world = World(
        State(mode=mode), random.Random(seed), loss, submission=SUBMISSION, evaluation=EVALUATION,
        served={digest_of(data): data for data in (BACKBONE, HEAD)},
        greets=[events.TaskSeen(TASK, MANIFEST), HEAD_MANIFEST], **more,
    )  # fmt: skip
    world.pending = world.connect()
    return world


def play(state: State, *happened: events.Event, now_s: float = 0) -> tuple[State, list[events.Action]]:
    """Return the state after events, one second apart, and all actions."""
    actions: list[events.Action] = []
    for seconds, event in enumerate(happened):
        state, more = step(state, event, now_s=now_s + seconds)
        actions.extend(more)
    return state, actions


def uploading(mode: Mode = Mode.SERVICE) -> State:
    stored = frozenset({digest_of(BACKBONE)})
    state = State(mode=mode, device="device", stored=stored, connected=True, has_record=True)
    return play(state, events.TaskSeen(TASK, MANIFEST), events.SubmissionBuilt(TASK, ITEM))[0]


def receipt(**fields: Any) -> Receipt:
    return Receipt(**{"digest": ITEM.digest, "status": "refused", **fields})


@pytest.mark.parametrize(
    ("mode", "last"), [(Mode.SERVICE, events.Log), (Mode.ONCE, events.Exit), (Mode.DRY_RUN, events.Exit)]
)
def test_a_blob_that_stays_damaged_is_reported(mode: Mode, last: type[events.Action]) -> None:
    """It is downloaded again at once first; a service continues, and says no more about it."""
    damaged = [events.DownloadFinished(digest_of(BACKBONE), valid=False)] * MAX_DAMAGED
    state, actions = play(State(mode=mode), events.TaskSeen(TASK, MANIFEST), *damaged)
    assert [type(action) for action in actions[1:]] == [events.Log, events.Log, last]
    assert state.download_problem in str(actions[-1])
    assert mode is not Mode.SERVICE or not play(state, *damaged)[1]


def test_a_superseded_submission_is_built_again_above_the_reported_sequence() -> None:
    """The device may have lost its own count."""
    _, actions = play(uploading(), receipt(reason="superseded", sequence=41))
    assert actions == [events.BuildSubmission(TASK, MANIFEST, above=41)]


@pytest.mark.parametrize(
    ("mode", "kind", "fields"),
    [
        (Mode.ONCE, events.Exit, {"reason": "shape"}),
        (Mode.SERVICE, events.Log, {"reason": "shape"}),
        # A device above an extreme sequence could never upload again.
        (Mode.SERVICE, events.Log, {"reason": "superseded", "sequence": 2**63 - 1}),
        (Mode.SERVICE, events.Log, {"reason": "superseded", "sequence": 2**62}),
        (Mode.SERVICE, events.Exit, {"reason": "unknown_device"}),
    ],
)
def test_a_refusal_ends_the_program_or_is_logged(
    mode: Mode, kind: type[events.Action], fields: dict[str, Any]
) -> None:
    """The line has the aggregator's detail."""
    state, (action,) = play(uploading(mode), receipt(detail="expected (m, 8)", **fields))
    assert isinstance(action, kind)
    assert "expected (m, 8)" in str(action)
    assert [upload.item for upload in state.uploads] == ([ITEM] if kind is events.Log else [])


def test_requests_for_a_refused_blob_back_off() -> None:
    """The refusal is logged once."""
    digest = digest_of(BACKBONE)
    state = State(mode=Mode.SERVICE, connected=True, has_record=True)
    state, actions = play(state, events.TaskSeen(TASK, MANIFEST), events.DownloadOpened(digest, 0))
    asked, logged = [], 0
    for second in range(1, 3000):
        if any(isinstance(action, events.RequestBlob) for action in actions):
            asked.append(second)
            state, actions = play(state, receipt(digest=digest, reason="unknown_blob"), now_s=second)
            logged += sum(isinstance(action, events.Log) for action in actions)
        state, actions = play(state, events.Ticked(), now_s=second)
    assert logged == 1
    assert 5 < len(asked) < 20


def test_a_build_that_failed_for_a_passing_reason_is_repeated() -> None:
    """Delays grow, and the log has one line; another task starts with the first delay."""
    failed = events.SubmissionBuilt(TASK, None, reason="the disk fails", may_pass=True, retries=True)
    build = events.BuildSubmission(TASK, MANIFEST)
    state = State(mode=Mode.SERVICE, stored=frozenset({digest_of(BACKBONE)}))
    state, actions = play(state, events.TaskSeen(TASK, MANIFEST), failed, now_s=-1)
    assert actions == [build, events.Log("the disk fails", error=True)]
    now_s = 0.0
    for delay_s in (20, 40, 80, 160, 300, 300):
        assert play(state, events.Ticked(), now_s=now_s + delay_s - 1)[1] == []
        now_s += delay_s
        state, actions = play(state, events.Ticked(), now_s=now_s)
        assert actions == [build]
        state, actions = play(state, failed, now_s=now_s)
        assert actions == []
    state, _ = play(state, events.TaskSeen(OTHER_TASK, MANIFEST), now_s=now_s)
    built = events.SubmissionBuilt(OTHER_TASK, None, reason="no", may_pass=True)
    state, _ = play(state, built, now_s=now_s)
    assert play(state, events.Ticked(), now_s=now_s + 1e6)[1] == []


def test_a_stored_task_is_started_but_must_be_confirmed() -> None:
    """A single run exits only after the broker has sent the same task."""
    done = head_key(HEAD_MANIFEST.current)
    stored = frozenset({digest_of(BACKBONE), done})
    state = State(mode=Mode.ONCE, stored=stored, installed=done, evaluated=done)
    built = events.SubmissionBuilt(TASK, replace(ITEM, received=True))
    state, actions = play(state, events.TaskSeen(TASK, MANIFEST, recalled=True), built, HEAD_MANIFEST)
    assert actions == [events.BuildSubmission(TASK, MANIFEST)]
    _, actions = play(state, events.TaskSeen(OTHER_TASK, MANIFEST))
    assert actions == [events.BuildSubmission(OTHER_TASK, MANIFEST)]
    assert play(state, events.TaskSeen(TASK, MANIFEST))[1] == [events.Exit(0)]


@pytest.mark.parametrize(
    "forged", [{"status": "received"}, {"reason": "malformed"}, {"reason": "superseded", "sequence": 2**60}]
)
def test_a_forged_receipt_does_not_keep_a_submission_for_good(forged: dict[str, Any]) -> None:
    """The aggregator is asked again: after a delay, or once the task is signed again, if it is said to be received."""
    state, _ = play(uploading(), receipt(**forged))
    item = replace(ITEM, received=state.received_submission is not None)
    assert play(state, events.OutboxSeen((item,)), now_s=10)[1] == [events.SendFrames(item, QUERY.ranges)]


@pytest.mark.parametrize(("expired", "builds", "installs"), [("task", 0, 0), ("head", 1, 0), ("round", 1, 1)])
def test_nothing_new_follows_from_an_expired_manifest(expired: str, builds: int, installs: int) -> None:
    """Only from the one that has expired, and only of those that the device follows; work goes on with a newer one."""
    stored = frozenset({digest_of(BACKBONE), digest_of(HEAD)})
    state = State(mode=Mode.SERVICE, stored=stored, expired=frozenset({expired}))
    state, actions = play(state, events.TaskSeen(TASK, MANIFEST), HEAD_MANIFEST)
    build = events.BuildSubmission(TASK, MANIFEST)
    assert (actions.count(build), actions.count(INSTALL)) == (builds, installs)
    _, actions = play(replace(state, expired=frozenset()), HEAD_MANIFEST)
    assert (actions.count(build), actions.count(INSTALL)) == (1 - builds, 1 - installs)


LIMITS = (None, 2_000_000, 20_000, 3_000)
"""Packet limits of brokers."""


def _check_end(world: World) -> None:
    """Check that the device exited with its submission and evaluation received once."""
    assert world.exit == events.Exit(0)
    assert sorted(world.taken) == sorted([digest_of(SUBMISSION), digest_of(EVALUATION)])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(1, 60), max_size=6),
    packets=st.lists(st.sampled_from(LIMITS), min_size=1, max_size=3),
    chunks=st.lists(st.sampled_from([61_440, 19_000, 4_321]), min_size=1, max_size=3),
    forgets=st.booleans(),
)
def test_transfers_resume_after_a_reconnect(
    seed: int, cuts: list[int], packets: list[int | None], chunks: list[int], *, forgets: bool
) -> None:
    """The new broker may have another packet limit, and the aggregator may have restarted."""
    world = begin(loss=0.1, seed=seed, packets=packets, chunks=chunks)
    for cut in cuts:
        world.run(steps=cut)
        if world.exit is None:
            world.cut()
        if world.exit is None and forgets:
            world.restart_aggregator()
    world.run()
    _check_end(world)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    loss=st.sampled_from([0.0, 0.1, 0.5]),
    crashes=st.lists(st.integers(1, 40), max_size=8),
    packets=st.lists(st.sampled_from(LIMITS), min_size=1, max_size=2),
    full_until_s=st.sampled_from([0.0, 100.0, 3_000.0]),
)
def test_message_loss_and_power_loss_at_any_action_are_recovered(
    seed: int, loss: float, crashes: list[int], packets: list[int | None], full_until_s: float
) -> None:
    """Also while the aggregator has no space; the submission and the evaluation count once."""
    world = begin(loss=loss, seed=seed, packets=packets, full_until_s=full_until_s, crashes=crashes)
    world.run()
    _check_end(world)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lost_after=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    crashes=st.lists(st.integers(1, 40), max_size=4),
)
def test_an_aggregator_without_state_receives_the_submission_again(
    seed: int, lost_after: list[int], crashes: list[int]
) -> None:
    world = begin(Mode.SERVICE, loss=0.1, seed=seed, crashes=crashes)
    for steps in lost_after:
        world.run(steps=steps)
        world.taken.clear()
        world.restart_aggregator()
    world.run(steps=4_000)
    assert world.taken.count(digest_of(SUBMISSION)) == 1
    assert world.state.uploads == ()


def test_the_record_of_releases_waits_for_the_end_of_a_build() -> None:
    """An aggregator that starts again and again would learn when a release is charged, which depends on images."""
    wanted = DifferentialPrivacy(noise_multiplier=2.0, delta=1e-5, max_epsilon=6.0)
    manifest = msgspec.structs.replace(MANIFEST, differential_privacy=wanted)
    state = State(mode=Mode.SERVICE, device="device", stored=frozenset({digest_of(BACKBONE)}), connected=True)
    state, actions = play(state, events.TaskSeen(TASK, manifest), events.RecordAdopted(is_complete=True))
    assert actions == [events.SendRecord(), events.BuildSubmission(TASK, manifest)]
    state, actions = play(state, *[events.AggregatorStarted(), events.Ticked()] * 3, now_s=100)
    assert actions == []
    _, actions = play(state, events.SubmissionBuilt(TASK, ITEM), now_s=200)
    assert events.SendRecord() in actions
