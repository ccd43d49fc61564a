"""The state machine's uploads: what is queued, and what follows from the aggregator's receipts."""

from dataclasses import replace

from edge_client.agent import events, uploads
from edge_client.agent.retry_delay import MAX_DAMAGED, retry_delay_s
from edge_client.agent.state import Mode, State, Upload
from edge_client.agent.state_queries import open_round
from edge_client.agent.upload_item import UploadItem
from protocol.wire.messages import Receipt

MAX_SEQUENCE = 2**53
"""A device does not exceed a greater sequence: its own never decrease, and it would soon run out of them."""

NO_SPACE = "the aggregator has no space for this device's upload"
"""A reason that is not published, because the aggregator knows it."""

Step = tuple[State, tuple[events.Action, ...]]


def query_due(state: State, now_s: float) -> Step:
    """Send the current upload's query if it is due."""
    if not state.uploads or not state.connected:
        return state, ()
    upload = state.uploads[0]
    if upload.due_s is None or now_s < upload.due_s:
        return state, ()
    upload, send = uploads.query(upload, chunk_bytes=state.chunk_bytes)
    return _with_upload(state, upload), (send,)


def start(state: State, item: UploadItem) -> State:
    """Upload an item, unless it was received, in place of the current one of its kind; submissions come first."""
    if any(upload.digest == item.digest for upload in state.uploads):
        return state
    others = tuple(upload for upload in state.uploads if upload.item.kind != item.kind)
    if item.kind == "submission":
        others = tuple(map(uploads.restart, others))
    if item.received:
        return replace(state, uploads=others)
    new = (Upload(item),)
    return replace(state, uploads=(*new, *others) if item.kind == "submission" else (*others, *new))


def synchronize(state: State, seen: events.OutboxSeen) -> State:
    """Upload the task's items in the outbox: running transfers continue, transfers of removed items stop."""
    if state.mode is Mode.DRY_RUN:
        return state
    items = [item for item in seen.items if item.task == state.task]
    running = {upload.digest: upload for upload in state.uploads}
    received = next((item for item in items if item.received), None)
    pending = tuple(
        running.get(item.digest) or Upload(item)
        for item in items
        if not item.received or item.digest in running
    )
    # An upload that is no longer the current one restarts when it is its turn.
    queue = (*pending[:1], *map(uploads.restart, pending[1:]))
    return replace(state, received_submission=received, uploads=queue)


def confirm(state: State) -> State:
    """Query whether the aggregator still has the submission: one that lost its state reports it missing."""
    pending = any(upload.item.kind == "submission" for upload in state.uploads)
    if state.received_submission is None or pending:
        return state
    return replace(state, uploads=(*state.uploads, Upload(state.received_submission)))


def send_next(state: State, now_s: float) -> Step:
    """Send the next window, or after the last one wait for a receipt."""
    if not state.uploads or state.uploads[0].due_s is not None:
        return state, ()
    upload = state.uploads[0]
    if not upload.ranges:
        return _with_upload(state, replace(upload, due_s=now_s + retry_delay_s(upload.attempts))), ()
    upload, send = uploads.send_window(upload, chunk_bytes=state.chunk_bytes)
    return _with_upload(state, upload), (send,)


def unsendable(state: State, reason: str, now_s: float) -> Step:
    """Keep what the broker does not accept, and try again later: its configuration may change."""
    if not state.uploads:
        return state, ()
    state = _with_upload(state, uploads.back_off(state.uploads[0], now_s=now_s))
    return _blocked(state, f"the broker does not accept this device's upload: {reason}")


def receipt(state: State, receipt: Receipt, now_s: float) -> Step:
    """Handle the aggregator's answer to an upload."""
    upload = next((upload for upload in state.uploads if upload.digest == receipt.digest), None)
    if upload is None:
        return state, ()
    if receipt.status == "missing":
        if upload.digest != state.uploads[0].digest:
            return state, ()  # sent when it is its turn
        upload, send = uploads.send_missing(
            upload, receipt.missing, chunk_bytes=state.chunk_bytes, now_s=now_s
        )
        return _with_upload(state, upload), () if send is None else (send,)
    if receipt.reason == "no_space":
        return _blocked(_with_upload(state, uploads.back_off(upload, now_s=now_s)), NO_SPACE)
    actions: tuple[events.Action, ...] = (events.ReportBlocked(""),) if state.blocked_reason else ()
    state = replace(state, blocked_reason="")
    if receipt.status == "refused":
        state, more = _refused(state, upload, receipt)
        return state, (*actions, *more)
    state, item = _without_upload(state, upload), upload.item
    if item.kind == "submission":
        state = replace(state, received_submission=item)
    elif item.head == state.installed:
        state = replace(state, evaluated=item.head)
    return state, (*actions, events.StoreReceipt(item))


def _refused(state: State, upload: Upload, receipt: Receipt) -> Step:
    if receipt.reason == "digest" and upload.damaged + 1 < MAX_DAMAGED:
        damaged = uploads.restart(replace(upload, missing=(), damaged=upload.damaged + 1))
        return _with_upload(state, damaged), ()
    state = _without_upload(state, upload)
    text = f"the aggregator refused the {upload.item.kind} ({receipt.reason}): {receipt.detail}"
    exits = state.mode is Mode.ONCE or receipt.reason in {"unknown_device", "revoked"}
    final: tuple[events.Action, ...] = (events.Exit(1, text),) if exits else (events.Log(text, error=True),)
    if receipt.sequence > MAX_SEQUENCE:
        return state, final
    task, manifest, seen = state.task, state.manifest, open_round(state)
    # A submission for a round that was not joined yet is built once its tensors are stored.
    joined = seen is not None and seen.number == state.joined_round
    if receipt.reason == "superseded" and task and manifest and (manifest.program is None or joined):
        state = replace(state, building=True, images_changed=False)
        return state, (events.BuildSubmission(task, manifest, seen, above=receipt.sequence),)
    if receipt.reason in {"superseded", "late", "unknown_round"}:
        return state, (events.Log(f"submission not counted, continuing: {receipt.detail or receipt.reason}"),)
    if receipt.reason == "unknown_task":
        return state, (events.Log("the aggregator has another task: waiting for it"),)
    return state, final


def _blocked(state: State, reason: str) -> Step:
    """Report once what prevents uploads."""
    if state.blocked_reason == reason:
        return state, ()
    actions = (events.ReportBlocked(reason), events.Log(f"{reason}; retrying", error=True))
    return replace(state, blocked_reason=reason), actions


def _with_upload(state: State, upload: Upload) -> State:
    uploads_ = (upload if other.digest == upload.digest else other for other in state.uploads)
    return replace(state, uploads=tuple(uploads_))


def _without_upload(state: State, upload: Upload) -> State:
    return replace(state, uploads=tuple(other for other in state.uploads if other.digest != upload.digest))
