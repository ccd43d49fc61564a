"""Vectors of transfers: frames of a payload, windows, and payloads reassembled from frames."""

import random
from typing import Any

from aggregator.intake.upload import Upload
from edge_client.core.uploads import QUERY_BYTES, WINDOW_FRAMES, cut_window
from protocol.errors import TransferError
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Frame
from protocol.wire.signing import public_key, sign_frame
from protocol.wire.transfer import Ranges, chunk_bytes, frames_of

KEY = bytes(range(1, 33))
PAYLOAD = bytes((7 * at + at // 256) % 256 for at in range(1000))
DIGEST = digest_of(PAYLOAD)
FLEET, DEVICE = "shed", "phone-1"

_Pieces = list[tuple[int, int]]


def vectors() -> dict[str, Any]:
    """Return frames of a payload, windows of its ranges, and reassemblies of frames in many orders."""
    return {
        "about": "`payload` is the payload of all parts. `frames`: a payload, or its ranges, in frames of at most "
        "chunk_bytes, some of them signed. `windows`: the ranges of the frames that are sent at once, and what "
        "remains. `reassemblies`: after each frame, whose data are hex or a range of the payload, the ranges that "
        "are missing, or the refusal that ends the transfer.",
        "payload": PAYLOAD.hex(),
        "digest": DIGEST.hex(),
        "fleet": FLEET,
        "device": DEVICE,
        "private_key": KEY.hex(),
        "public_key": public_key(KEY).hex(),
        "query_bytes": QUERY_BYTES,
        "chunk_bytes": [
            {"max_packet_bytes": each, "chunk_bytes": chunk_bytes(each)}
            for each in (None, 1, 600, 641, 20_000, 61_824, 65_535, 2**28)
        ],
        "frames": [
            _frames("all bytes, signed", PAYLOAD, chunk=256, is_signed=True),
            _frames("in one frame", PAYLOAD, chunk=61_440),
            _frames("a query", PAYLOAD, ranges=((1000 - QUERY_BYTES, 1000),), chunk=256, is_signed=True),
            _frames(
                "two ranges, one of them beyond the end", PAYLOAD, ranges=((10, 20), (990, 2000)), chunk=8
            ),
            _frames("an empty payload", b"", chunk=256),
        ],
        "windows": [
            _window(((0, 1000),), 100),
            _window(((0, 1000),), 300),
            _window(((0, 10), (20, 450), (600, 1000)), 100),
            _window(((0, 5), (7, 9), (30, 31)), 256),
        ],
        "reassemblies": _reassemblies(),
    }


def _frames(
    name: str, payload: bytes, *, chunk: int, ranges: Ranges | None = None, is_signed: bool = False
) -> dict[str, Any]:
    frames = list(frames_of(payload, digest=digest_of(payload), ranges=ranges, chunk_bytes=chunk))
    if is_signed:
        frames = [sign_frame(each, key=KEY, fleet=FLEET, device=DEVICE) for each in frames]
    return {
        "name": name,
        "size_bytes": len(payload),
        "ranges": ranges,
        "chunk_bytes": chunk,
        "frames": [encode(each).hex() for each in frames],
    }


def _window(ranges: Ranges, chunk: int) -> dict[str, Any]:
    window, rest = cut_window(ranges, chunk_bytes=chunk, frames=WINDOW_FRAMES)
    return {"ranges": ranges, "chunk_bytes": chunk, "frames": WINDOW_FRAMES, "window": window, "rest": rest}


def _reassemblies() -> list[dict[str, Any]]:
    in_order = [(at, min(at + 256, 1000)) for at in range(0, 1000, 256)]
    shuffled = [(at, min(at + 90, 1000)) for at in range(0, 1000, 90)]
    random.Random(5).shuffle(shuffled)
    query = (1000 - QUERY_BYTES, 1000)
    return [
        _reassembly("in order", _cut(in_order)),
        _reassembly("the last bytes first", _cut([query, *in_order])),
        _reassembly("any order", _cut(shuffled)),
        _reassembly("duplicates", _cut([each for piece in shuffled for each in (piece, piece)])),
        _reassembly(
            "overlapping frames of many sizes", _cut([(0, 300), (200, 500), (900, 1000), (100, 950)])
        ),
        _reassembly("a frame within what has arrived", _cut([(0, 600), (100, 200), (600, 1000)])),
        _reassembly(
            "the first bytes of an offset count", [*_cut([(0, 500)]), (400, bytes(200)), *_cut([(500, 1000)])]
        ),
        _reassembly(
            "wrong bytes: the sha256 of the whole is another", [*_cut([(0, 500)]), (500, bytes(500))]
        ),
        _reassembly("no bytes", [*_cut([(0, 500)]), (500, b"")]),
        _reassembly("bytes beyond the end", [*_cut([(0, 500)]), (990, bytes(11))]),
        _reassembly("another size", [*_cut([(0, 500)]), (500, PAYLOAD[500:])], size_bytes=[1000, 999]),
        _reassembly("one frame", _cut([(0, 1000)])),
        {**_reassembly("an empty payload", [(0, b"")], payload=b"")},
    ]


def _cut(ranges: _Pieces) -> list[tuple[int, bytes]]:
    return [(start, PAYLOAD[start:stop]) for start, stop in ranges]


def _reassembly(
    name: str,
    pieces: list[tuple[int, bytes]],
    *,
    size_bytes: list[int] | None = None,
    payload: bytes = PAYLOAD,
) -> dict[str, Any]:
    digest, sizes = digest_of(payload), size_bytes or [len(payload)] * len(pieces)
    upload, steps = Upload(digest, sizes[0]), []
    for (offset, data), size in zip(pieces, sizes, strict=True):
        step = {"offset": offset, "data": data.hex(), "size_bytes": size}
        if data == payload[offset : offset + len(data)] and data:  # short in the file
            step["data"] = [offset, offset + len(data)]
        try:
            upload.add(Frame(v=1, digest=digest, size_bytes=size, offset=offset, data=data))
            is_whole = upload.is_whole and bool(upload.payload() or not size)
            steps.append({**step, "missing": upload.missing(), "is_whole": is_whole})
        except TransferError:
            steps.append({**step, "refused": "digest"})
            break
    return {"name": name, "digest": digest.hex(), "frames": steps}
