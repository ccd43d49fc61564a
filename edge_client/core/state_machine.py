"""The device's state machine: (state, event) -> (state, actions).

A device follows the retained task: it downloads the task's backbones, builds a submission from its images, uploads it
until the aggregator's receipt arrives, installs the announced head, evaluates it and uploads the evaluation, or the
reason why the head is refused. In a task with rounds it builds a submission for each open round, and a newer round
replaces an older one. Every request is repeated after a delay, so any message may be lost.

One upload and one download run at a time.
"""

from dataclasses import replace
from typing import Literal

from edge_client.core import downloads, events, uploads
from edge_client.core.state import MAX_DAMAGED, Mode, State, Work, head_key
from edge_client.core.submission_kinds import kind_of
from protocol.mqtt import events as mqtt
from protocol.retry_delay import retry_delay_s
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Frame, HeadManifest, HeadRef, Receipt, RoundManifest
from protocol.wire.transfer import chunk_bytes


def step(state: State, event: events.Event, *, now_s: float) -> events.Step:
    """Handle one event, then start everything that is possible and not under way; `now_s` is of a monotonic clock."""
    state, actions = _react(state, event, now_s)
    for pursue in (
        downloads.choose,
        _install_and_build,
        downloads.request_due,
        _send_record,
        uploads.query_due,
        _exit_if_done,
    ):
        state, more = pursue(state, now_s)
        actions = (*actions, *more)
    return state, actions


def _react(state: State, event: events.Event, now_s: float) -> events.Step:  # noqa: C901, PLR0911, PLR0912 - one case per event
    match event:
        case mqtt.Connected(max_packet_bytes=limit):
            state = _with_record_due(_restart_transfers(state))
            return replace(state, connected=True, packet_bytes=chunk_bytes(limit)), ()
        case mqtt.Disconnected():
            return replace(downloads.cut(uploads.cut(state)), connected=False), ()
        case events.AggregatorReconnected():
            return _restart_transfers(state), ()
        case events.AggregatorStarted():
            # It may send now what it could not send, or sent wrong, before.
            return replace(_with_record_due(_restart_transfers(uploads.confirm(state))), refused=None), ()
        case mqtt.Drained():
            return uploads.send_next(state, now_s)
        case mqtt.Unsendable(reason=reason):
            return uploads.unsendable(state, reason, now_s)
        case events.TaskSeen():
            return _new_task(state, event)
        case events.OutboxSeen(items=items):
            return uploads.confirm(uploads.synchronize(state, items)), ()
        case RoundManifest():
            return _new_round(state, event)
        case HeadManifest():
            return state if event == state.head else replace(state, head=event, missing_space={}), ()
        case events.DownloadOpened(digest=digest, offset=offset):
            return downloads.opened(state, digest, offset, now_s), ()
        case Frame():
            return downloads.receive(state, event, now_s)
        case events.DownloadFinished():
            return downloads.finished(state, event, now_s)
        case Receipt():
            if downloads.is_running(state, event.digest) and event.status == "refused":
                return downloads.refused(state, event, now_s)
            return uploads.receipt(state, event, now_s)
        case events.SubmissionBuilt():
            return _built(state, event, now_s)
        case events.HeadInstalled():
            return _installed(state, event)
        case events.HeadReturned(head=head, reason=reason):
            return replace(state, installed=head, head_problem=reason or state.head_problem), ()
        case events.BlobsStored(digests=digests):
            return replace(state, stored=digests), ()
        case events.ManifestsExpired(channels=channels):
            return replace(state, expired=channels), ()
        case events.TaskRefused(reason=reason):
            return replace(state, task_problem=reason), ()
        case events.BlobsMissing(digests=digests, during=during):
            return _repeat(replace(state, stored=state.stored - digests), during), ()
        case events.SpaceMissing():
            return _wait_for_space(state, event)
        case events.SpaceFreed(works=works):
            left = {work: missing for work, missing in state.missing_space.items() if work not in works}
            return replace(state, missing_space=left), ()
        case events.RecordAdopted():
            return _record_adopted(state, event)
        case events.ImagesChanged():
            return replace(state, images_changed=True), ()
    return state, ()


def _install_and_build(state: State, now_s: float) -> events.Step:
    """Install the head, then build the submission that is due: the service runs them in this order."""
    manifest, task, head = state.manifest, state.task, state.current_head
    if manifest is None or task is None:
        return state, ()
    actions: tuple[events.Action, ...] = ()
    blobs = state.prediction_blobs
    stale = state.stale_manifests
    if stale & {"task", "head"} or "install" in state.missing_space:
        blobs = ()
    if head is not None and blobs and all(blob.digest in state.stored for blob in blobs):
        key, as_canary = head_key(head), state.head is not None and head == state.head.candidate
        if key not in (state.installed, state.installing):
            state = replace(state, installing=key)
            actions = (events.InstallHead(task, manifest, head, as_canary),)
    seen = state.open_round
    if manifest.program is None:
        is_due = state.images_changed and not state.building
    else:
        is_due = seen is not None and seen.number != state.joined_round
    is_due |= now_s >= state.retry_at_s and (manifest.program is None or seen is not None)
    is_due &= state.has_record or not _is_private(state)
    if not is_due or not state.can_build or stale & {"task", "round"} or "build" in state.missing_space:
        return state, actions
    number = seen.number if seen else state.joined_round
    state = replace(state, joined_round=number, images_changed=False, building=True, retry_at_s=float("inf"))
    return state, (*actions, events.BuildSubmission(task, manifest, seen))


def _is_private(state: State) -> bool:
    is_private = state.manifest is not None and kind_of(state.manifest).is_private
    return is_private and state.mode is not Mode.DRY_RUN


def _with_record_due(state: State) -> State:
    """Send the record again; in a task without privacy, one answer since the start is enough."""
    if state.has_record and not _is_private(state):
        return state
    return replace(state, record_due_s=0.0, record_attempts=0)


def _send_record(state: State, now_s: float) -> events.Step:
    """Send the record of releases until the aggregator has answered; nothing is uploaded before its first answer.

    It waits for the end of a private build: when a release was charged depends on images.
    """
    waits = state.manifest is None or (state.building and _is_private(state))
    is_due = state.connected and now_s >= state.record_due_s and not waits
    if not is_due or state.mode is Mode.DRY_RUN:
        return state, ()
    attempts = state.record_attempts + 1
    state = replace(state, record_attempts=attempts, record_due_s=now_s + retry_delay_s(attempts))
    text = "waiting for the aggregator's record of what this device has spent on privacy; retrying"
    is_late = attempts == MAX_DAMAGED and not state.has_record
    return state, (events.SendRecord(), *([events.Log(text, error=True)] if is_late else []))


def _record_adopted(state: State, adopted: events.RecordAdopted) -> events.Step:
    """Allow uploads; after a lost record, what was built for a task without privacy is dropped and built again."""
    due_s = float("inf") if adopted.is_complete and not adopted.ends_task else state.record_due_s
    state = replace(state, has_record=True, record_due_s=due_s)
    if not adopted.ends_task or _is_private(state):
        return state, ()
    state = replace(_repeat(_repeat(state, "install"), "build"), installed=None, uploads=())
    return state, (events.CancelJobs(("build", "install")), events.DropForbidden())


def _exit_if_done(state: State, _now_s: float) -> events.Step:
    head = state.current_head
    if state.mode is Mode.DRY_RUN and state.are_rounds_over:
        return state, (events.Exit(1, "all rounds are over: nothing is left to upload"),)
    if state.mode is Mode.ONCE and state.task_confirmed and "task" in state.expired:
        return state, (events.Exit(1, "the task's manifest has expired; see the log"),)
    if state.mode is not Mode.ONCE or head is None or state.uploads or state.building:
        return state, ()
    if state.refused is not None and state.is_refused(head):
        return state, (events.Exit(1, state.refused[1]),) if state.installing is None else ()
    done = state.task_confirmed and state.evaluated == head_key(head) and _has_contributed(state, head)
    return state, (events.Exit(0),) if done else ()


def _has_contributed(state: State, head: HeadRef) -> bool:
    """Return whether nothing is left to upload: neither the current images nor anything in later rounds."""
    if state.manifest is None or state.manifest.program is None:
        is_received = state.received_submission is not None or state.no_images
        return is_received and not state.images_changed
    return state.are_rounds_over and state.round is not None and head.round == state.round.rounds - 1


def _restart_transfers(state: State) -> State:
    """Repeat all requests: messages in flight may be lost."""
    if state.record_due_s < float("inf"):
        state = replace(state, record_due_s=0.0)
    return replace(downloads.restart(state), uploads=tuple(map(uploads.restart, state.uploads)))


def _new_round(state: State, seen: RoundManifest) -> events.Step:
    """Follow a round; a build for an older one is cancelled, and ends without a SubmissionBuilt."""
    is_outdated = state.building and seen.task == state.task and seen.number != state.joined_round
    if is_outdated:
        state = replace(state, building=False)
    if seen != state.round:
        digest = digest_of(encode(seen))
        state = replace(state, round=seen, round_digest=digest, missing_space={})
    return state, (events.CancelJobs(("build",)),) if is_outdated else ()


def _new_task(state: State, seen: events.TaskSeen) -> events.Step:
    state = replace(state, task_confirmed=state.task_confirmed or not seen.recalled, task_problem="")
    if seen.digest == state.task:
        return state, ()
    works = state.building or state.installing is not None
    state = replace(
        state,
        task=seen.digest,
        manifest=seen.manifest,
        images_changed=True,
        building=False,
        no_images=False,
        failures=0,
        retry_at_s=float("inf"),
        received_submission=None,
        joined_round=None,
        installing=None,
        uploads=(),
        missing_space={},
    )
    return state, (events.CancelJobs(("build", "install")),) if works else ()


def _built(state: State, built: events.SubmissionBuilt, now_s: float) -> events.Step:
    if built.task != state.task or built.round != state.joined_round:
        return state, ()
    had_images, failures = not state.no_images, state.failures + 1 if built.retries else 0
    retry_at_s = now_s + retry_delay_s(failures) if failures else float("inf")
    state = replace(
        state,
        building=False,
        build_problem=built.reason,
        stored_build_problem="",
        no_images=built.no_images,
        failures=failures,
        retry_at_s=retry_at_s,
    )
    if built.no_images and state.mode is not Mode.DRY_RUN:
        return state, (events.Log(built.reason),) if had_images else ()
    if built.item is None:
        # Without any submission the operator has to act, unless the task is only the stored one.
        has_submission = state.received_submission is not None or any(
            upload.item.kind == "submission" for upload in state.uploads
        )
        continues = built.may_pass or has_submission or not state.task_confirmed
        if continues and state.mode is Mode.SERVICE:
            return state, () if failures > 1 else (events.Log(built.reason, error=True),)
        return state, (events.Exit(1, built.reason),)
    if state.mode is Mode.DRY_RUN:
        return state, (events.Exit(0),)
    state = _with_record_due(state)
    if built.item.received:
        state = replace(state, received_submission=built.item)
    return uploads.start(state, built.item), ()


def _repeat(state: State, during: Work | Literal[""]) -> State:
    """Repeat the job that ended for lack of blobs or of space once they are there."""
    if during == "install":
        return replace(state, installing=None)
    if during == "build":
        return replace(state, building=False, images_changed=True, joined_round=None)
    return state


def _wait_for_space(state: State, event: events.SpaceMissing) -> events.Step:
    """Pause this kind of work until there is space, or until a new manifest arrives."""
    reason, download = event.space.reason, None if event.during == "download" else state.download
    missing = {**state.missing_space, event.during: event.space}
    state = _repeat(replace(state, missing_space=missing, download=download), event.during)
    return state, (events.Log(reason, error=True) if state.mode is Mode.SERVICE else events.Exit(1, reason),)


def _installed(state: State, installed: events.HeadInstalled) -> events.Step:
    if installed.head != state.installing:
        return state, ()
    state = replace(state, installing=None, head_problem=installed.reason)
    if installed.report is not None:
        state = uploads.start(state, installed.report)
    if not installed.reason:
        return replace(state, installed=installed.head), ()
    # The previous head stays in use. With --once the program exits with this reason after the upload.
    state = replace(state, refused=(installed.head, installed.reason))
    return state, () if state.mode is Mode.ONCE else (events.Log(installed.reason, error=True),)
