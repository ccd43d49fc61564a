"""Uploads: a query, the ranges that the aggregator is missing in windows, and another query until the receipt.

A query is the last bytes of the item, to which the aggregator answers with the missing ranges. It is short, because
queries are far more frequent than missing ranges.

Receipts are not authenticated: any client that may publish them can send wrong ones. So an upload that is said to have
arrived with another digest is repeated, with growing delays and for ever, and whatever another receipt says, the
aggregator is queried again when it has started or has signed the task again.
"""

from dataclasses import replace

from edge_client.agent import events
from edge_client.agent.state import MAX_DAMAGED, Mode, State, Upload, UploadItem
from protocol.rates.retry_delay import retry_delay_s
from protocol.wire.messages import Receipt
from protocol.wire.transfer import Ranges

WINDOW_FRAMES = 8
"""Frames in the MQTT session at once: paho keeps as many in flight, so that other messages do not queue behind them."""

QUERY_BYTES = 256

MAX_SEQUENCE = 2**53
"""A device does not exceed a greater sequence: its own never decrease, and it would soon run out of them."""

NO_SPACE = "the aggregator has no space for this device's upload"
"""A reason that is not published, because the aggregator knows it."""

DAMAGED = (
    "this device's upload arrives damaged at the aggregator: the broker, another client on it, or the network changes "
    "its bytes or the aggregator's receipts"
)


def start(state: State, item: UploadItem) -> State:
    """Upload an item, unless it was received, in place of the current one of its kind; submissions come first."""
    if any(upload.digest == item.digest for upload in state.uploads):
        return state
    others = tuple(upload for upload in state.uploads if upload.item.kind != item.kind)
    if item.kind == "submission":
        others = tuple(map(restart, others))
    if item.received:
        return replace(state, uploads=others)
    new = (Upload(item),)
    return replace(state, uploads=(*new, *others) if item.kind == "submission" else (*others, *new))


def synchronize(state: State, items: tuple[UploadItem, ...]) -> State:
    """Upload the task's items in the outbox: running transfers continue, transfers of removed items stop."""
    if state.mode is Mode.DRY_RUN:
        return state
    items = tuple(item for item in items if item.task == state.task)
    running = {upload.digest: upload for upload in state.uploads}
    received = next((item for item in items if item.received), None)
    pending = [
        running.get(item.digest) or Upload(item)
        for item in items
        if not item.received or item.digest in running
    ]
    # An upload that is no longer the current one restarts when it is its turn.
    queue = (*pending[:1], *map(restart, pending[1:]))
    return replace(state, received_submission=received, uploads=queue)


def confirm(state: State) -> State:
    """Query whether the aggregator still has the submission: one that lost its state reports it missing."""
    pending = any(upload.item.kind == "submission" for upload in state.uploads)
    if state.received_submission is None or pending:
        return state
    return replace(state, uploads=(*state.uploads, Upload(state.received_submission)))


def restart(upload: Upload) -> Upload:
    """Begin with a query, at once: frames in flight may be lost."""
    return replace(upload, ranges=(), sent=False, attempts=0, due_s=0.0)


def cut(state: State) -> State:
    """Note that the connection was lost while frames were with the MQTT session."""
    if not state.connected or not state.uploads or state.uploads[0].due_s is not None:
        return state
    return replace(state, upload_frames=state.upload_frames.failed())


def query_due(state: State, now_s: float) -> events.Step:
    """Send the current upload's query if it is due."""
    if not state.uploads or not state.connected:
        return state, ()
    upload = state.uploads[0]
    if upload.due_s is None or now_s < upload.due_s:
        return state, ()
    query = events.SendFrames(upload.item, (_query_range(upload, state.chunk_bytes),))
    upload = replace(upload, ranges=(), sent=False, attempts=upload.attempts + 1, due_s=None)
    return _with_upload(state, upload), (query,)


def send_next(state: State, now_s: float) -> events.Step:
    """Send the next window, or after the last one wait for a receipt."""
    if not state.uploads or state.uploads[0].due_s is not None:
        return state, ()
    upload = state.uploads[0]
    if upload.ranges or upload.sent:
        state = replace(state, upload_frames=state.upload_frames.arrived())
    if upload.ranges:
        return _send_window(state, upload)
    return _with_upload(state, replace(upload, due_s=now_s + retry_delay_s(upload.attempts))), ()


def unsendable(state: State, reason: str, now_s: float) -> events.Step:
    """Keep what the broker does not accept, and try again later: its configuration may change."""
    if not state.uploads:
        return state, ()
    state = _with_upload(state, _back_off(state.uploads[0], now_s))
    return _blocked(state, f"the broker does not accept this device's upload: {reason}")


def receipt(state: State, receipt: Receipt, now_s: float) -> events.Step:
    """Handle the aggregator's answer to an upload, or its message that it has lost the submission."""
    upload = next((upload for upload in state.uploads if upload.digest == receipt.digest), None)
    if upload is None:
        received = state.received_submission
        is_lost = receipt.status == "missing" and received is not None and received.digest == receipt.digest
        return confirm(state) if is_lost else state, ()
    if receipt.status == "missing":
        return _send_missing(state, upload, receipt.missing, now_s)
    if receipt.reason == "no_space":
        return _blocked(_with_upload(state, _back_off(upload, now_s)), NO_SPACE)
    if receipt.reason == "digest" and (state.mode is Mode.SERVICE or upload.damaged + 1 < MAX_DAMAGED):
        return _damaged(state, upload, now_s)
    actions: tuple[events.Action, ...] = (events.ReportBlocked(""),) if state.blocked_reason else ()
    state = replace(state, blocked_reason="")
    if receipt.status == "refused":
        state, more = _refused(state, upload, receipt)
        return state, (*actions, *more)
    state = replace(_without_upload(state, upload), upload_frames=state.upload_frames.arrived())
    item = upload.item
    if item.kind == "submission":
        state = replace(state, received_submission=item)
    elif item.head == state.installed:
        state = replace(state, evaluated=item.head)
    return state, (*actions, events.StoreReceipt(item))


def cut_window(ranges: Ranges, *, chunk_bytes: int, frames: int) -> tuple[Ranges, Ranges]:
    """Split byte ranges into one range of at most `chunk_bytes` for each of the first `frames` frames, and the rest."""
    window: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(ranges):
        for offset in range(start, stop, chunk_bytes):
            if len(window) == frames:
                return tuple(window), ((offset, stop), *ranges[number + 1 :])
            window.append((offset, min(offset + chunk_bytes, stop)))
    return tuple(window), ()


def _send_missing(state: State, upload: Upload, missing: Ranges, now_s: float) -> events.Step:
    """Begin to send the missing ranges, unless earlier ones are still being sent: a query follows those."""
    size = upload.item.size_bytes
    missing = tuple((start, min(stop, size)) for start, stop in missing if start < min(stop, size))
    if upload.digest != state.uploads[0].digest or upload.ranges or not missing:
        return state, ()
    if upload.sent and missing == upload.missing:
        return _with_upload(state, _back_off(upload, now_s)), ()  # everything that was sent is being lost
    attempts = upload.attempts if missing == upload.missing else 0
    query = () if missing[-1][1] == size else (_query_range(upload, state.chunk_bytes),)
    return _send_window(state, replace(upload, missing=missing, ranges=(*missing, *query), attempts=attempts))


def _send_window(state: State, upload: Upload) -> events.Step:
    window, rest = cut_window(upload.ranges, chunk_bytes=state.chunk_bytes, frames=WINDOW_FRAMES)
    state = _with_upload(state, replace(upload, ranges=rest, sent=not rest, due_s=None))
    return state, (events.SendFrames(upload.item, window),)


def _query_range(upload: Upload, chunk_bytes: int) -> tuple[int, int]:
    """Return the last bytes; all bytes if they fit one frame."""
    size = upload.item.size_bytes
    return (0, size) if size <= chunk_bytes else (size - QUERY_BYTES, size)


def _back_off(upload: Upload, now_s: float) -> Upload:
    """Send nothing until the next query is due."""
    return replace(upload, ranges=(), sent=False, due_s=now_s + retry_delay_s(upload.attempts))


def _damaged(state: State, upload: Upload, now_s: float) -> events.Step:
    """Upload again what arrived with another digest, from the `MAX_DAMAGED`th time on after a delay."""
    damaged = upload.damaged + 1
    delay_s = retry_delay_s(damaged - MAX_DAMAGED) if damaged >= MAX_DAMAGED else 0.0
    again = replace(restart(upload), missing=(), damaged=damaged, due_s=now_s + delay_s)
    state, actions = _with_upload(state, again), (events.CheckOutbox(),)
    if damaged < MAX_DAMAGED:
        return state, actions
    state, more = _blocked(state, DAMAGED)
    return state, (*actions, *more)


def _refused(state: State, upload: Upload, receipt: Receipt) -> events.Step:
    state = _without_upload(state, upload)
    text = f"the aggregator refused the {upload.item.kind} ({receipt.reason}): {receipt.detail}"
    exits = state.mode is Mode.ONCE or receipt.reason in {"unknown_device", "revoked"}
    final = events.Exit(1, text) if exits else events.Log(text, error=True)
    if receipt.sequence > MAX_SEQUENCE:
        return state, (final,)
    task, manifest, seen = state.task, state.manifest, state.open_round
    # A submission for a round that was not joined yet is built once its tensors are stored.
    joined = seen is not None and seen.number == state.joined_round
    if receipt.reason == "superseded" and task and manifest and (manifest.program is None or joined):
        state = replace(state, building=True, images_changed=False)
        return state, (events.BuildSubmission(task, manifest, seen, above=receipt.sequence),)
    if receipt.reason in {"superseded", "late", "unknown_round"}:
        return state, (events.Log(f"submission not counted, continuing: {receipt.detail or receipt.reason}"),)
    if receipt.reason == "unknown_task":
        return state, (events.Log("the aggregator has another task: waiting for it"),)
    return state, (final,)


def _blocked(state: State, reason: str) -> events.Step:
    """Report once what prevents uploads."""
    if state.blocked_reason == reason:
        return state, ()
    actions = (events.ReportBlocked(reason), events.Log(f"{reason}; retrying", error=True))
    return replace(state, blocked_reason=reason), actions


def _with_upload(state: State, upload: Upload) -> State:
    uploads = (upload if other.digest == upload.digest else other for other in state.uploads)
    return replace(state, uploads=tuple(uploads))


def _without_upload(state: State, upload: Upload) -> State:
    return replace(state, uploads=tuple(other for other in state.uploads if other.digest != upload.digest))
