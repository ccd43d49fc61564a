"""Payloads split into frames. No I/O and no clock."""

from collections.abc import Iterator

from protocol.wire.messages import MAX_CHUNK_BYTES, PROTOCOL_VERSION, Frame

Ranges = tuple[tuple[int, int], ...]
"""Disjoint byte ranges [start, stop) in ascending order."""

ENVELOPE_BYTES = 384
"""Upper bound for a frame's envelope, topic and MQTT header together."""

SMALLEST_CHUNK_BYTES = 256


def chunk_bytes(max_packet_bytes: int | None) -> int:
    """Return the payload bytes per frame for a broker's packet limit; None if it does not announce one."""
    if max_packet_bytes is None:
        return MAX_CHUNK_BYTES
    return max(SMALLEST_CHUNK_BYTES, min(MAX_CHUNK_BYTES, max_packet_bytes - ENVELOPE_BYTES))


def frames_of(
    payload: bytes, *, digest: bytes, ranges: Ranges | None = None, chunk_bytes: int = MAX_CHUNK_BYTES
) -> Iterator[Frame]:
    """Split a payload, or some byte ranges of it, into frames of at most `chunk_bytes`.

    Ranges are clipped to the payload. An empty payload is one empty frame.
    """
    size = len(payload)
    view = memoryview(payload)
    for start, stop in ranges if ranges is not None else ((0, max(size, 1)),):
        for offset in range(start, min(stop, max(size, 1)), chunk_bytes):
            piece = bytes(view[offset : min(offset + chunk_bytes, stop)])
            yield Frame(v=PROTOCOL_VERSION, digest=digest, size_bytes=size, offset=offset, data=piece)
