"""The life of a device, pure: (state, event) -> (state, actions). No clock, no file, no network, no pictures.

A device follows the retained task: it fetches the task's backbone if it has not got it, makes a submission of
its pictures, hands that in until the aggregator's own receipt is there, takes every head, evaluates it and
hands in the result. Everything is asked for again after a while, so that any message may be lost.

One thing travels up at a time, and one down. An upload starts with its last bytes: the aggregator answers
with a receipt or with what it still misses, so that a first try, a resumption and a repetition are one case.
"""

from dataclasses import replace

from edge_client.events import (
    Action,
    AggregatorStarted,
    Announce,
    Append,
    BlockSeen,
    Build,
    Built,
    Connected,
    Disconnected,
    DownloadEnded,
    DownloadStarts,
    Drained,
    Event,
    Exit,
    Finish,
    HeadSeen,
    Install,
    Installed,
    KeepReceipt,
    OpenDownload,
    PicturesChanged,
    ReceiptSeen,
    Request,
    SendRanges,
    SendTail,
    TaskSeen,
    Tell,
)
from edge_client.life import Download, Mode, State, Upload
from protocol.messages import MAX_CHUNK_BYTES, Frame, HeadManifest, Receipt

WINDOW_BYTES = 16 * MAX_CHUNK_BYTES
"""Bytes of a blob that are asked for at once."""

FIRST_PATIENCE_S = 10.0
LAST_PATIENCE_S = 300.0
MAX_BROKEN = 3
"""Times a transfer may arrive with another digest than announced before a person should look at it."""


Step = tuple[State, tuple[Action, ...]]


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
        case Connected():
            state = replace(_due_at_once(state), connected=True)
            return state, () if state.mode is Mode.DRY_RUN else (Announce(),)
        case Disconnected():
            return replace(state, connected=False), ()
        case AggregatorStarted():
            return _due_at_once(_hand_in_again(state)), ()
        case Drained():
            return _wait_for_receipt(state, now_s), ()
        case TaskSeen():
            return _new_task(state, event), ()
        case HeadSeen(manifest=manifest):
            return replace(state, head=manifest), ()
        case DownloadStarts(digest=digest, offset=offset) if _downloads(state, digest):
            return _with_download(state, offset=offset, until=0, due_s=now_s), ()
        case BlockSeen(frame=frame):
            return _take_block(state, frame, now_s)
        case DownloadEnded():
            return _end_download(state, event, now_s)
        case ReceiptSeen(receipt=receipt):
            return _take_receipt(state, receipt, now_s)
        case Built():
            return _built(state, event)
        case Installed():
            return _installed(state, event)
        case PicturesChanged():
            return replace(state, stale=True), ()
    return state, ()


def _pursue(state: State, now_s: float) -> Step:
    """Start whatever is possible and not under way."""
    actions: list[Action] = []
    for pursue in (_pursue_blobs, _pursue_work, _pursue_download, _pursue_upload, _pursue_end):
        state, more = pursue(state, now_s)
        actions.extend(more)
    return state, tuple(actions)


def _current_head(state: State) -> HeadManifest | None:
    return state.head if state.head is not None and state.head.task == state.task else None


def _pursue_blobs(state: State, _now_s: float) -> Step:
    """Want the first blob that is needed and not there: backbones first, then the head."""
    head = _current_head(state)
    wanted = (*(state.manifest.backbones if state.manifest else ()), *((head.head,) if head else ()))
    missing = next((blob for blob in wanted if blob.digest not in state.stored), None)
    if missing is None or (state.mode is Mode.DRY_RUN and head is not None and missing == head.head):
        return replace(state, download=None), ()
    if _downloads(state, missing.digest):
        return state, ()
    return replace(state, download=Download(missing, offset=0, due_s=float("inf"))), (OpenDownload(missing),)


def _pursue_work(state: State, _now_s: float) -> Step:
    manifest, task, head = state.manifest, state.task, _current_head(state)
    if manifest is None or task is None:
        return state, ()
    if any(blob.digest not in state.stored for blob in manifest.backbones):
        return state, ()
    actions: list[Action] = []
    if state.stale and not state.working:
        state = replace(state, stale=False, working=True)
        actions.append(Build(task, manifest))
    wanted = head is not None and head.head.digest not in (state.installed, state.installing)
    if head is not None and wanted and head.head.digest in state.stored and state.mode is not Mode.DRY_RUN:
        state = replace(state, installing=head.head.digest)
        actions.append(Install(task, manifest, head))
    return state, tuple(actions)


def _pursue_download(state: State, now_s: float) -> Step:
    download = state.download
    if download is None or not state.connected or download.offset >= download.blob.size_bytes:
        return state, ()
    if download.offset < download.until and now_s < download.due_s:
        return state, ()
    if download.due_s == float("inf"):  # how much is on the disk is not known yet
        return state, ()
    repeated = download.offset < download.until
    attempts = download.attempts + 1 if repeated else 0
    length = min(WINDOW_BYTES, download.blob.size_bytes - download.offset)
    state = _with_download(
        state, until=download.offset + length, attempts=attempts, due_s=now_s + patience_s(attempts)
    )
    return state, (Request(download.blob.digest, download.offset, length),)


def _pursue_upload(state: State, now_s: float) -> Step:
    if not state.uploads or not state.connected:
        return state, ()
    upload = state.uploads[0]
    if upload.due_s is None or now_s < upload.due_s:
        return state, ()
    upload = replace(upload, attempts=upload.attempts + 1, due_s=None)
    return _with_upload(state, upload), (SendTail(upload.digest),)


def _pursue_end(state: State, _now_s: float) -> Step:
    head = _current_head(state)
    done = (
        state.mode is Mode.ONCE
        and state.confirmed
        and state.submitted is not None
        and head is not None
        and state.evaluated == head.head.digest
        and not (state.uploads or state.working or state.stale)
    )
    return state, (Exit(0),) if done else ()


def patience_s(attempts: int) -> float:
    """Seconds to wait for an answer before asking again."""
    return float(min(LAST_PATIENCE_S, FIRST_PATIENCE_S * 2.0 ** min(attempts, 10)))


def _due_at_once(state: State) -> State:
    """Ask for everything again: whatever was on its way may be gone."""
    uploads = tuple(replace(upload, due_s=0.0, attempts=0) for upload in state.uploads)
    download = state.download
    if download is not None and download.due_s != float("inf"):
        download = replace(download, until=0, due_s=0.0, attempts=0)
    return replace(state, uploads=uploads, download=download)


def _hand_in_again(state: State) -> State:
    """Ask whether the submission still stands: an aggregator that has lost its state answers what it misses."""
    pending = any(upload.head is None for upload in state.uploads)
    if state.submitted is None or pending:
        return state
    return replace(state, uploads=(*state.uploads, Upload(state.submitted)))


def _wait_for_receipt(state: State, now_s: float) -> State:
    if not state.uploads or state.uploads[0].due_s is not None:
        return state
    upload = state.uploads[0]
    return _with_upload(state, replace(upload, due_s=now_s + patience_s(upload.attempts)))


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
        installing=None,
        uploads=(),
    )


def _downloads(state: State, digest: bytes) -> bool:
    return state.download is not None and state.download.blob.digest == digest


def _with_download(
    state: State, *, due_s: float, until: int, offset: int | None = None, attempts: int = 0
) -> State:
    if state.download is None:
        return state
    start = state.download.offset if offset is None else offset
    download = replace(state.download, offset=start, until=until, attempts=attempts, due_s=due_s)
    return replace(state, download=download)


def _with_upload(state: State, upload: Upload) -> State:
    return replace(state, uploads=(upload, *state.uploads[1:]))


def _take_block(state: State, frame: Frame, now_s: float) -> Step:
    """Take the bytes that come next; what is out of order is asked for again when its time comes."""
    download = state.download
    if (
        download is None
        or frame.digest != download.blob.digest
        or frame.size_bytes != download.blob.size_bytes
        or frame.offset != download.offset
        or not frame.data
        or frame.offset + len(frame.data) > download.blob.size_bytes
    ):
        return state, ()
    offset = download.offset + len(frame.data)
    state = _with_download(state, offset=offset, until=download.until, due_s=now_s + patience_s(0))
    actions: tuple[Action, ...] = (Append(frame.digest, frame.data),)
    if offset == frame.size_bytes:
        actions = (*actions, Finish(frame.digest))
    return state, actions


def _end_download(state: State, ended: DownloadEnded, now_s: float) -> Step:
    if ended.good:
        return replace(state, stored=state.stored | {ended.digest}), ()
    if state.download is None or state.download.blob.digest != ended.digest:
        return state, ()
    broken = state.download.broken + 1
    download = Download(state.download.blob, offset=0, broken=broken, due_s=now_s)
    state = replace(state, download=download)
    if broken < MAX_BROKEN:
        return state, (Tell(f"{download.blob.name} arrived damaged, fetching it again", error=True),)
    text = f"{download.blob.name} arrived damaged {broken} times: look at the aggregator's state"
    return state, (Exit(1, text),)


def _take_receipt(state: State, receipt: Receipt, now_s: float) -> Step:
    if _downloads(state, receipt.digest) and receipt.status == "refused":
        return _take_refused_download(state, receipt, now_s)
    if not state.uploads or state.uploads[0].digest != receipt.digest:
        return state, ()
    upload = state.uploads[0]
    if receipt.status == "missing":
        state = _with_upload(state, replace(upload, due_s=None, attempts=0))
        return state, (SendRanges(upload.digest, receipt.missing),)
    if receipt.status == "refused":
        return _take_refusal(state, upload, receipt)
    state = replace(state, uploads=state.uploads[1:])
    if upload.head is None:
        state = replace(state, submitted=upload.digest)
    if upload.head is not None:
        state = replace(state, evaluated=upload.head)
    return state, (KeepReceipt(upload.digest, upload.head),)


def _take_refused_download(state: State, receipt: Receipt, now_s: float) -> Step:
    """Ask again later: the aggregator has moved on, and its next manifest will say to what, or we are unwanted."""
    download = state.download
    if download is None:
        return state, ()
    attempts = download.attempts + 1
    state = _with_download(
        state, until=download.offset + 1, attempts=attempts, due_s=now_s + patience_s(attempts)
    )
    text = f"the aggregator refused to send {download.blob.name} ({receipt.reason}): {receipt.detail}"
    if receipt.reason == "unknown_device":
        return state, (Exit(1, text),)
    return state, (Tell(text, error=True),) if attempts == 1 else ()


def _take_refusal(state: State, upload: Upload, receipt: Receipt) -> Step:
    if receipt.reason == "digest" and upload.broken + 1 < MAX_BROKEN:
        return _with_upload(state, replace(upload, broken=upload.broken + 1, due_s=0.0)), ()
    state = replace(state, uploads=state.uploads[1:])
    task, manifest = state.task, state.manifest
    if receipt.reason == "superseded" and task is not None and manifest is not None:
        state = replace(state, working=True, stale=False)
        return state, (Build(task, manifest, above=receipt.sequence),)
    if receipt.reason == "unknown_task":
        return state, (Tell("the aggregator works on another task now; waiting to hear of it"),)
    what = "submission" if upload.head is None else "evaluation"
    text = f"the aggregator refused the {what} ({receipt.reason}): {receipt.detail}"
    ends = state.mode is Mode.ONCE or receipt.reason == "unknown_device"
    return state, (Exit(1, text),) if ends else (Tell(text, error=True),)


def _built(state: State, built: Built) -> Step:
    if built.task != state.task:
        return state, ()
    state = replace(state, working=False)
    if built.digest is None:
        # With nothing handed in yet there is nothing to go on with: a person has to look.
        going_on = state.submitted is not None or any(upload.head is None for upload in state.uploads)
        going_on = going_on and state.mode is Mode.SERVICE
        return state, (Tell(built.reason, error=True) if going_on else Exit(1, built.reason),)
    if state.mode is Mode.DRY_RUN:
        return state, (Exit(0),)
    evaluations = tuple(upload for upload in state.uploads if upload.head is not None)
    if built.receipted:
        return replace(state, submitted=built.digest, uploads=evaluations), ()
    return replace(state, uploads=(Upload(built.digest), *evaluations)), ()


def _installed(state: State, installed: Installed) -> Step:
    if installed.head != state.installing:
        return state, ()
    if installed.report is None:
        # It stays `installing`, so that it is not tried again; the old head stays in use.
        once = state.mode is Mode.ONCE
        return state, (Exit(1, installed.reason) if once else Tell(installed.reason, error=True),)
    submissions = tuple(upload for upload in state.uploads if upload.head is None)
    state = replace(state, installed=installed.head, installing=None)
    return replace(state, uploads=(*submissions, Upload(installed.report, head=installed.head))), ()
