"""Downloads: windows of a blob are requested, and of each window only the missing frames.

Frames in order go to disk; frames ahead of their turn wait in memory. When the last requested frame arrives, earlier
gaps are lost frames, and are requested again at once. On a timeout the device requests a probe of a few bytes: MQTT
keeps the order, so if the probe arrives first, the frame was lost.

Frames are not authenticated: any client that may publish them can send wrong ones. So a wrong digest says nothing about
the blob. The device downloads it again, with growing delays and without an end.
"""

from bisect import bisect_left
from dataclasses import replace

from edge_client.core import events
from edge_client.core.state import MAX_DAMAGED, Download, Mode, State
from edge_client.core.uploads import cut_window
from protocol.retry_delay import retry_delay_s
from protocol.wire.messages import MAX_CHUNK_BYTES, Frame, Receipt
from protocol.wire.transfer import Ranges

WINDOW_BYTES = 16 * MAX_CHUNK_BYTES
"""Bytes of a blob requested at once."""

MAX_AHEAD_BYTES = 4 * WINDOW_BYTES
"""Limit for held frames: more than a window, because broadcast frames arrive without a request."""

MAX_AHEAD = 4096
"""Limit for the number of held frames, which may be small."""

MAX_REQUESTS = 16
"""Gaps requested at once."""

PROBE_BYTES = 128
"""Bytes that are requested to find out whether earlier requests are lost: less than any other frame."""

BROADCAST_WAIT_S = 3.0
"""Seconds to wait for a broadcast blob before requesting it."""


def choose(state: State, _now_s: float) -> events.Step:
    """Open the first required blob that is not stored, unless the disk is almost full."""
    missing = {blob.digest: blob for blob in state.required_blobs if blob.digest not in state.stored}
    if not missing or "download" in state.missing_space:
        return replace(state, download=None), ()
    first, *_ = missing.values()
    if is_running(state, first.digest):
        return state, ()
    download = Download(first, offset=0, due_s=float("inf"))
    return replace(state, download=download), (events.OpenDownload(first, tuple(missing.values())),)


def is_running(state: State, digest: bytes) -> bool:
    """Return whether a blob is being downloaded."""
    return state.download is not None and state.download.blob.digest == digest


def opened(state: State, digest: bytes, offset: int, now_s: float) -> State:
    """Continue at the bytes on disk; a broadcast counts as requested."""
    download = state.download
    if download is None or download.blob.digest != digest:
        return state
    seen, head = state.current_round, state.current_head
    broadcast = {blob.digest for blob in (seen and seen.tensors, head and head.tensors) if blob}
    until, delay_s = (download.blob.size_bytes, BROADCAST_WAIT_S) if digest in broadcast else (0, 0.0)
    download = replace(download, offset=offset, ahead=(), until=until, attempts=0, due_s=now_s + delay_s)
    return replace(state, download=download)


def restart(state: State) -> State:
    """Make the next request due at once if frames are in flight: they may be lost."""
    if state.download is None or not state.download.until:
        return state
    return replace(state, download=replace(state.download, until=0, attempts=0, due_s=0.0))


def cut(state: State) -> State:
    """Note that the connection was lost while frames were in flight."""
    if not state.connected or state.download is None or not state.download.until:
        return state
    return replace(state, download_frames=state.download_frames.failed())


def request_due(state: State, now_s: float) -> events.Step:
    """Request the missing bytes of the next window, if nothing is in flight; the last of them if it is overdue."""
    download = state.download
    if download is None or not state.connected or download.offset >= download.blob.size_bytes:
        return state, ()
    if now_s < download.due_s:
        return state, ()
    missing, attempts = _gaps(download)[:MAX_REQUESTS], download.attempts
    if state.download_frames.is_reduced:
        length = state.download_frames.limit_bytes
        missing, _ = cut_window(missing, chunk_bytes=length, frames=MAX_REQUESTS)
    if download.until:
        (*_, (start, stop)) = missing
        missing, attempts = ((max(start, stop - PROBE_BYTES), stop),), attempts + 1
    due_s = now_s + retry_delay_s(attempts)
    download = replace(download, until=missing[-1][1], attempts=attempts, due_s=due_s)
    requests = (events.RequestBlob(download.blob.digest, start, stop - start) for start, stop in missing)
    return replace(state, download=download), tuple(requests)


def receive(state: State, frame: Frame, now_s: float) -> events.Step:
    """Take a frame, and write the bytes that are next; duplicate, foreign and unexpected frames are ignored."""
    download = state.download
    if download is None or not download.until or not _is_new(download, frame):
        return state, ()
    ahead, offset, parts = _with_frame(download, frame), download.offset, []
    while ahead and ahead[0][0] <= offset:
        start, data = ahead[0]
        ahead = ahead[1:]
        parts.append(data[offset - start :])
        offset = max(offset, start + len(data))
    ended = frame.offset + len(frame.data) == download.until or offset >= download.until
    until, due_s = (0, now_s) if ended else (download.until, now_s + retry_delay_s(0))
    is_probe = len(frame.data) <= PROBE_BYTES
    if ended and not is_probe:
        state = replace(state, download_frames=state.download_frames.arrived())
    elif offset < download.until and ended and download.attempts:  # the probe, and nothing before it
        state = replace(state, download_frames=state.download_frames.failed())
    attempts = download.attempts if is_probe else 0
    download = replace(download, offset=offset, ahead=ahead, until=until, attempts=attempts, due_s=due_s)
    data = b"".join(parts)
    return replace(state, download=download), (
        (events.AppendBlob(download.blob, data, offset),) if data else ()
    )


def finished(state: State, event: events.DownloadFinished, now_s: float) -> events.Step:
    """Take a verified blob; download a damaged one again, from the `MAX_DAMAGED`th time on after a delay."""
    if event.valid:
        return replace(state, stored=state.stored | {event.digest}), ()
    if state.download is None or state.download.blob.digest != event.digest:
        return state, ()
    damaged, blob = state.download.damaged + 1, state.download.blob
    delay_s = retry_delay_s(damaged - MAX_DAMAGED) if damaged >= MAX_DAMAGED else 0.0
    state = replace(state, download=Download(blob, offset=0, damaged=damaged, due_s=now_s + delay_s))
    if damaged < MAX_DAMAGED:
        return state, (events.Log(f"{blob.name} arrived damaged, downloading it again", error=True),)
    problem = state.download_problem
    if state.mode is not Mode.SERVICE:
        return state, (events.Exit(1, problem),)
    return state, (events.Log(f"{problem}; retrying", error=True),) if damaged == MAX_DAMAGED else ()


def refused(state: State, receipt: Receipt, now_s: float) -> events.Step:
    """Request again later: the aggregator may announce other blobs; exit if it does not know this device.

    A refusal without a request is ignored: any client may publish one.
    """
    download = state.download
    if download is None or not download.until:
        return state, ()
    attempts = download.attempts + 1
    # `until` marks it as in flight, so that it is not requested before it is due.
    until, due_s = download.blob.size_bytes, now_s + retry_delay_s(attempts)
    state = replace(
        state,
        download=replace(download, until=until, attempts=attempts, due_s=due_s),
        download_frames=replace(state.download_frames, failures=0),  # they were not lost
    )
    text = f"the aggregator refused to send {download.blob.name} ({receipt.reason}): {receipt.detail}"
    if receipt.reason in {"unknown_device", "revoked"}:
        return state, (events.Exit(1, text),)
    return state, (events.Log(text, error=True),) if attempts == 1 else ()


def _gaps(download: Download) -> Ranges:
    """Return the missing ranges of the next window; its first byte is always missing."""
    covered = download.offset
    end = min(download.blob.size_bytes, covered + WINDOW_BYTES)
    missing = []
    for start, data in (*download.ahead, (end, b"")):
        if covered < min(start, end):
            missing.append((covered, min(start, end)))
        covered = max(covered, start + len(data))
    return tuple(missing)


def _is_new(download: Download, frame: Frame) -> bool:
    """Return whether a frame has bytes of the blob that are neither on disk nor held."""
    stop, size = frame.offset + len(frame.data), download.blob.size_bytes
    if frame.digest != download.blob.digest or frame.size_bytes != size or stop > size:
        return False
    at = bisect_left(download.ahead, (frame.offset,))
    held = next((data for start, data in download.ahead[at : at + 1] if start == frame.offset), b"")
    return stop > download.offset and len(frame.data) > len(held)


def _with_frame(download: Download, frame: Frame) -> tuple[tuple[int, bytes], ...]:
    """Return the held frames with one more, if it is the next one or there is room."""
    ahead = download.ahead
    if frame.offset > download.offset and (
        len(ahead) >= MAX_AHEAD or sum(len(data) for _, data in ahead) + len(frame.data) > MAX_AHEAD_BYTES
    ):
        return ahead
    at = bisect_left(ahead, (frame.offset,))
    return (*ahead[:at], (frame.offset, frame.data), *ahead[at:])
