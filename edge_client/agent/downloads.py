"""One transfer down, pure: a window asked for at a time, and of it only what has not come.

What comes in its turn goes to the disk, what comes ahead of it is held until its turn. Once the last frame that was
asked for is there, what is missing before it will not come any more, and is asked for at once.
"""

from bisect import bisect_left
from dataclasses import replace

from edge_client.agent.backoff import patience_s
from edge_client.agent.events import Request
from edge_client.agent.state import Download
from protocol.wire.messages import MAX_CHUNK_BYTES, Frame
from protocol.wire.transfer import Ranges

WINDOW_BYTES = 16 * MAX_CHUNK_BYTES
"""Bytes of a blob that are asked for at once."""

MAX_AHEAD_BYTES = 4 * WINDOW_BYTES
"""Held of what comes ahead: more than a window, for what is sent to the whole fleet comes without being asked for."""

MAX_AHEAD = 4096
"""Pieces of it: frames may be small."""

MAX_REQUESTS = 16
"""Gaps asked for at once."""


def afresh(download: Download) -> Download:
    """Ask again at once: whatever was on its way may be gone."""
    if download.due_s == float("inf"):
        return download
    return replace(download, until=0, attempts=0, due_s=0.0)


def is_due(download: Download, *, now_s: float) -> bool:
    """Whether to ask: nothing is on its way, or it does not come."""
    if download.offset >= download.blob.size_bytes or download.due_s == float("inf"):
        return False
    return not download.until or now_s >= download.due_s


def ask(download: Download, *, now_s: float) -> tuple[Download, tuple[Request, ...]]:
    """Ask for what is missing of the next window."""
    attempts = download.attempts + 1 if download.until else 0
    missing = _gaps(download)[:MAX_REQUESTS]
    asked = replace(download, until=missing[-1][1], attempts=attempts, due_s=now_s + patience_s(attempts))
    return asked, tuple(Request(download.blob.digest, start, stop - start) for start, stop in missing)


def take(download: Download, frame: Frame, *, now_s: float) -> tuple[Download, bytes]:
    """Take a frame: returns the bytes that are the blob's next. What is there already, or is none of it, is ignored."""
    stop, size = frame.offset + len(frame.data), download.blob.size_bytes
    if frame.digest != download.blob.digest or frame.size_bytes != size or stop > size:
        return download, b""
    if not frame.data or stop <= download.offset or _is_held(download, frame):
        return download, b""
    until = 0 if stop == download.until else download.until
    ahead, parts = _sorted_in(download, frame), []
    offset = download.offset
    while ahead and ahead[0][0] <= offset:
        start, data = ahead[0]
        ahead = ahead[1:]
        parts.append(data[offset - start :])
        offset = max(offset, start + len(data))
    taken = replace(
        download,
        offset=offset,
        ahead=ahead,
        until=0 if offset >= until else until,
        attempts=0,
        due_s=now_s + patience_s(0),
    )
    return taken, b"".join(parts)


def _gaps(download: Download) -> Ranges:
    """What is missing of the next window; its first byte always is."""
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


def _sorted_in(download: Download, frame: Frame) -> tuple[tuple[int, bytes], ...]:
    """The pieces with one more, if it is the next or there is room for it."""
    ahead = download.ahead
    if frame.offset > download.offset and (
        len(ahead) >= MAX_AHEAD or sum(len(data) for _, data in ahead) + len(frame.data) > MAX_AHEAD_BYTES
    ):
        return ahead
    at = bisect_left(ahead, (frame.offset,))
    return (*ahead[:at], (frame.offset, frame.data), *ahead[at:])
