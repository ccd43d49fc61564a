"""The state machine against a simulated aggregator and a lossy network."""

import itertools
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.agent import events
from edge_client.agent.state import MAX_DAMAGED, Mode, State, UploadItem, head_key
from edge_client.agent.state_machine import step
from edge_client.agent.uploads import QUERY_BYTES
from protocol.retry_delay import MAX_DELAY_S
from protocol.wire.canary_rank import canary_rank
from protocol.wire.codec import digest_of
from protocol.wire.messages import HeadManifest, HeadRef, Receipt, TaskManifest
from tests.support.simulated_fleet import World, item_of, reference

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

LIMITS = (None, 2_000_000, 20_000, 3_000)
"""Packet limits of brokers."""


def _begin(mode: Mode = Mode.ONCE, *, loss: float = 0.0, seed: int = 0, **more: Any) -> World:
    world = World(
        State(mode=mode), random.Random(seed), loss, submission=SUBMISSION, evaluation=EVALUATION,
        served={digest_of(data): data for data in (BACKBONE, HEAD)},
        greets=[events.TaskSeen(TASK, MANIFEST), HEAD_MANIFEST], **more,
    )  # fmt: skip
    world.pending = world.connect()
    return world


def _check_end(world: World) -> None:
    """Check that the device exited with its submission and evaluation received once."""
    assert world.exit == events.Exit(0)
    assert sorted(world.taken) == sorted([digest_of(SUBMISSION), digest_of(EVALUATION)])


def _play(state: State, *happened: events.Event, now_s: float = 0) -> tuple[State, list[events.Action]]:
    """Return the state after events, one second apart, and all actions."""
    actions: list[events.Action] = []
    for seconds, event in enumerate(happened):
        state, more = step(state, event, now_s=now_s + seconds)
        actions.extend(more)
    return state, actions


def _uploading(mode: Mode = Mode.SERVICE) -> State:
    state = State(mode=mode, device="device", stored=frozenset({digest_of(BACKBONE)}), connected=True)
    return _play(state, events.TaskSeen(TASK, MANIFEST), events.SubmissionBuilt(TASK, ITEM))[0]


def _receipt(**fields: Any) -> Receipt:
    return Receipt(**{"digest": ITEM.digest, "status": "refused", **fields})


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
    world = _begin(loss=0.1, seed=seed, packets=packets, chunks=chunks)
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
    world = _begin(loss=loss, seed=seed, packets=packets, full_until_s=full_until_s, crashes=crashes)
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
    world = _begin(Mode.SERVICE, loss=0.1, seed=seed, crashes=crashes)
    for steps in lost_after:
        world.run(steps=steps)
        world.taken.clear()
        world.restart_aggregator()
    world.run(steps=4_000)
    assert world.taken.count(digest_of(SUBMISSION)) == 1
    assert world.state.uploads == ()


def test_nothing_is_sent_without_a_connection() -> None:
    """The submission is built and kept."""
    state = State(mode=Mode.SERVICE, stored=frozenset({digest_of(BACKBONE)}))
    state, actions = _play(state, events.TaskSeen(TASK, MANIFEST), events.SubmissionBuilt(TASK, ITEM))
    assert actions == [events.BuildSubmission(TASK, MANIFEST)]
    assert _play(state, events.Connected())[1] == [QUERY]


def test_a_download_resumes_at_the_bytes_on_disk() -> None:
    world = _begin()
    world.disk[digest_of(BACKBONE)] = BACKBONE[:70_000]
    world.run()
    asked = [action for action in world.done if isinstance(action, events.RequestBlob)]
    assert asked[0] == events.RequestBlob(digest_of(BACKBONE), 70_000, len(BACKBONE) - 70_000)


def test_a_blob_that_stays_damaged_ends_the_program() -> None:
    """It is downloaded again first."""
    damaged = [events.DownloadFinished(digest_of(BACKBONE), valid=False)] * MAX_DAMAGED
    _, actions = _play(State(mode=Mode.SERVICE), events.TaskSeen(TASK, MANIFEST), *damaged)
    assert [type(action) for action in actions[1:]] == [events.Log, events.Log, events.Exit]


def test_a_superseded_submission_is_built_again_above_the_reported_sequence() -> None:
    """The device may have lost its own count."""
    _, actions = _play(_uploading(), _receipt(reason="superseded", sequence=41))
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
    state, (action,) = _play(_uploading(mode), _receipt(detail="expected (m, 8)", **fields))
    assert isinstance(action, kind)
    assert "expected (m, 8)" in str(action)
    assert state.uploads == ()


def test_a_newer_submission_replaces_a_pending_one() -> None:
    newer = item_of(b"newer")
    state, actions = _play(_uploading(), events.ImagesChanged(), events.SubmissionBuilt(TASK, newer))
    assert [upload.item for upload in state.uploads] == [newer]
    send = events.SendFrames(newer, ((0, newer.size_bytes),))
    assert actions == [events.BuildSubmission(TASK, MANIFEST), send]


def test_a_new_task_ends_the_transfers_of_the_old_one() -> None:
    """Another submission is built, and a late result of the old task is dropped."""
    late = events.SubmissionBuilt(TASK, ITEM)
    state, actions = _play(_uploading(), events.TaskSeen(OTHER_TASK, MANIFEST), late)
    assert (state.uploads, actions) == ((), [events.BuildSubmission(OTHER_TASK, MANIFEST)])


def _report(world: World, head: HeadRef) -> UploadItem:
    """Put a report of a refused head into the outbox."""
    return world.keep("evaluation", b"report", about=head_key(head).hex())


def test_a_refused_head_is_reported_and_not_installed_again() -> None:
    """The previous head stays in use until the aggregator restarts."""
    key, report = head_key(HEAD_MANIFEST.current), item_of(b"report", kind="evaluation")
    state, actions = _play(_uploading(), HEAD_MANIFEST, events.DownloadFinished(key, valid=True))
    assert INSTALL in actions
    state, actions = _play(state, events.HeadInstalled(key, report, reason="it predicts NaN"), HEAD_MANIFEST)
    assert actions[0] == events.Log("it predicts NaN", error=True)
    assert (state.installed, state.uploads[-1].item) == (None, report)
    assert INSTALL not in actions
    assert INSTALL in _play(state, events.AggregatorStarted())[1]


def test_a_single_run_reports_a_refused_head_before_it_ends() -> None:
    """It exits with the reason once the report is received."""
    world = _begin(loss=0.3)
    world.install = lambda install: world.pending.append(  # type: ignore[method-assign]
        events.HeadInstalled(head_key(install.head), _report(world, install.head), reason="it predicts NaN")
    )
    world.run()
    assert world.exit == events.Exit(1, "it predicts NaN")
    assert sorted(set(world.taken)) == sorted([digest_of(SUBMISSION), digest_of(b"report")])


def test_a_head_that_stays_damaged_is_refused() -> None:
    """The device continues, and installs the next head."""
    good = HeadRef(version=2, head=reference(b"good head", "head"), devices=1, prototypes=1)
    world = _begin(Mode.SERVICE)
    world.served[digest_of(HEAD)] = HEAD[:-1] + b"x"
    refused: list[events.InstallHead] = []
    perform = world.perform

    def performed(action: events.Action) -> None:
        if isinstance(action, events.AppendBlob) and action.done == action.blob.size_bytes:
            perform(action)
            world.disk.pop(action.blob.digest)
        elif isinstance(action, events.InstallHead) and action.problem:
            refused.append(action)
            report = _report(world, action.head)
            world.pending.append(events.HeadInstalled(head_key(action.head), report, "damaged"))
        else:
            perform(action)

    world.perform = performed  # type: ignore[method-assign]
    world.run(steps=400)
    assert [action.head.version for action in refused] == [1]
    assert digest_of(b"report") in world.taken
    world.served[digest_of(b"good head")] = b"good head"
    world.pending.append(HeadManifest(task=TASK, current=good))
    world.run(steps=400)
    assert world.state.installed == head_key(good)
    assert (len(refused), world.exit) == (1, None)


def _rollout(*, below: int) -> HeadManifest:
    candidate = HeadRef(version=2, head=reference(b"candidate", "head"), devices=1, prototypes=1)
    current = HEAD_MANIFEST.current
    return HeadManifest(task=TASK, current=current, candidate=candidate, canary_rank_limit=below)


def test_only_canaries_install_the_candidate() -> None:
    """The device's rank for the candidate's version decides."""
    rank = canary_rank("device", 2)
    for below, version in ((rank + 1, 2), (rank, 1), (0, 1)):
        state, _ = _play(_uploading(), _rollout(below=below))
        head = state.current_head
        assert head is not None
        assert head.version == version
        assert head.head in state.required_blobs
        assert len(state.prediction_blobs) == 2


def test_a_canary_goes_back_to_the_current_head() -> None:
    """The manifest without a candidate decides."""
    stored = frozenset({digest_of(BACKBONE), digest_of(HEAD), digest_of(b"candidate")})
    state, _ = _play(
        State(mode=Mode.SERVICE, device="device", stored=stored), events.TaskSeen(TASK, MANIFEST)
    )
    for seen, version in ((_rollout(below=2**32), 2), (HEAD_MANIFEST, 1)):
        state, (install,) = _play(state, seen)
        assert isinstance(install, events.InstallHead)
        assert (install.head.version, install.as_canary) == (version, version == 2)
        installed = events.HeadInstalled(head_key(install.head), item_of(b"report", kind="evaluation"))
        state, _ = _play(state, installed)
        assert state.installed == head_key(install.head)


def test_a_dry_run_builds_and_exits() -> None:
    """It uploads nothing, and installs no head."""
    stored = frozenset({digest_of(BACKBONE), digest_of(HEAD)})
    state = State(mode=Mode.DRY_RUN, stored=stored, connected=True)
    built = events.SubmissionBuilt(TASK, ITEM)
    _, actions = _play(state, events.TaskSeen(TASK, MANIFEST), HEAD_MANIFEST, built)
    assert actions == [events.BuildSubmission(TASK, MANIFEST), events.Exit(0)]


def test_the_retry_delay_grows_until_the_aggregator_restarts() -> None:
    """The next query is sent at once then."""
    state = _uploading()
    asked: list[int] = []
    for second in range(1, 2000):
        state, actions = step(state, events.Drained(), now_s=second)
        asked.extend(second for action in actions if isinstance(action, events.SendFrames))
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= MAX_DELAY_S
    assert _play(state, events.AggregatorStarted(), now_s=2000)[1] == [QUERY]


def test_requests_for_a_refused_blob_back_off() -> None:
    """The refusal is logged once."""
    digest = digest_of(BACKBONE)
    state = State(mode=Mode.SERVICE, connected=True)
    state, actions = _play(state, events.TaskSeen(TASK, MANIFEST), events.DownloadOpened(digest, 0))
    asked, logged = [], 0
    for second in range(1, 3000):
        if any(isinstance(action, events.RequestBlob) for action in actions):
            asked.append(second)
            state, actions = _play(state, _receipt(digest=digest, reason="unknown_blob"), now_s=second)
            logged += sum(isinstance(action, events.Log) for action in actions)
        state, actions = _play(state, events.Ticked(), now_s=second)
    assert logged == 1
    assert 5 < len(asked) < 20


def test_a_blob_refused_to_an_unknown_device_ends_the_program() -> None:
    """The line has the aggregator's detail."""
    refusal = _receipt(digest=digest_of(BACKBONE), reason="unknown_device", detail="not enrolled")
    state = State(mode=Mode.SERVICE, connected=True)
    _, (_, action) = _play(state, events.TaskSeen(TASK, MANIFEST), refusal)
    assert isinstance(action, events.Exit)
    assert "not enrolled" in action.text


def test_a_failing_stored_task_does_not_end_a_service() -> None:
    """The broker may have a newer task."""
    newer = msgspec.structs.replace(MANIFEST, seed=1)
    state = State(mode=Mode.SERVICE, stored=frozenset({digest_of(BACKBONE)}))
    failed, failed_again = (events.SubmissionBuilt(task, None, reason="no") for task in (TASK, OTHER_TASK))
    state, actions = _play(state, events.TaskSeen(TASK, MANIFEST, recalled=True), failed)
    assert actions[1:] == [events.Log("no", error=True)]
    _, actions = _play(state, events.TaskSeen(OTHER_TASK, newer), failed_again)
    assert actions == [events.BuildSubmission(OTHER_TASK, newer), events.Exit(1, "no")]


@pytest.mark.parametrize(("mode", "end"), [(Mode.SERVICE, []), (Mode.ONCE, [events.Exit(0)])])
def test_a_device_without_images_receives_heads(mode: Mode, end: list[events.Action]) -> None:
    """It logs this once, evaluates the head, and uploads nothing else; a dry run ends in an error."""
    none = events.SubmissionBuilt(TASK, None, reason="no image", may_pass=True, no_images=True)
    report = item_of(EVALUATION, kind="evaluation", about=head_key(HEAD_MANIFEST.current).hex())
    happened = (
        events.TaskSeen(TASK, MANIFEST), none, events.ImagesChanged(), none, HEAD_MANIFEST,
        events.HeadInstalled(head_key(HEAD_MANIFEST.current), report),
        Receipt(digest=report.digest, status="received"),
    )  # fmt: skip
    stored = frozenset({digest_of(BACKBONE), digest_of(HEAD)})
    state, actions = _play(State(mode=mode, stored=stored), *happened)
    build = events.BuildSubmission(TASK, MANIFEST)
    assert actions == [build, events.Log("no image"), build, INSTALL, events.StoreReceipt(report), *end]
    assert state.evaluated == head_key(HEAD_MANIFEST.current)
    _, actions = _play(State(mode=Mode.DRY_RUN, stored=stored), *happened[:2])
    assert actions == [build, events.Exit(1, "no image")]


def test_a_build_that_failed_for_a_passing_reason_is_repeated() -> None:
    """With growing delays and one line in the log; another task begins anew."""
    failed = events.SubmissionBuilt(TASK, None, reason="the disk fails", may_pass=True, retries=True)
    build = events.BuildSubmission(TASK, MANIFEST)
    state = State(mode=Mode.SERVICE, stored=frozenset({digest_of(BACKBONE)}))
    state, actions = _play(state, events.TaskSeen(TASK, MANIFEST), failed, now_s=-1)
    assert actions == [build, events.Log("the disk fails", error=True)]
    now_s = 0.0
    for delay_s in (20, 40, 80, 160, 300, 300):
        assert _play(state, events.Ticked(), now_s=now_s + delay_s - 1)[1] == []
        now_s += delay_s
        state, actions = _play(state, events.Ticked(), now_s=now_s)
        assert actions == [build]
        state, actions = _play(state, failed, now_s=now_s)
        assert actions == []
    state, _ = _play(state, events.TaskSeen(OTHER_TASK, MANIFEST), now_s=now_s)
    built = events.SubmissionBuilt(OTHER_TASK, None, reason="no", may_pass=True)
    state, _ = _play(state, built, now_s=now_s)
    assert _play(state, events.Ticked(), now_s=now_s + 1e6)[1] == []


def test_a_stored_task_is_started_but_must_be_confirmed() -> None:
    """A single run exits only after the broker has sent the same task."""
    done = head_key(HEAD_MANIFEST.current)
    stored = frozenset({digest_of(BACKBONE), done})
    state = State(mode=Mode.ONCE, stored=stored, installed=done, evaluated=done)
    built = events.SubmissionBuilt(TASK, replace(ITEM, received=True))
    state, actions = _play(state, events.TaskSeen(TASK, MANIFEST, recalled=True), built, HEAD_MANIFEST)
    assert actions == [events.BuildSubmission(TASK, MANIFEST)]
    _, actions = _play(state, events.TaskSeen(OTHER_TASK, MANIFEST))
    assert actions == [events.BuildSubmission(OTHER_TASK, MANIFEST)]
    assert _play(state, events.TaskSeen(TASK, MANIFEST))[1] == [events.Exit(0)]


def test_a_reconnected_aggregator_is_queried_at_once() -> None:
    """The device may have connected before it."""
    _, actions = _play(
        _uploading(), events.Ticked(), events.AggregatorReconnected(), events.Ticked(), now_s=1
    )
    assert actions == [QUERY]


def test_a_restarted_aggregator_is_asked_for_missing_ranges() -> None:
    """A received submission is queried again, and sent if it is missing."""
    received, missing = _receipt(status="received"), _receipt(status="missing", missing=((0, 9),))
    state, actions = _play(_uploading(), received, events.AggregatorStarted(), missing, received, now_s=1)
    store, send = events.StoreReceipt(ITEM), events.SendFrames(ITEM, ((0, 9), *QUERY.ranges))
    assert actions == [store, QUERY, send, store]
    assert state.uploads == ()


@pytest.mark.parametrize(("expired", "builds", "installs"), [("task", 0, 0), ("head", 1, 0), ("round", 1, 1)])
def test_nothing_new_follows_from_an_expired_manifest(expired: str, builds: int, installs: int) -> None:
    """Only from the one that has expired, and only of those that the device follows; work goes on with a newer one."""
    stored = frozenset({digest_of(BACKBONE), digest_of(HEAD)})
    state = State(mode=Mode.SERVICE, stored=stored, expired=frozenset({expired}))
    state, actions = _play(state, events.TaskSeen(TASK, MANIFEST), HEAD_MANIFEST)
    build = events.BuildSubmission(TASK, MANIFEST)
    assert (actions.count(build), actions.count(INSTALL)) == (builds, installs)
    _, actions = _play(replace(state, expired=frozenset()), HEAD_MANIFEST)
    assert (actions.count(build), actions.count(INSTALL)) == (1 - builds, 1 - installs)


def test_a_single_run_ends_if_the_task_has_expired() -> None:
    """It does not end because of the stored task, before the broker has delivered one."""
    state = State(mode=Mode.ONCE, expired=frozenset({"task"}))
    state, actions = _play(state, events.TaskSeen(TASK, MANIFEST, recalled=True))
    assert not [action for action in actions if isinstance(action, events.Exit)]
    _, actions = _play(state, events.TaskSeen(TASK, MANIFEST))
    assert events.Exit(1, "the task's manifest has expired; see the log") in actions
