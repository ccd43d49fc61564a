"""A digest of what an image file shows: ratings, places and names that programs write into it do not change it.

Such a change would otherwise be another image with the same feature, and the difference of two submissions could be
the feature of a single one.
"""

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from edge_client.data.images import MAX_FILE_BYTES, open_file

KEY_BYTES = 16
"""Bytes of the digest: it distinguishes the images of one device."""

HEADER_BYTES = 2**20
"""Bytes read at once, and of a JPEG file those in which metadata is recognized."""

_ORIENTATION = 0x0112

_JPEG, _PNG, _RIFF = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF"
_APPLICATION_0, _START_OF_SCAN = 0xE0, 0xDA
_NOT_DECODED = {*range(0xE1, 0xEE), 0xEF, 0xFE}
"""Segments of a JPEG file that do not change its pixels: comments, and all application data but JFIF's and Adobe's."""

_SEGMENT = re.compile(rb"\xff(?:\xd9|[^\x00\xff\xd0-\xd7](..))", re.DOTALL)
"""The end of a JPEG image, or the start of a segment with its length; markers without a length are parts of a scan."""

_METADATA = {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}
"""Chunks of a PNG file that can have an orientation."""

_PNG_HEADER_BYTES = 33

_DECODED = {b"tRNS", b"acTL", b"fcTL", b"fdAT"}
"""Chunks that change its pixels, beside the critical ones."""

_WEBP_METADATA = {b"EXIF", b"XMP "}
_WEBP_DECODED, _WEBP_HAS_METADATA = 0x12, 0x0C
"""Flags of an extended WEBP file: it has transparent pixels or is animated; it has metadata."""

_WEBP_HEADER_BYTES = 10

# A WEBP file of one pixel, without its header.
_WEBP_PIXEL = b"VP8L\x0e\0\0\0/\0\0\0\0\x07\x10\x11\xfd\x0fDD\xff\x03"


def content_key(path: Path) -> bytes | None:
    """Return a digest of an image file, 16 bytes; None if it cannot be read.

    Metadata of a JPEG, PNG or WEBP file, and what follows the image in it, are not part of it. A few times
    HEADER_BYTES of it are in memory at most; of a file that is too large to be decoded nothing is read.
    """
    sha256 = hashlib.sha256()
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
                return None
            start = file.read(12)
            file.seek(0)
            for part in _decoded_parts(file, start):
                sha256.update(part)
    except OSError:
        return None
    return sha256.digest()[:KEY_BYTES]


def _decoded_parts(file: BinaryIO, start: bytes) -> Iterator[bytes | memoryview]:
    if start.startswith(_JPEG):
        return _jpeg_parts(file)
    if start.startswith(_PNG):
        return _png_parts(file)
    if start.startswith(_RIFF) and start.endswith(b"WEBP"):
        return _webp_parts(file)
    return _rest(file)


def _jpeg_parts(file: BinaryIO) -> Iterator[bytes | memoryview]:
    """Yield the orientation, if there is one, and what is decoded; from a broken segment on, all up to the image's end.

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
    yield from _up_to_end(chain([data[at:]], _rest(file)))


def _up_to_end(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the parts of a JPEG file up to the image's end: what follows it is not decoded."""
    data, at = b"", 0
    for part in parts:
        data += part
        while found := _SEGMENT.search(data, at):
            if found[1] is None:
                yield data[: found.end()]
                return
            at = found.end() - 2 + int.from_bytes(found[1], "big")
        at = max(at, len(data) - 3)  # where a segment may start whose length is in the next part
        yield data[:at]
        at, data = max(0, at - len(data)), data[at:]
    yield data


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


def _webp_parts(file: BinaryIO) -> Iterator[bytes]:
    """Yield the chunks that are decoded, and the orientation; metadata beyond HEADER_BYTES is among them."""
    left = int.from_bytes(file.read(12)[4:8], "little") - 4
    metadata, flags = bytearray(), 0
    while left > 0 and (start := file.read(8)):
        kind, chunk_bytes = start[:4], -(-int.from_bytes(start[4:], "little") // 2) * 2
        left -= 8 + chunk_bytes
        if kind == b"VP8X" and chunk_bytes == _WEBP_HEADER_BYTES:
            header = file.read(chunk_bytes)
            flags = int.from_bytes(header[:1], "big")
            yield bytes([flags & _WEBP_DECODED]) + header[1:] if flags & _WEBP_DECODED else b""
        elif kind in _WEBP_METADATA and len(metadata) + chunk_bytes <= HEADER_BYTES:
            metadata += start + file.read(chunk_bytes)
        elif kind == b"ICCP":
            file.seek(chunk_bytes, os.SEEK_CUR)
        else:
            yield start
            yield from _rest(file, chunk_bytes)
    header = b"VP8X" + _WEBP_HEADER_BYTES.to_bytes(4, "little") + bytes([flags & _WEBP_HAS_METADATA])
    chunks = b"WEBP" + header + bytes(_WEBP_HEADER_BYTES - 1) + _WEBP_PIXEL + metadata
    yield _orientation(_RIFF + len(chunks).to_bytes(4, "little") + chunks)


def _orientation(data: bytes) -> bytes:
    """Return how an image file is turned, in its first bytes; nothing if it is not."""
    with contextlib.suppress(Exception):  # Pillow raises errors of many classes on broken files
        orientation = (
            Image.open(io.BytesIO(data), formats=["JPEG", "PNG", "WEBP"]).getexif().get(_ORIENTATION)
        )
        return str(orientation).encode() if orientation in range(2, 9) else b""
    return b""


def _rest(file: BinaryIO, most: int = MAX_FILE_BYTES) -> Iterator[bytes]:
    """Yield what is left of a file, or the next `most` bytes."""
    while most and (part := file.read(min(most, HEADER_BYTES))):
        yield part
        most -= len(part)
