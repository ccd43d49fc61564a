"""The kind of a file by its first bytes: names of files are often wrong, above all on phones."""

import errno
import functools
import os
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Formats that are decoded. Some other ones of Pillow start programs (EPS), and no camera writes them."""

HEAD_BYTES = 64
"""Of a file, enough for `kind_of`."""

_SIGNATURES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"BM": "BMP",
    b"GIF8": "GIF",
    **{b"P%d" % number: "PPM" for number in range(1, 7)},
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL \r\n": "JPEG XL",
    b"\0\0\0\x0cjP  \r\n": "JPEG 2000",
    b"%PDF": "PDF",
}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}


def kind_of(head: bytes) -> str:
    """Return the format that a file's first bytes show, as people call it; empty if it is none that cameras write."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp":
        return "AVIF" if b"avif" in head[8:] else "HEIC" if head[8:12] in _HEIC_BRANDS else "MP4"
    return next((kind for start, kind in _SIGNATURES.items() if head.startswith(start)), "")


def unidentified(head: bytes) -> str:
    """Return why a file with these first bytes, which Pillow cannot open, is unusable, and the way out."""
    kind = kind_of(head)
    if kind in IMAGE_FORMATS:
        return f"it is a damaged {kind}, or of an unsupported kind: save it anew as RGB with 8 bits a channel"
    if kind:
        return f"its content is {kind}, which is not supported: convert it to JPEG"
    return f"it is none of {', '.join(IMAGE_FORMATS)}"


@functools.lru_cache(maxsize=2**16)
def is_image(path: str, _size_bytes: int, _mtime_ns: int, _inode: int) -> bool:
    """Return whether a file begins as an image does; its first bytes are read once for each state of the file.

    Raises:
        OSError: it cannot be read.
    """
    with open_file(Path(path)) as file:
        return kind_of(file.read(HEAD_BYTES)) in IMAGE_FORMATS


def open_file(path: Path) -> BinaryIO:
    """Open a regular file; a pipe that has replaced it since it was found would block forever.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - Path.open has no opener
    if not S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
