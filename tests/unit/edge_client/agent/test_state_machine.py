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
from edge_client.agent.state import MAX_DAMAGED, MAX_DELAY_S, Mode, State, UploadItem, head_key
from edge_client.agent.state_machine import step
from edge_client.agent.uploads import QUERY_BYTES
from protocol.wire.canary_rank import canary_rank
from protocol.wire.codec import digest_of
from protocol.wire.messages import HeadManifest, HeadRef, Receipt, TaskManifest
from tests.support.simulated_fleet import World, item_of, reference

BACKBONE = bytes(range(256)) * 1200
HEAD = b"head" * 50_000
SUBMISSION = b"submission" * 30_000
EVALUATION = b"evaluation"


MANIFEST = TaskManifest(
    fleet="default",
    algorithm="fedtc",
    classes=("a", "b"),
    backbones=(reference(BACKBONE, "backbone"),),
    alpha=0.99,
    batch_size=5,
    min_images=2,
    seed=0,
)
TASK = b"t" * 32
ITEM = item_of(SUBMISSION)
QUESTION = events.SendFrames(ITEM, ((len(SUBMISSION) - QUERY_BYTES, len(SUBMISSION)),))
"""The last bytes of the submission, which ask what is missing."""

HEAD_MANIFEST = HeadManifest(
    task=TASK,
    current=HeadRef(version=1, head=reference(HEAD, "head"), devices=1, prototypes=1),
)


LIMITS = (None, 2_000_000, 20_000, 3_000)
"""What brokers say of their largest packet; the last is one for a toy."""


def replace_task(manifest: TaskManifest) -> TaskManifest:
    """Return another task on the same backbone."""
    return msgspec.structs.replace(manifest, seed=manifest.seed + 1)


def _begin(mode: Mode = Mode.ONCE, *, loss: float = 0.0, seed: int = 0, **more: Any) -> World:
    world = World(
        State(mode=mode), random.Random(seed), loss, submission=SUBMISSION, evaluation=EVALUATION,
        served={digest_of(data): data for data in (BACKBONE, HEAD)},
        greets=[events.TaskSeen(TASK, MANIFEST), events.HeadSeen(HEAD_MANIFEST)], **more,
    )  # fmt: skip
    world.pending = world.connect()
    return world


def _check_end(world: World) -> None:
    """Check that the device exited with its submission and evaluation received once."""
    assert world.exit == events.Exit(0)
    assert sorted(world.taken) == sorted([digest_of(SUBMISSION), digest_of(EVALUATION)])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), loss=st.floats(0, 0.5))
def test_lost_messages_are_repeated(seed: int, loss: float) -> None:
    """However many messages are lost or duplicated, the submission and the evaluation count once."""
    world = _begin(loss=loss, seed=seed)
    world.run()
    _check_end(world)


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
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    crashes=st.lists(st.integers(1, 40), max_size=8),
    packets=st.lists(st.sampled_from(LIMITS), min_size=1, max_size=2),
    full_until_s=st.sampled_from([0.0, 100.0, 3_000.0]),
)
def test_power_loss_at_any_action_is_recovered(
    seed: int, loss: float, crashes: list[int], packets: list[int | None], full_until_s: float
) -> None:
    """Also while the aggregator has no space; the submission counts once."""
    world = _begin(loss=loss, seed=seed, packets=packets, full_until_s=full_until_s, crashes=crashes)
    world.run()
    _check_end(world)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lost_after=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    crashes=st.lists(st.integers(1, 40), max_size=4),
)
def test_an_aggregator_without_state_receives_the_submission_again(
    seed: int, lost_after: list[int], crashes: list[int]
) -> None:
    """Whenever it restarts without its state, the submission is received once more."""
    world = _begin(Mode.SERVICE, loss=0.1, seed=seed, crashes=crashes)
    for steps in lost_after:
        world.run(steps=steps)
        world.taken.clear()
        world.restart_aggregator()
    world.run(steps=4_000)
    assert world.taken.count(digest_of(SUBMISSION)) == 1
    assert world.state.uploads == ()


@pytest.mark.parametrize("number", range(1, 30))
def test_a_crash_after_each_action_is_recovered(number: int) -> None:
    """An otherwise undisturbed run is killed after each of its actions."""
    world = _begin(crashes=[number])
    world.run()
    _check_end(world)


def test_nothing_is_sent_without_a_connection() -> None:
    """The submission is built and kept."""
    state = State(mode=Mode.SERVICE, stored=frozenset({digest_of(BACKBONE)}))
    state, actions = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    assert actions == (events.BuildSubmission(TASK, MANIFEST),)
    state, actions = step(state, events.SubmissionBuilt(TASK, ITEM), now_s=1)
    assert actions == ()
    state, actions = step(state, events.Connected(), now_s=2)
    assert actions == (events.Announce(), QUESTION)


def test_a_download_resumes_at_the_bytes_on_disk() -> None:
    """They are not requested again."""
    world = _begin()
    world.disk[digest_of(BACKBONE)] = BACKBONE[:70_000]
    world.run()
    asked = [action for action in world.done if isinstance(action, events.RequestBlob)]
    assert asked[0] == events.RequestBlob(digest_of(BACKBONE), 70_000, len(BACKBONE) - 70_000)


def test_a_blob_that_stays_damaged_ends_the_program() -> None:
    """It is downloaded again first."""
    state, _ = step(State(mode=Mode.SERVICE), events.TaskSeen(TASK, MANIFEST), now_s=0)
    said: list[events.Action] = []
    for _ in range(MAX_DAMAGED):
        state, actions = step(state, events.DownloadFinished(digest_of(BACKBONE), valid=False), now_s=0)
        said.extend(actions)
    assert isinstance(said[0], events.Log)
    assert isinstance(said[-1], events.Exit)
    assert said[-1].code == 1


def _uploading(mode: Mode = Mode.SERVICE) -> State:
    state = State(mode=mode, stored=frozenset({digest_of(BACKBONE)}), connected=True)
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    state, _ = step(state, events.SubmissionBuilt(TASK, ITEM), now_s=0)
    return state


def test_a_superseded_submission_is_built_again_above_the_reported_sequence() -> None:
    """The device may have lost its own count."""
    receipt = Receipt(digest=digest_of(SUBMISSION), status="refused", reason="superseded", sequence=41)
    _, actions = step(_uploading(), events.ReceiptSeen(receipt), now_s=0)
    assert actions == (events.BuildSubmission(TASK, MANIFEST, above=41),)


@pytest.mark.parametrize("sequence", [2**63 - 1, 2**63 - 2, 2**62])
def test_an_extreme_sequence_is_not_exceeded(sequence: int) -> None:
    """A device above it could never upload again."""
    receipt = Receipt(
        digest=digest_of(SUBMISSION),
        status="refused",
        reason="superseded",
        sequence=sequence,
        detail="stands",
    )
    state, actions = step(_uploading(), events.ReceiptSeen(receipt), now_s=0)
    (told,) = actions
    assert isinstance(told, events.Log)
    assert (told.error, state.uploads) == (True, ())


@pytest.mark.parametrize(("mode", "kind"), [(Mode.ONCE, events.Exit), (Mode.SERVICE, events.Log)])
def test_a_refusal_ends_a_single_run_and_is_logged_by_a_service(
    mode: Mode, kind: type[events.Action]
) -> None:
    """The line has the aggregator's detail."""
    receipt = Receipt(
        digest=digest_of(SUBMISSION), status="refused", reason="shape", detail="expected (m, 8)"
    )
    state, actions = step(_uploading(mode), events.ReceiptSeen(receipt), now_s=0)
    assert isinstance(actions[0], kind)
    assert "expected (m, 8)" in str(actions[0])
    assert state.uploads == ()


def test_a_newer_submission_replaces_a_pending_one() -> None:
    """It is uploaded instead."""
    state, actions = step(_uploading(), events.ImagesChanged(), now_s=1)
    assert actions == (events.BuildSubmission(TASK, MANIFEST),)
    newer = item_of(b"newer")
    state, actions = step(state, events.SubmissionBuilt(TASK, newer), now_s=2)
    assert [upload.digest for upload in state.uploads] == [newer.digest]
    assert actions == (events.SendFrames(newer, ((0, newer.size_bytes),)),)


def test_a_new_task_ends_the_transfers_of_the_old_one() -> None:
    """Another submission is built, and a late result of the old task is dropped."""
    state, actions = step(_uploading(), events.TaskSeen(b"u" * 32, MANIFEST), now_s=1)
    assert state.uploads == ()
    assert events.BuildSubmission(b"u" * 32, MANIFEST) in actions
    state, actions = step(state, events.SubmissionBuilt(TASK, ITEM), now_s=2)
    assert actions == ()


def _report(world: World, head: HeadRef) -> UploadItem:
    """Put a report of a refused head into the outbox."""
    return world.keep("evaluation", b"report", about=head_key(head).hex())


def test_a_refused_head_is_reported_and_not_installed_again() -> None:
    """The previous head stays in use until the aggregator restarts."""
    state = _uploading()
    state, _ = step(state, events.HeadSeen(HEAD_MANIFEST), now_s=0)
    state, actions = step(
        state, events.DownloadFinished(HEAD_MANIFEST.current.head.digest, valid=True), now_s=0
    )
    assert events.InstallHead(TASK, MANIFEST, HEAD_MANIFEST.current) in actions
    report = item_of(b"report", kind="evaluation")
    refused = events.HeadInstalled(HEAD_MANIFEST.current.head.digest, report, reason="it predicts NaN")
    state, actions = step(state, refused, now_s=0)
    assert actions[0] == events.Log("it predicts NaN", error=True)
    assert state.installed is None
    assert state.uploads[-1].item == report
    state, actions = step(state, events.HeadSeen(HEAD_MANIFEST), now_s=1)
    assert not [action for action in actions if isinstance(action, events.InstallHead)]
    _, actions = step(state, events.AggregatorStarted(), now_s=2)
    assert events.InstallHead(TASK, MANIFEST, HEAD_MANIFEST.current) in actions


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
    world.pending.append(events.HeadSeen(HeadManifest(task=TASK, current=good)))
    world.run(steps=400)
    assert world.state.installed == head_key(good)
    assert (len(refused), world.exit) == (1, None)


def _rollout(*, below: int) -> HeadManifest:
    candidate = HeadRef(version=2, head=reference(b"candidate", "head"), devices=1, prototypes=1)
    return HeadManifest(
        task=TASK, current=HEAD_MANIFEST.current, candidate=candidate, canary_rank_limit=below
    )


def test_only_canaries_install_the_candidate() -> None:
    """The device's rank for the candidate's version decides."""
    rank = canary_rank("device", 2)
    for below, version in ((rank + 1, 2), (rank, 1), (0, 1)):
        state = replace(_uploading(), device="device")
        state, _ = step(state, events.HeadSeen(_rollout(below=below)), now_s=0)
        head = state.current_head
        assert head is not None
        assert head.version == version
        assert head.head in state.required_blobs
        assert len(state.prediction_blobs) == 2


def test_a_canary_goes_back_to_the_current_head() -> None:
    """The manifest without a candidate decides."""
    stored = frozenset({digest_of(BACKBONE), digest_of(HEAD), digest_of(b"candidate")})
    state = State(mode=Mode.SERVICE, device="device", stored=stored)
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    for seen, version in ((_rollout(below=2**32), 2), (HEAD_MANIFEST, 1)):
        state, actions = step(state, events.HeadSeen(seen), now_s=0)
        (install,) = [action for action in actions if isinstance(action, events.InstallHead)]
        assert install.head.version == version
        report = item_of(b"report", kind="evaluation")
        state, _ = step(state, events.HeadInstalled(head_key(install.head), report), now_s=0)
        assert state.installed == head_key(install.head)


def test_a_dry_run_publishes_nothing() -> None:
    """It downloads, builds and exits."""
    world = _begin(Mode.DRY_RUN)
    world.run()
    assert world.exit == events.Exit(0)
    sent = (events.Announce, events.SendFrames)
    assert not [action for action in world.done if isinstance(action, sent)]


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
    _, actions = step(state, events.AggregatorStarted(), now_s=2000)
    assert [type(action) for action in actions] == [events.SendFrames]


def test_requests_for_a_refused_blob_back_off() -> None:
    """The refusal is logged once."""
    state = State(mode=Mode.SERVICE, connected=True)
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    refusal = Receipt(digest=digest_of(BACKBONE), status="refused", reason="unknown_blob", detail="none")
    asked, told = [], 0
    state, actions = step(state, events.DownloadOpened(digest_of(BACKBONE), 0), now_s=0)
    for second in range(1, 3000):
        if any(isinstance(action, events.RequestBlob) for action in actions):
            asked.append(second)
            state, actions = step(state, events.ReceiptSeen(refusal), now_s=second)
            told += sum(isinstance(action, events.Log) for action in actions)
        state, actions = step(state, events.Ticked(), now_s=second)
    assert told == 1
    assert 5 < len(asked) < 20


def test_an_unknown_device_exits() -> None:
    """The line has the aggregator's detail."""
    state = State(mode=Mode.SERVICE, connected=True)
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    refusal = Receipt(digest=digest_of(BACKBONE), status="refused", reason="unknown_device", detail="who?")
    _, actions = step(state, events.ReceiptSeen(refusal), now_s=1)
    assert isinstance(actions[0], events.Exit)
    assert "who?" in actions[0].text


def test_a_failing_stored_task_does_not_end_a_service() -> None:
    """The broker may have a newer task."""
    better = replace_task(MANIFEST)
    state = replace(State(mode=Mode.SERVICE), stored=frozenset({MANIFEST.backbones[0].digest}))
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST, recalled=True), now_s=0)
    state, actions = step(state, events.SubmissionBuilt(TASK, None, reason="no such class"), now_s=1)
    assert actions == (events.Log("no such class", error=True),)
    state, actions = step(state, events.TaskSeen(b"u" * 32, better), now_s=2)
    assert events.BuildSubmission(b"u" * 32, better) in actions
    _, actions = step(state, events.SubmissionBuilt(b"u" * 32, None, reason="no such class"), now_s=3)
    assert actions == (events.Exit(1, "no such class"),)


def test_a_stored_task_is_started_but_must_be_confirmed() -> None:
    """A single run exits only after the broker has sent the same task."""
    stored = frozenset({digest_of(BACKBONE), HEAD_MANIFEST.current.head.digest})
    done = HEAD_MANIFEST.current.head.digest
    state = State(mode=Mode.ONCE, stored=stored, installed=done, evaluated=done)
    state, actions = step(state, events.TaskSeen(TASK, MANIFEST, recalled=True), now_s=0)
    assert actions == (events.BuildSubmission(TASK, MANIFEST),)
    state, _ = step(state, events.SubmissionBuilt(TASK, replace(ITEM, received=True)), now_s=0)
    state, actions = step(state, events.HeadSeen(HEAD_MANIFEST), now_s=0)
    assert actions == ()
    _, actions = step(state, events.TaskSeen(b"u" * 32, MANIFEST), now_s=0)
    assert actions == (events.BuildSubmission(b"u" * 32, MANIFEST),)
    _, actions = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    assert actions == (events.Exit(0),)


def test_a_reconnected_aggregator_is_queried_at_once() -> None:
    """The device may have connected before it."""
    state, actions = step(_uploading(), events.Ticked(), now_s=1)
    assert actions == ()
    state, actions = step(state, events.AggregatorReconnected(), now_s=2)
    assert actions == (QUESTION,)
    _, actions = step(state, events.Ticked(), now_s=3)
    assert actions == ()


def test_a_restarted_aggregator_is_asked_for_missing_ranges() -> None:
    """A received submission is queried again, and sent if it is missing."""
    state, _ = step(
        _uploading(), events.ReceiptSeen(Receipt(digest=digest_of(SUBMISSION), status="received")), now_s=1
    )
    assert state.uploads == ()
    state, actions = step(state, events.AggregatorStarted(), now_s=2)
    assert actions == (QUESTION,)
    missing = Receipt(digest=digest_of(SUBMISSION), status="missing", missing=((0, 9),))
    _, actions = step(state, events.ReceiptSeen(missing), now_s=3)
    assert actions == (events.SendFrames(ITEM, ((0, 9), *QUESTION.ranges)),)
    _, actions = step(
        state, events.ReceiptSeen(Receipt(digest=digest_of(SUBMISSION), status="received")), now_s=3
    )
    assert actions == (events.StoreReceipt(ITEM),)
