"""A digest of what an image file shows: ratings, places and names that programs write into it do not change it.

Such a change would otherwise be another image with the same feature, and the difference of two submissions could be
the feature of a single one.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from edge_client.data.images import MAX_FILE_BYTES

KEY_BYTES = 16
"""Bytes of the digest: it distinguishes the images of one device."""

HEADER_BYTES = 2**20
"""Bytes read at once, and of a JPEG file those in which metadata is recognized."""

_ORIENTATION = 0x0112

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_APPLICATION_0, _START_OF_SCAN = 0xE0, 0xDA
_NOT_DECODED = {*range(0xE1, 0xEE), 0xEF, 0xFE}
"""Segments of a JPEG file that do not change its pixels: comments, and all application data but JFIF's and Adobe's."""

_METADATA = {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}
"""Chunks of a PNG file that can have an orientation."""

_PNG_HEADER_BYTES = 33

_DECODED = {b"tRNS", b"acTL", b"fcTL", b"fdAT"}
"""Chunks that change its pixels, beside the critical ones."""


def content_key(path: Path) -> bytes | None:
    """Return a digest of an image file, 16 bytes, without the metadata of a JPEG or PNG; None if it cannot be read.

    At most HEADER_BYTES of it are in memory; of a file that is too large to be decoded nothing is read.
    """
    sha256 = hashlib.sha256()
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
                return None
            start = file.read(8)
            file.seek(0)
            parts = (
                _jpeg_parts if start.startswith(_JPEG) else _png_parts if start.startswith(_PNG) else _rest
            )
            for part in parts(file):
                sha256.update(part)
    except OSError:
        return None
    return sha256.digest()[:KEY_BYTES]


def _jpeg_parts(file: BinaryIO) -> Iterator[bytes | memoryview]:
    """Yield the orientation, if there is one, and what is decoded; from a broken segment on, all that is left.

    A segment that ends beyond HEADER_BYTES counts as a broken one.
    """
    data, at = file.read(HEADER_BYTES), 2
    view = memoryview(data)
    yield _orientation(data) + view[:at]
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _START_OF_SCAN:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if end > len(data):
            break
        if data[at + 1] == _APPLICATION_0:  # JFIF: without its resolution
            yield view[at + 4 : min(at + 9, end)]
        elif data[at + 1] not in _NOT_DECODED:
            yield view[at:end]
        at = end
    yield view[at:]
    yield from _rest(file)


def _png_parts(file: BinaryIO) -> Iterator[bytes]:
    """Yield the chunks that are decoded, and the orientation; metadata beyond HEADER_BYTES is among them."""
    yield file.read(len(_PNG))
    metadata, kind = bytearray(), b""
    while kind != b"IEND" and (start := file.read(8)):
        chunk_bytes, kind = int.from_bytes(start[:4], "big") + 4, start[4:]
        if kind in _METADATA and len(metadata) + chunk_bytes <= HEADER_BYTES:
            metadata += start + file.read(chunk_bytes)
        elif kind[:1].isupper() or kind in _DECODED | _METADATA:
            yield start
            yield from _rest(file, chunk_bytes)
        else:
            file.seek(chunk_bytes, os.SEEK_CUR)
    pixel = io.BytesIO()
    Image.new("L", (1, 1)).save(pixel, "png")
    header, rest = pixel.getvalue()[:_PNG_HEADER_BYTES], pixel.getvalue()[_PNG_HEADER_BYTES:]
    yield _orientation(header + metadata + rest)


def _orientation(data: bytes) -> bytes:
    """Return how an image file is turned, in its first bytes; nothing if it is not."""
    with contextlib.suppress(Exception):  # Pillow raises errors of many classes on broken files
        orientation = Image.open(io.BytesIO(data), formats=["JPEG", "PNG"]).getexif().get(_ORIENTATION)
        return str(orientation).encode() if orientation in range(2, 9) else b""
    return b""


def _rest(file: BinaryIO, most: int = MAX_FILE_BYTES) -> Iterator[bytes]:
    """Yield what is left of a file, or the next `most` bytes."""
    while most and (part := file.read(min(most, HEADER_BYTES))):
        yield part
        most -= len(part)
