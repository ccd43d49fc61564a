"""A digest of what an image file shows: ratings, places and names that programs write into it do not change it.

Such a change would otherwise be another image with the same feature, and the difference of two submissions could be
the feature of a single one.
"""

import contextlib
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

KEY_BYTES = 16
"""Bytes of the digest: it distinguishes the images of one device."""

_ORIENTATION = 0x0112

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_START_OF_SCAN = 0xDA
_NOT_DECODED = {*range(0xE1, 0xEE), 0xEF, 0xFE}
"""Segments of a JPEG file that do not change its pixels: comments, and all application data but JFIF's and Adobe's."""

_TEXTS = {b"tEXt", b"zTXt", b"iTXt", b"tIME"}
"""Chunks of a PNG file that do not, unless they have an orientation."""


def content_key(path: Path) -> bytes | None:
    """Return a digest of an image file, 16 bytes, without the metadata of a JPEG or PNG; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            file.seek(0)
            if not start.startswith((_JPEG, _PNG)):
                return hashlib.file_digest(file, "sha256").digest()[:KEY_BYTES]
            data = file.read()
    except OSError:
        return None
    sha256 = hashlib.sha256()
    for part in _jpeg_parts(data) if start.startswith(_JPEG) else _png_parts(data):
        sha256.update(part)
    return sha256.digest()[:KEY_BYTES]


def _jpeg_parts(data: bytes) -> Iterator[bytes | memoryview]:
    """Yield the orientation, if there is one, and what is decoded; from a broken segment on, all that is left."""
    view, at = memoryview(data), 2
    with contextlib.suppress(Exception):  # Pillow raises errors of many classes on broken files
        if orientation := Image.open(io.BytesIO(data), formats=["JPEG"]).getexif().get(_ORIENTATION):
            yield str(orientation).encode()
    yield view[:at]
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _START_OF_SCAN:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] not in _NOT_DECODED:
            yield view[at:end]
        at = end
    yield view[at:]


def _png_parts(data: bytes) -> Iterator[memoryview]:
    """Yield the chunks that are decoded."""
    view, at = memoryview(data), len(_PNG)
    yield view[:at]
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        chunk = data[at:end]
        if chunk[4:8] not in _TEXTS or b"rientation" in chunk or b"Raw profile" in chunk:
            yield view[at:end]
        at = end
