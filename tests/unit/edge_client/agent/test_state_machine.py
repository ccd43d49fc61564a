"""The state machine: submissions, tasks, blobs, receipts and delays, against a simulated aggregator."""

import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from edge_client.agent import events
from edge_client.agent.state import MAX_DAMAGED, Mode, State, head_key
from edge_client.agent.state_machine import step
from protocol.mqtt import events as mqtt
from protocol.retry_delay import MAX_DELAY_S
from protocol.wire.codec import digest_of
from tests.support.simulation.fleet import item_of
from tests.unit.edge_client.agent.device_events import (
    BACKBONE,
    HEAD,
    HEAD_MANIFEST,
    INSTALL,
    ITEM,
    MANIFEST,
    OTHER_TASK,
    QUERY,
    TASK,
    play,
    receipt,
    uploading,
)


def test_nothing_is_sent_without_a_connection() -> None:
    """The submission is built and kept."""
    state = State(mode=Mode.SERVICE, stored=frozenset({digest_of(BACKBONE)}))
    state, actions = play(state, events.TaskSeen(TASK, MANIFEST), events.SubmissionBuilt(TASK, ITEM))
    assert actions == [events.BuildSubmission(TASK, MANIFEST)]
    assert play(state, mqtt.Connected())[1] == [QUERY]


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


def test_a_newer_submission_replaces_a_pending_one() -> None:
    newer = item_of(b"newer")
    state, actions = play(uploading(), events.ImagesChanged(), events.SubmissionBuilt(TASK, newer))
    assert [upload.item for upload in state.uploads] == [newer]
    send = events.SendFrames(newer, ((0, newer.size_bytes),))
    assert actions == [events.BuildSubmission(TASK, MANIFEST), send]


def test_a_new_task_ends_the_transfers_of_the_old_one() -> None:
    """Another submission is built, and a late result of the old task is dropped."""
    late = events.SubmissionBuilt(TASK, ITEM)
    state, actions = play(uploading(), events.TaskSeen(OTHER_TASK, MANIFEST), late)
    assert (state.uploads, actions) == ((), [events.BuildSubmission(OTHER_TASK, MANIFEST)])


def test_a_dry_run_builds_and_exits() -> None:
    """It uploads nothing, and installs no head."""
    stored = frozenset({digest_of(BACKBONE), digest_of(HEAD)})
    state = State(mode=Mode.DRY_RUN, stored=stored, connected=True)
    built = events.SubmissionBuilt(TASK, ITEM)
    _, actions = play(state, events.TaskSeen(TASK, MANIFEST), HEAD_MANIFEST, built)
    assert actions == [events.BuildSubmission(TASK, MANIFEST), events.Exit(0)]


def test_the_retry_delay_grows_until_the_aggregator_restarts() -> None:
    """The next query is sent at once then."""
    state = uploading()
    asked: list[int] = []
    for second in range(1, 2000):
        state, actions = step(state, mqtt.Drained(), now_s=second)
        asked.extend(second for action in actions if isinstance(action, events.SendFrames))
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= MAX_DELAY_S
    assert play(state, events.AggregatorStarted(), now_s=2000)[1] == [QUERY]


def test_requests_for_a_refused_blob_back_off() -> None:
    """The refusal is logged once."""
    digest = digest_of(BACKBONE)
    state = State(mode=Mode.SERVICE, connected=True)
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


def test_a_blob_refused_to_an_unknown_device_ends_the_program() -> None:
    """The line has the aggregator's detail."""
    refusal = receipt(digest=digest_of(BACKBONE), reason="unknown_device", detail="not enrolled")
    state = State(mode=Mode.SERVICE, connected=True)
    opened = events.DownloadOpened(digest_of(BACKBONE), 0)
    _, (*_, action) = play(state, events.TaskSeen(TASK, MANIFEST), opened, refusal)
    assert isinstance(action, events.Exit)
    assert "not enrolled" in action.text


def test_a_failing_stored_task_does_not_end_a_service() -> None:
    """The broker may have a newer task."""
    newer = msgspec.structs.replace(MANIFEST, seed=1)
    state = State(mode=Mode.SERVICE, stored=frozenset({digest_of(BACKBONE)}))
    failed, failed_again = (events.SubmissionBuilt(task, None, reason="no") for task in (TASK, OTHER_TASK))
    state, actions = play(state, events.TaskSeen(TASK, MANIFEST, recalled=True), failed)
    assert actions[1:] == [events.Log("no", error=True)]
    _, actions = play(state, events.TaskSeen(OTHER_TASK, newer), failed_again)
    assert actions == [events.BuildSubmission(OTHER_TASK, newer), events.Exit(1, "no")]


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


def test_a_build_that_lacked_images_is_repeated() -> None:
    """They may be readable later, or back."""
    built, build = events.SubmissionBuilt(TASK, ITEM, retries=True), events.BuildSubmission(TASK, MANIFEST)
    state, _ = play(uploading(), events.ImagesChanged(), built)
    assert build not in play(state, events.Ticked(), now_s=19)[1]
    assert build in play(state, events.Ticked(), now_s=22)[1]


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


def test_a_reconnected_aggregator_is_queried_at_once() -> None:
    """The device may have connected before it."""
    _, actions = play(uploading(), events.Ticked(), events.AggregatorReconnected(), events.Ticked(), now_s=1)
    assert actions == [QUERY]


def test_a_restarted_aggregator_is_asked_for_missing_ranges() -> None:
    """A received submission is queried again, and sent if it is missing."""
    received, missing = receipt(status="received"), receipt(status="missing", missing=((0, 9),))
    state, actions = play(uploading(), received, events.AggregatorStarted(), missing, received, now_s=1)
    store, send = events.StoreReceipt(ITEM), events.SendFrames(ITEM, ((0, 9), *QUERY.ranges))
    assert actions == [store, QUERY, send, store]
    assert state.uploads == ()


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


def test_a_single_run_ends_if_the_task_has_expired() -> None:
    """It does not end because of the stored task, before the broker has delivered one."""
    state = State(mode=Mode.ONCE, expired=frozenset({"task"}))
    state, actions = play(state, events.TaskSeen(TASK, MANIFEST, recalled=True))
    assert not [action for action in actions if isinstance(action, events.Exit)]
    _, actions = play(state, events.TaskSeen(TASK, MANIFEST))
    assert events.Exit(1, "the task's manifest has expired; see the log") in actions
