"""One upload: a query, the ranges that the aggregator is missing in windows, and another query until the receipt.

A query is the last bytes of the item, to which the aggregator answers with the missing ranges. It is short, because
queries are far more frequent than missing ranges.
"""

from dataclasses import replace

from edge_client.agent.events import SendFrames
from edge_client.agent.retry_delay import retry_delay_s
from edge_client.agent.state import Upload
from protocol.wire.transfer import Ranges

WINDOW_FRAMES = 8
"""Frames in the MQTT session at once: paho keeps as many in flight, so that other messages do not queue behind them."""

QUERY_BYTES = 256


def query(upload: Upload, *, chunk_bytes: int) -> tuple[Upload, SendFrames]:
    """Ask the aggregator for the missing ranges."""
    asked = replace(upload, ranges=(), sent=False, attempts=upload.attempts + 1, due_s=None)
    return asked, SendFrames(upload.item, (_query_range(upload, chunk_bytes),))


def restart(upload: Upload) -> Upload:
    """Begin with a query, at once: frames in flight may be lost."""
    return replace(upload, ranges=(), sent=False, attempts=0, due_s=0.0)


def back_off(upload: Upload, *, now_s: float) -> Upload:
    """Send nothing until the next query is due."""
    return replace(upload, ranges=(), sent=False, due_s=now_s + retry_delay_s(upload.attempts))


def send_missing(
    upload: Upload, missing: Ranges, *, chunk_bytes: int, now_s: float
) -> tuple[Upload, SendFrames | None]:
    """Begin to send the missing ranges, unless earlier ones are still being sent: a query follows those."""
    size = upload.item.size_bytes
    missing = tuple((start, min(stop, size)) for start, stop in missing if start < min(stop, size))
    if upload.ranges or not missing:
        return upload, None
    if upload.sent and missing == upload.missing:
        return back_off(upload, now_s=now_s), None  # everything that was sent is being lost
    ends_with_query = missing[-1][1] == size
    attempts = upload.attempts if missing == upload.missing else 0
    ranges = missing if ends_with_query else (*missing, _query_range(upload, chunk_bytes))
    return send_window(
        replace(upload, missing=missing, ranges=ranges, attempts=attempts), chunk_bytes=chunk_bytes
    )


def send_window(upload: Upload, *, chunk_bytes: int) -> tuple[Upload, SendFrames]:
    """Send the next window of frames."""
    window, rest = cut_window(upload.ranges, chunk_bytes=chunk_bytes, frames=WINDOW_FRAMES)
    return replace(upload, ranges=rest, sent=not rest, due_s=None), SendFrames(upload.item, window)


def cut_window(ranges: Ranges, *, chunk_bytes: int, frames: int) -> tuple[Ranges, Ranges]:
    """Split byte ranges into the first `frames` frames and the rest.

    Returns:
        One range of at most `chunk_bytes` per frame, and the remaining ranges; together they are `ranges`.
    """
    window: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(ranges):
        for offset in range(start, stop, chunk_bytes):
            if len(window) == frames:
                return tuple(window), ((offset, stop), *ranges[number + 1 :])
            window.append((offset, min(offset + chunk_bytes, stop)))
    return tuple(window), ()


def _query_range(upload: Upload, chunk_bytes: int) -> tuple[int, int]:
    """Return the last bytes; all bytes if they fit one frame."""
    size = upload.item.size_bytes
    return (0, size) if size <= chunk_bytes else (size - QUERY_BYTES, size)
