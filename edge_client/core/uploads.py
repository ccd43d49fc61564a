"""Uploads: a query, the ranges that the aggregator is missing in windows, and another query until the receipt.

A query is the last bytes of the item, to which the aggregator answers with the missing ranges. It is short, because
queries are far more frequent than missing ranges.

Receipts are not authenticated: any client that may publish them can send wrong ones. So a refusal is never final: the
device queries again with growing delays, unless the round is over or is built again. Nor is a receipt: the device
queries again whenever the aggregator has started or has signed the task again.
"""

from collections.abc import Iterable
from dataclasses import replace

from edge_client.core import events
from edge_client.core.state import MAX_DAMAGED, Mode, State, Upload, UploadItem
from protocol.retry_delay import retry_delay_s
from protocol.wire.messages import Reason, Receipt
from protocol.wire.transfer import Ranges

WINDOW_FRAMES = 8
"""Frames in the MQTT session at once: paho keeps as many in flight, so that other messages do not queue behind them."""

QUERY_BYTES = 256

MAX_SEQUENCE = 2**53
"""A device does not exceed a greater sequence: its own never decrease, and it would soon run out of them."""

NO_SPACE = "the aggregator has no space for this device's upload"
"""A reason that is not published, because the aggregator knows it."""

MAY_PASS: frozenset[Reason] = frozenset({"digest", "late", "unknown_round", "unknown_task"})
"""Reasons that are reported from the `MAX_DAMAGED`th time on: of the network, or of a manifest that is on its way."""

DAMAGED = (
    "this device's upload arrives damaged at the aggregator: the broker, another client on it, or the network changes "
    "its bytes or the aggregator's receipts"
)


def start(state: State, item: UploadItem) -> State:
    """Upload an item, unless it was received, in place of the current one of its kind."""
    if any(upload.digest == item.digest for upload in state.uploads):
        return state
    others = tuple(upload for upload in state.uploads if upload.item.kind != item.kind)
    new = () if item.received else (Upload(item),)
    return replace(state, uploads=_queue((*others, *new)))


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
    return replace(state, received_submission=received, uploads=_queue(pending))


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


def _queue(uploads: Iterable[Upload]) -> tuple[Upload, ...]:
    """Return what was refused after the rest, and submissions first; all but the first restart at their turn."""
    queue = sorted(uploads, key=lambda each: (each.refusals > 0, each.item.kind == "evaluation"))
    return (*queue[:1], *map(restart, queue[1:]))


def query_due(state: State, now_s: float) -> events.Step:
    """Send the current upload's query if it is due; none before the aggregator has named the device's releases."""
    if not state.uploads or not state.connected or not state.has_record:
        return state, ()
    upload = state.uploads[0]
    if upload.due_s is None or now_s < upload.due_s:
        return state, ()
    # All devices confirm at once when the aggregator starts: whole submissions could overflow the broker's queue. And a
    # query without an answer may have been too large for the broker.
    is_short = upload.item == state.received_submission or upload.attempts > 0
    least = 0 if is_short else state.chunk_bytes
    query = events.SendFrames(upload.item, (_query_range(upload, least),))
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
    """Keep an upload that the broker refuses, and try again later: its configuration may change."""
    if not state.uploads:
        return state, ()
    upload = _back_off(state.uploads[0], now_s)
    return _blocked(state, upload, f"the broker does not accept this device's upload: {reason}")


def receipt(state: State, receipt: Receipt, now_s: float) -> events.Step:
    """Handle the aggregator's answer to an upload, or its message that it has lost the submission."""
    upload = next((upload for upload in state.uploads if upload.digest == receipt.digest), None)
    if upload is None:
        received = state.received_submission
        is_lost = receipt.status == "missing" and received is not None and received.digest == receipt.digest
        return confirm(state) if is_lost else state, ()
    if receipt.status == "missing":
        return _send_missing(state, upload, receipt.missing, now_s)
    if receipt.status == "refused":
        return _refused(state, upload, receipt, now_s)
    state = replace(_without_upload(state, upload), upload_frames=state.upload_frames.arrived())
    item = upload.item
    if item.kind == "submission":
        state = replace(state, received_submission=item)
    elif item.head == state.installed:
        state = replace(state, evaluated=item.head)
    return state, (events.StoreReceipt(item),)


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
        # Everything that was sent is being lost; or it is under way, and this answers an earlier one of two queries.
        if upload.attempts:
            state = replace(state, upload_frames=state.upload_frames.dropped())
        return _with_upload(state, _back_off(upload, now_s)), ()
    attempts = upload.attempts if missing == upload.missing else 0
    query = () if missing[-1][1] == size else (_query_range(upload, 0),)
    return _send_window(state, replace(upload, missing=missing, ranges=(*missing, *query), attempts=attempts))


def _send_window(state: State, upload: Upload) -> events.Step:
    window, rest = cut_window(upload.ranges, chunk_bytes=state.chunk_bytes, frames=WINDOW_FRAMES)
    state = _with_upload(state, replace(upload, ranges=rest, sent=not rest, due_s=None))
    return state, (events.SendFrames(upload.item, window),)


def _query_range(upload: Upload, chunk_bytes: int) -> tuple[int, int]:
    """Return the last bytes; all bytes if there are at most `chunk_bytes`."""
    size = upload.item.size_bytes
    return (0 if size <= chunk_bytes else max(0, size - QUERY_BYTES), size)


def _back_off(upload: Upload, now_s: float) -> Upload:
    """Send nothing until the next query is due."""
    return replace(upload, ranges=(), sent=False, due_s=now_s + retry_delay_s(upload.attempts))


def _refused(state: State, upload: Upload, receipt: Receipt, now_s: float) -> events.Step:
    if not (upload.attempts or upload.ranges or upload.sent):
        return state, ()  # nothing was asked: nothing is logged for every receipt of a flood
    text = f"the aggregator refused the {upload.item.kind} ({receipt.reason}): {receipt.detail}"
    if receipt.reason == "no_space":
        return _blocked(state, _back_off(upload, now_s), NO_SPACE)
    if receipt.reason in {"unknown_device", "revoked"}:
        return _without_upload(state, upload), (events.Exit(1, text),)
    task, manifest, seen = state.task, state.manifest, state.open_round
    if upload.item.kind == "submission" and task and manifest:
        has_rounds, number = manifest.program is not None, seen.number if seen is not None else None
        is_superseded = receipt.reason == "superseded" and receipt.sequence <= MAX_SEQUENCE
        # A submission for a round that was not joined yet is built once its tensors are stored.
        if has_rounds and (
            str(number) != upload.item.about or (is_superseded and number != state.joined_round)
        ):
            return _without_upload(state, upload), (events.Log(f"{text}; continuing"),)
        if is_superseded:
            state = replace(_without_upload(state, upload), building=True, images_changed=False)
            return state, (events.BuildSubmission(task, manifest, seen, above=receipt.sequence),)
    return _repeated(state, upload, receipt.reason, text, now_s)


def _repeated(state: State, upload: Upload, reason: Reason | None, text: str, now_s: float) -> events.Step:
    """Query a refused upload again, after a delay and behind the others; report it."""
    refusals = upload.refusals + 1
    may_pass = reason in MAY_PASS and refusals < MAX_DAMAGED
    is_damaged = reason == "digest"
    if state.mode is Mode.ONCE and (reason not in MAY_PASS or (is_damaged and not may_pass)):
        return _without_upload(state, upload), (events.Exit(1, text),)
    delay_s = 0.0 if is_damaged and may_pass else retry_delay_s(refusals - 1)
    again = replace(restart(upload), missing=(), refusals=refusals, due_s=now_s + delay_s)
    state = _without_upload(state, upload)
    state = replace(state, uploads=(*state.uploads, again))
    actions: tuple[events.Action, ...] = (events.CheckOutbox(),) if is_damaged else ()
    if may_pass:
        return state, (*actions, events.Log(text))
    state, more = _blocked(state, again, DAMAGED if is_damaged else text)
    return state, (*actions, *more)


def _blocked(state: State, upload: Upload, problem: str) -> events.Step:
    """Keep an upload, and log once what prevents it."""
    state = _with_upload(state, replace(upload, problem=problem))
    return state, () if upload.problem == problem else (events.Log(f"{problem}; retrying", error=True),)


def _with_upload(state: State, upload: Upload) -> State:
    uploads = (upload if other.digest == upload.digest else other for other in state.uploads)
    return replace(state, uploads=tuple(uploads))


def _without_upload(state: State, upload: Upload) -> State:
    return replace(state, uploads=tuple(other for other in state.uploads if other.digest != upload.digest))
