"""One download: windows of a blob are requested, and of each window only the missing frames.

Frames in order go to disk, frames ahead of their turn are held in memory. Once the last requested frame has arrived,
earlier gaps will not fill by themselves and are requested again at once.
"""

from bisect import bisect_left
from dataclasses import replace

from edge_client.agent.events import RequestBlob
from edge_client.agent.retry_delay import retry_delay_s
from edge_client.agent.state import Download
from protocol.wire.messages import MAX_CHUNK_BYTES, Frame
from protocol.wire.transfer import Ranges

WINDOW_BYTES = 16 * MAX_CHUNK_BYTES
"""Bytes of a blob requested at once."""

MAX_AHEAD_BYTES = 4 * WINDOW_BYTES
"""Limit for held frames: more than a window, because broadcast frames arrive without a request."""

MAX_AHEAD = 4096
"""Limit for the number of held frames, which may be small."""

MAX_REQUESTS = 16
"""Gaps requested at once."""


def restart(download: Download) -> Download:
    """Make the next request due at once: frames in flight may be lost."""
    if download.due_s == float("inf"):
        return download
    return replace(download, until=0, attempts=0, due_s=0.0)


def is_due(download: Download, *, now_s: float) -> bool:
    """Return whether a request is due: nothing is in flight, or it is overdue."""
    if download.offset >= download.blob.size_bytes or download.due_s == float("inf"):
        return False
    return not download.until or now_s >= download.due_s


def request(download: Download, *, now_s: float) -> tuple[Download, tuple[RequestBlob, ...]]:
    """Request the missing bytes of the next window."""
    attempts = download.attempts + 1 if download.until else 0
    missing = _gaps(download)[:MAX_REQUESTS]
    asked = replace(download, until=missing[-1][1], attempts=attempts, due_s=now_s + retry_delay_s(attempts))
    return asked, tuple(RequestBlob(download.blob.digest, start, stop - start) for start, stop in missing)


def receive(download: Download, frame: Frame, *, now_s: float) -> tuple[Download, bytes]:
    """Return the download with a frame, and the next bytes to write; duplicate and foreign frames are ignored."""
    stop, size = frame.offset + len(frame.data), download.blob.size_bytes
    if frame.digest != download.blob.digest or frame.size_bytes != size or stop > size:
        return download, b""
    if not frame.data or stop <= download.offset or _is_held(download, frame):
        return download, b""
    until = 0 if stop == download.until else download.until
    ahead, parts = _with_frame(download, frame), []
    offset = download.offset
    while ahead and ahead[0][0] <= offset:
        start, data = ahead[0]
        ahead = ahead[1:]
        parts.append(data[offset - start :])
        offset = max(offset, start + len(data))
    received = replace(
        download,
        offset=offset,
        ahead=ahead,
        until=0 if offset >= until else until,
        attempts=0,
        due_s=now_s + retry_delay_s(0),
    )
    return received, b"".join(parts)


def _gaps(download: Download) -> Ranges:
    """Return the missing ranges of the next window; its first byte is always missing."""
    covered = download.offset
    end = min(download.blob.size_bytes, covered + WINDOW_BYTES)
    missing = []
    for start, data in download.ahead:
        if covered < min(start, end):
            missing.append((covered, min(start, end)))
        covered = max(covered, start + len(data))
    if covered < end:
        missing.append((covered, end))
    return tuple(missing)


def _is_held(download: Download, frame: Frame) -> bool:
    at = bisect_left(download.ahead, (frame.offset,))
    held = download.ahead[at : at + 1]
    return bool(held) and held[0][0] == frame.offset and len(held[0][1]) >= len(frame.data)


def _with_frame(download: Download, frame: Frame) -> tuple[tuple[int, bytes], ...]:
    """Return the held frames with one more, if it is the next one or there is room."""
    ahead = download.ahead
    if frame.offset > download.offset and (
        len(ahead) >= MAX_AHEAD or sum(len(data) for _, data in ahead) + len(frame.data) > MAX_AHEAD_BYTES
    ):
        return ahead
    at = bisect_left(ahead, (frame.offset,))
    return (*ahead[:at], (frame.offset, frame.data), *ahead[at:])
