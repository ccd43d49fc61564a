"""The life of a device, pure: (state, event) -> (state, actions). No clock, no file, no network, no images.

A device follows the retained task: it fetches the task's backbone if it has not got it, makes a submission of
its images, hands that in until the aggregator's own receipt is there, takes the head that it is told to use,
evaluates it and uploads the result, or why it does not use it. With a program it makes a submission for each
round that it sees open, and gives up an older one for it. Everything is asked for again after a while, so that any
message may be lost.

One thing travels up at a time, and one down: `uploads` and `downloads` say how.
"""

from dataclasses import replace

from edge_client.agent import downloads, uploads
from edge_client.agent.backoff import CAST_PATIENCE_S, MAX_BROKEN, patience_s
from edge_client.agent.events import (
    Action,
    AggregatorBack,
    AggregatorStarted,
    Announce,
    Append,
    BlockSeen,
    BuildSubmission,
    Connected,
    Disconnected,
    DownloadEnded,
    DownloadStarts,
    Drained,
    Event,
    Exit,
    Finish,
    HeadInstalled,
    HeadSeen,
    ImagesChanged,
    InstallHead,
    KeepReceipt,
    Log,
    OpenDownload,
    OutboxSeen,
    ReceiptSeen,
    RefuseHead,
    ReportBlocked,
    RoundSeen,
    SubmissionBuilt,
    TaskSeen,
    Unsendable,
)
from edge_client.agent.selectors import (
    can_work,
    current_head,
    is_canary,
    is_cast,
    is_over,
    is_refused,
    needed,
    needed_to_predict,
    needed_to_work,
    open_round,
)
from edge_client.agent.state import Download, Mode, State, Upload, head_key
from edge_client.agent.upload_item import UploadItem
from protocol.wire.messages import BlobRef, Frame, HeadRef, Receipt, RoundManifest
from protocol.wire.transfer import chunk_bytes

FARTHEST_SEQUENCE = 2**53
"""A device goes above no greater one: its own never go back, and it would soon have none left."""

Step = tuple[State, tuple[Action, ...]]

NO_SPACE = "the aggregator has no space for what this device uploads"
"""A hindrance that the aggregator need not be told of."""


def step(state: State, event: Event, *, now_s: float) -> Step:
    """Take one event.

    Args:
        state: as the step before left it.
        event: what has happened.
        now_s: seconds of a clock that never goes back.
    """
    state, actions = _react(state, event, now_s)
    state, more = _pursue(state, now_s)
    return state, (*actions, *more)


def _react(state: State, event: Event, now_s: float) -> Step:  # noqa: C901, PLR0911, PLR0912 - a case an event
    match event:
        case Connected(max_packet_bytes=limit):
            state = replace(_due_at_once(state), connected=True, chunk_bytes=chunk_bytes(limit))
            return state, () if state.mode is Mode.DRY_RUN else (Announce(),)
        case Disconnected():
            return replace(state, connected=False), ()
        case AggregatorBack():
            return _due_at_once(state), ()
        case AggregatorStarted():
            # What it could not send or had wrong, it may have mended.
            return replace(_due_at_once(_upload_again(state)), refused=None), ()
        case Drained():
            return _go_on_sending(state, now_s)
        case Unsendable(reason=reason):
            return _not_sent(state, reason, now_s)
        case TaskSeen():
            return _new_task(state, event), ()
        case OutboxSeen():
            return _upload(state, event), ()
        case RoundSeen(manifest=manifest):
            return _new_round(state, manifest), ()
        case HeadSeen(manifest=manifest):
            return replace(state, head=manifest), ()
        case DownloadStarts(digest=digest, offset=offset) if _downloads(state, digest):
            return _start_download(state, offset, now_s), ()
        case BlockSeen(frame=frame):
            return _take_block(state, frame, now_s)
        case DownloadEnded():
            return _end_download(state, event, now_s)
        case ReceiptSeen(receipt=receipt):
            return _take_receipt(state, receipt, now_s)
        case SubmissionBuilt():
            return _built(state, event)
        case HeadInstalled():
            return _installed(state, event)
        case ImagesChanged():
            return replace(state, stale=True), ()
    return state, ()


def _pursue(state: State, now_s: float) -> Step:
    """Start whatever is possible and not under way."""
    actions: list[Action] = []
    for pursue in (_pursue_blobs, _pursue_work, _pursue_download, _pursue_upload, _pursue_end):
        state, more = pursue(state, now_s)
        actions.extend(more)
    return state, tuple(actions)


def _pursue_blobs(state: State, _now_s: float) -> Step:
    """Want the first blob that is needed and not there."""
    missing = next((blob for blob in needed(state) if blob.digest not in state.stored), None)
    if missing is None:
        return replace(state, download=None), ()
    if _downloads(state, missing.digest):
        return state, ()
    return replace(state, download=Download(missing, offset=0, due_s=float("inf"))), (OpenDownload(missing),)


def _pursue_work(state: State, _now_s: float) -> Step:
    """Take the head into use, then make the submission that is due: a head is bound to the one before."""
    manifest, task, head = state.manifest, state.task, current_head(state)
    if manifest is None or task is None:
        return state, ()
    actions: list[Action] = []
    needed = needed_to_predict(state)
    if (
        head is not None
        and needed
        and not is_refused(state, head)
        and all(blob.digest in state.stored for blob in needed)
    ):
        key = head_key(head)
        if key not in (state.installed, state.installing):
            state = replace(state, installing=key)
            actions.append(InstallHead(task, manifest, head, is_canary(state)))
    if can_work(state):
        state, build = _due_build(state)
        actions.extend([] if build is None else [build])
    return state, tuple(actions)


def _due_build(state: State) -> tuple[State, BuildSubmission | None]:
    """The work that is due, if any: for a round that was not joined yet, or for images not uploaded."""
    manifest, task, seen = state.manifest, state.task, open_round(state)
    if manifest is None or task is None:
        return state, None
    if manifest.program is not None:
        if seen is None or state.joined == seen.number:
            return state, None
        return replace(state, joined=seen.number, stale=False, working=True), BuildSubmission(
            task, manifest, seen
        )
    if state.working or not state.stale:
        return state, None
    return replace(state, stale=False, working=True), BuildSubmission(task, manifest)


def _pursue_download(state: State, now_s: float) -> Step:
    if state.download is None or not state.connected or not downloads.is_due(state.download, now_s=now_s):
        return state, ()
    download, requests = downloads.ask(state.download, now_s=now_s)
    return replace(state, download=download), requests


def _pursue_upload(state: State, now_s: float) -> Step:
    if not state.uploads or not state.connected:
        return state, ()
    upload = state.uploads[0]
    if upload.due_s is None or now_s < upload.due_s:
        return state, ()
    upload, send = uploads.ask(upload, chunk_bytes=state.chunk_bytes)
    return _with_upload(state, upload), (send,)


def _pursue_end(state: State, _now_s: float) -> Step:
    head = current_head(state)
    if state.mode is Mode.DRY_RUN and is_over(state):
        return state, (Exit(1, "all rounds are over: there is nothing left to upload"),)
    if state.mode is Mode.ONCE and head is not None and is_refused(state, head):
        busy = state.uploads or state.working or state.installing is not None
        return state, () if busy or state.refused is None else (Exit(1, state.refused[1]),)
    done = (
        state.mode is Mode.ONCE
        and state.confirmed
        and head is not None
        and state.evaluated == head_key(head)
        and _has_contributed(state, head)
        and not (state.uploads or state.working)
    )
    return state, (Exit(0),) if done else ()


def _has_contributed(state: State, head: HeadRef) -> bool:
    """Whether there is nothing left to upload: the images as they are, or anything in the rounds to come."""
    if state.manifest is None or state.manifest.program is None:
        return state.submitted is not None and not state.stale
    return is_over(state) and state.round is not None and head.round == state.round.rounds - 1


def _due_at_once(state: State) -> State:
    """Ask for everything again: whatever was on its way may be gone."""
    download = None if state.download is None else downloads.afresh(state.download)
    return replace(state, uploads=tuple(map(uploads.afresh, state.uploads)), download=download)


def _upload(state: State, seen: OutboxSeen) -> State:
    """Hand in what the outbox has of the task; what is under way goes on, and what is not there any more does not."""
    if state.mode is Mode.DRY_RUN:
        return state
    items = [item for item in seen.items if item.task == state.task]
    going = {upload.digest: upload for upload in state.uploads}
    wanted = [item for item in items if not item.received or item.digest in going]
    submitted = next((item for item in items if item.received), None)
    pending = tuple(going.get(item.digest) or Upload(item) for item in wanted)
    # What was at its turn may have to wait for another one now, and begins again after that.
    return replace(state, submitted=submitted, uploads=(*pending[:1], *map(uploads.afresh, pending[1:])))


def _upload_again(state: State) -> State:
    """Ask whether the submission still stands: an aggregator that has lost its state answers what it misses."""
    pending = any(upload.item.kind == "submission" for upload in state.uploads)
    if state.submitted is None or pending:
        return state
    return replace(state, uploads=(*state.uploads, Upload(state.submitted)))


def _go_on_sending(state: State, now_s: float) -> Step:
    """Send the next window, or after the last one wait for a receipt."""
    if not state.uploads or state.uploads[0].due_s is not None:
        return state, ()
    upload = state.uploads[0]
    if not upload.ranges:
        return _with_upload(state, replace(upload, due_s=now_s + patience_s(upload.attempts))), ()
    upload, send = uploads.send_window(upload, chunk_bytes=state.chunk_bytes)
    return _with_upload(state, upload), (send,)


def _not_sent(state: State, reason: str, now_s: float) -> Step:
    """Keep what the broker does not take, and try again in a while: somebody may change the broker's mind."""
    if not state.uploads:
        return state, ()
    state = _with_upload(state, uploads.wait(state.uploads[0], now_s=now_s))
    return _hindered(state, f"the broker will not take what this device uploads: {reason}")


def _hindered(state: State, reason: str) -> Step:
    """Say once what keeps the device from uploading."""
    if state.hindrance == reason:
        return state, ()
    return replace(state, hindrance=reason), (
        ReportBlocked(reason),
        Log(f"{reason}; trying again", error=True),
    )


def _unhindered(state: State) -> Step:
    return replace(state, hindrance=""), (ReportBlocked(""),) if state.hindrance else ()


def _new_task(state: State, seen: TaskSeen) -> State:
    state = replace(state, confirmed=state.confirmed or not seen.recalled)
    if seen.digest == state.task:
        return state
    return replace(
        state,
        task=seen.digest,
        manifest=seen.manifest,
        stale=True,
        working=False,
        submitted=None,
        joined=None,
        installing=None,
        uploads=(),
    )


def _new_round(state: State, seen: RoundManifest) -> State:
    """Work for a round that is no longer the newest is dropped, and there will be no word of it."""
    dropped = seen.task == state.task and seen.number != state.joined
    return replace(state, round=seen, working=state.working and not dropped)


def _start_download(state: State, offset: int, now_s: float) -> State:
    """Go on from what is on the disk; with what is on its way to the whole fleet, as if it had been asked for."""
    download = state.download
    if download is None:
        return state
    cast = is_cast(state, download.blob.digest)
    until, patience = (download.blob.size_bytes, CAST_PATIENCE_S) if cast else (0, 0.0)
    download = replace(download, offset=offset, ahead=(), until=until, attempts=0, due_s=now_s + patience)
    return replace(state, download=download)


def _downloads(state: State, digest: bytes) -> bool:
    return state.download is not None and state.download.blob.digest == digest


def _with_upload(state: State, upload: Upload) -> State:
    """The state with an upload in the place of the one of the same thing."""
    every = (upload if other.digest == upload.digest else other for other in state.uploads)
    return replace(state, uploads=tuple(every))


def _without_upload(state: State, upload: Upload) -> State:
    return replace(state, uploads=tuple(other for other in state.uploads if other.digest != upload.digest))


def _take_block(state: State, frame: Frame, now_s: float) -> Step:
    if state.download is None:
        return state, ()
    download, data = downloads.take(state.download, frame, now_s=now_s)
    state = replace(state, download=download)
    if not data:
        return state, ()
    ends = download.offset == download.blob.size_bytes
    return state, (Append(frame.digest, data), *((Finish(frame.digest),) if ends else ()))


def _end_download(state: State, ended: DownloadEnded, now_s: float) -> Step:
    if ended.good:
        return replace(state, stored=state.stored | {ended.digest}), ()
    if state.download is None or state.download.blob.digest != ended.digest:
        return state, ()
    broken = state.download.broken + 1
    download = Download(state.download.blob, offset=0, broken=broken, due_s=now_s)
    state = replace(state, download=download)
    if broken < MAX_BROKEN:
        return state, (Log(f"{download.blob.name} arrived damaged, fetching it again", error=True),)
    text = f"{download.blob.name} arrived damaged {broken} times: look at the aggregator's state"
    return _give_up(state, download.blob, text)


def _give_up(state: State, blob: BlobRef, text: str) -> Step:
    """Do without a head that does not come whole; without anything else there is nothing to go on with."""
    head, task, manifest = current_head(state), state.task, state.manifest
    if head is None or task is None or manifest is None or blob in needed_to_work(state):
        return state, (Exit(1, text),)
    key, reason = head_key(head), f"head {head.version} refused, the old one stays: {text}"
    state = replace(state, download=None, installing=key, refused=(key, reason))
    return state, (RefuseHead(task, manifest, head, text),)


def _take_receipt(state: State, receipt: Receipt, now_s: float) -> Step:
    if _downloads(state, receipt.digest) and receipt.status == "refused":
        return _take_refused_download(state, receipt, now_s)
    upload = next((upload for upload in state.uploads if upload.digest == receipt.digest), None)
    if upload is None:
        return state, ()
    if receipt.status == "missing":
        return _take_missing(state, upload, receipt, now_s)
    if receipt.reason == "no_space":
        state = _with_upload(state, uploads.wait(upload, now_s=now_s))
        return _hindered(state, NO_SPACE)
    state, actions = _unhindered(state)
    if receipt.status == "refused":
        state, more = _take_refusal(state, upload, receipt)
        return state, (*actions, *more)
    state, item = _without_upload(state, upload), upload.item
    if item.kind == "submission":
        state = replace(state, submitted=item)
    elif item.head == state.installed:
        state = replace(state, evaluated=item.head)
    return state, (*actions, KeepReceipt(item))


def _take_missing(state: State, upload: Upload, receipt: Receipt, now_s: float) -> Step:
    if upload.digest != state.uploads[0].digest:
        return state, ()  # its turn comes
    upload, send = uploads.take_missing(upload, receipt.missing, chunk_bytes=state.chunk_bytes, now_s=now_s)
    return _with_upload(state, upload), () if send is None else (send,)


def _take_refused_download(state: State, receipt: Receipt, now_s: float) -> Step:
    """Ask again later: the aggregator has moved on, and its next manifest will say to what, or we are unwanted."""
    download = state.download
    if download is None:
        return state, ()
    attempts = download.attempts + 1
    # As if it was on its way: it is not asked for before it is due.
    until, due_s = download.blob.size_bytes, now_s + patience_s(attempts)
    state = replace(state, download=replace(download, until=until, attempts=attempts, due_s=due_s))
    text = f"the aggregator refused to send {download.blob.name} ({receipt.reason}): {receipt.detail}"
    if receipt.reason in {"unknown_device", "revoked"}:
        return state, (Exit(1, text),)
    return state, (Log(text, error=True),) if attempts == 1 else ()


def _take_refusal(state: State, upload: Upload, receipt: Receipt) -> Step:
    if receipt.reason == "digest" and upload.broken + 1 < MAX_BROKEN:
        broken = uploads.afresh(replace(upload, missing=(), broken=upload.broken + 1))
        return _with_upload(state, broken), ()
    state = _without_upload(state, upload)
    text = f"the aggregator refused the {upload.item.kind} ({receipt.reason}): {receipt.detail}"
    ends = state.mode is Mode.ONCE or receipt.reason in {"unknown_device", "revoked"}
    if receipt.sequence > FARTHEST_SEQUENCE:
        return state, (Exit(1, text),) if ends else (Log(text, error=True),)
    task, manifest = state.task, state.manifest
    seen = open_round(state)
    # The submission for a round that was not joined yet is made once its tensors are there.
    due = seen is not None and seen.number == state.joined
    wanted = manifest is not None and (manifest.program is None or due)
    if receipt.reason == "superseded" and task is not None and manifest is not None and wanted:
        state = replace(state, working=True, stale=False)
        return state, (BuildSubmission(task, manifest, seen, above=receipt.sequence),)
    if receipt.reason in {"superseded", "late", "unknown_round"}:
        return state, (Log(f"{receipt.detail or receipt.reason}: going on with what is open"),)
    if receipt.reason == "unknown_task":
        return state, (Log("the aggregator works on another task now; waiting to hear of it"),)
    return state, (Exit(1, text),) if ends else (Log(text, error=True),)


def _built(state: State, built: SubmissionBuilt) -> Step:
    if built.task != state.task or built.round != state.joined:
        return state, ()
    state = replace(state, working=False)
    if built.item is None:
        # With nothing uploaded yet there is nothing to go on with: a person has to look.
        going_on = built.may_pass or state.submitted is not None
        going_on = going_on or any(upload.item.kind == "submission" for upload in state.uploads)
        # Of a task that is only remembered, there may be a better one by now.
        going_on = (going_on or not state.confirmed) and state.mode is Mode.SERVICE
        return state, (Log(built.reason, error=True) if going_on else Exit(1, built.reason),)
    if state.mode is Mode.DRY_RUN:
        return state, (Exit(0),)
    if built.item.received:
        state = replace(state, submitted=built.item)
    return _in_place(state, built.item), ()


def _installed(state: State, installed: HeadInstalled) -> Step:
    if installed.head != state.installing:
        return state, ()
    state = _in_place(replace(state, installing=None), installed.report)
    if not installed.reason:
        return replace(state, installed=installed.head), ()
    # The old head stays in use. A single run ends with this line, once the aggregator knows.
    state = replace(state, refused=(installed.head, installed.reason))
    return state, () if state.mode is Mode.ONCE else (Log(installed.reason, error=True),)


def _in_place(state: State, item: UploadItem) -> State:
    """Hand something in, unless it was received, instead of what is on its way of its kind; submissions first."""
    if any(upload.digest == item.digest for upload in state.uploads):
        return state
    others = tuple(upload for upload in state.uploads if upload.item.kind != item.kind)
    if item.kind == "submission":
        others = tuple(map(uploads.afresh, others))
    if item.received:
        return replace(state, uploads=others)
    mine = (Upload(item),)
    return replace(state, uploads=(*mine, *others) if item.kind == "submission" else (*others, *mine))
