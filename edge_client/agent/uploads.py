"""One transfer up, pure: a question, the answer, and what is missing in windows until there is a receipt.

The last bytes of a transfer are a question, to which the aggregator answers with what it misses. They are few: a
question is asked far more often than anything is missing.
"""

from dataclasses import replace

from edge_client.agent.backoff import patience_s
from edge_client.agent.events import Send
from edge_client.agent.state import Upload
from protocol.wire.transfer import Ranges

WINDOW_FRAMES = 8
"""Frames with the session at once: so many it keeps inside paho, and others' messages wait behind no more."""

QUESTION_BYTES = 256


def ask(upload: Upload, *, chunk_bytes: int) -> tuple[Upload, Send]:
    """Ask what is missing."""
    asked = replace(upload, ranges=(), sent=False, attempts=upload.attempts + 1, due_s=None)
    return asked, Send(upload.item, (_question(upload, chunk_bytes),))


def afresh(upload: Upload) -> Upload:
    """Begin again with the question, at once: whatever was on its way may be gone."""
    return replace(upload, ranges=(), sent=False, attempts=0, due_s=0.0)


def wait(upload: Upload, *, now_s: float) -> Upload:
    """Ask again in a while, and send nothing before that."""
    return replace(upload, ranges=(), sent=False, due_s=now_s + patience_s(upload.attempts))


def take_missing(
    upload: Upload, missing: Ranges, *, chunk_bytes: int, now_s: float
) -> tuple[Upload, Send | None]:
    """Begin to send what is missing; what is being sent is sent to its end first, for a question comes after it."""
    size = upload.item.size_bytes
    missing = tuple((start, min(stop, size)) for start, stop in missing if start < min(stop, size))
    if upload.ranges or not missing:
        return upload, None
    if upload.sent and missing == upload.missing:
        return wait(upload, now_s=now_s), None  # what was sent gets lost somewhere, all of it
    question = _question(upload, chunk_bytes)
    asks = missing[-1][1] == size
    attempts = upload.attempts if missing == upload.missing else 0
    ranges = missing if asks else (*missing, question)
    return send_window(
        replace(upload, missing=missing, ranges=ranges, attempts=attempts), chunk_bytes=chunk_bytes
    )


def send_window(upload: Upload, *, chunk_bytes: int) -> tuple[Upload, Send]:
    """Send the next frames of what is to be sent."""
    window, rest = cut_window(upload.ranges, chunk_bytes=chunk_bytes, frames=WINDOW_FRAMES)
    return replace(upload, ranges=rest, sent=not rest, due_s=None), Send(upload.item, window)


def cut_window(ranges: Ranges, *, chunk_bytes: int, frames: int) -> tuple[Ranges, Ranges]:
    """Cut the first so many frames off byte ranges.

    Returns:
        One range of at most `chunk_bytes` for each frame, and what is left; together they are `ranges`.
    """
    window: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(ranges):
        for offset in range(start, stop, chunk_bytes):
            if len(window) == frames:
                return tuple(window), ((offset, stop), *ranges[number + 1 :])
            window.append((offset, min(offset + chunk_bytes, stop)))
    return tuple(window), ()


def _question(upload: Upload, chunk_bytes: int) -> tuple[int, int]:
    """The last bytes; all of them if they are one frame."""
    size = upload.item.size_bytes
    return (0, size) if size <= chunk_bytes else (size - QUESTION_BYTES, size)
