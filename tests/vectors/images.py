"""Vectors of preprocessing: small image files with the pixels that a backbone gets of them."""

import base64
import struct
import zlib
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge_client.images.decoding import decoded
from protocol.errors import UnreadableImage
from protocol.models.preprocessing import Preprocessing, preprocess, to_rgb

# A photograph of 20 x 12 pixels, by Pillow 13 with quality 90 and 4:4:4: other versions may write other bytes.
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMU"
    "FRUVDA8XGBYUGBIUFRT/2wBDAQMEBAUEBQkFBQkUDQsNFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQU"
    "FBQUFBQUFBT/wAARCAAMABQDAREAAhEBAxEB/8QAGAAAAgMAAAAAAAAAAAAAAAAAAgcDBgj/xAArEAABAwMDAgMJAAAAAAAAAAAB"
    "AgMEBQYRABIhBzEIEzIUFiIjQUJRgZH/xAAYAQEAAwEAAAAAAAAAAAAAAAAIAwQGCf/EACsRAAECBQMCBAcAAAAAAAAAAAECAwAE"
    "BRExBhIhE1EUFSNBIjJSYZHB8P/aAAwDAQACEQMRAD8Astx9RLvnyIfulKZageypDqFJjHLu5WT80Z9O3txo20emNtoPVSSu/GcW"
    "HbjvCBotAoNAkVecJsoE2PqfLYfRxm/3iS9XqDULepaa/U4EKpvRUB8yX2mgt4IT5mOQD8R+3jkaSWimqgk7mGlKCc2BNr4vaBtr"
    "XVE15nMs0pKlshattgo/Bc7c84789+YWsfw8xLjZFQpzzM2G8TsfjOBxCsEg4UMg4II/Wk9LamclWwy8ClQyDwfwYwTFcmSj10kK"
    "9wRYws63cVQo+UxZCkAdudDfTcq0/YrTHSbWit0uoEQNBqC70mRWa0gTm2idgUpaducZ9Kh+B/NIukFVMbV4Q7d1r8A3tjIPcwDa"
    "u30ZtSmzYnOP2I2n0thxresmDT6fHRHhs7ihrcpeNyio8qJPdRPf66ozi1zL6nnjdRyePbj2iRilSz6eq4CVHP8AWj//2Q=="
)
GRAY_JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMU"
    "FRUVDA8XGBYUGBIUFRT/wAALCAAMABQBAREA/8QAFgABAQEAAAAAAAAAAAAAAAAABwgD/8QAKBAAAQMEAQMCBwAAAAAAAAAAAQIE"
    "BQMGERIABxMhMTIIFBciQVGR/9oACAEBAAA/AMurPX3qtf1xx/0ykG9OGUwQlxQWhgcue5U2OXA29nb9Djx+88YntnWbI9O7ZqX3"
    "NwsNcjqNo/Ol+7btxUdCkjv6+Qg4Wo508DIx4I4VOPg4h7pUJSCdtJSLr5NJ2xrJq0amFFJ1WkkHBBBwfUEciaJuWTgHwDN3UphJ"
    "8ZPHq0JVXUlMc3uWgiWpNduympUqI02129ix66p/nLV6XSAs2yI+Ghm9JlGtt+1QBWvXZZWr7lqJOVKUfJ/PP//Z"
)

_GRAY, _RGB, _PALETTE, _GRAY_ALPHA, _RGBA = 0, 2, 3, 4, 6
_SQUARE = Preprocessing(height=10, width=10, crop_pct=0.875)
_WHOLE = Preprocessing(height=12, width=12)


def vectors() -> dict[str, Any]:
    """Return files with their pixels, upright in RGB, and after resizing and cropping."""
    rgb = {name: pixels(data, _SQUARE)[0] for name, (data, _) in FILES.items()}
    return {
        "about": "`files` (base64) are decoded, turned upright and put on white: `rgb`, uint8 (height, width, 3). "
        "Resized and cropped as `preprocessing` says, they are `pixels`, uint8 (H, W, 3). Decoders of JPEG differ by a "
        "few levels: compare your `rgb` of a file within its `tolerance`, and the `pixels` that you make of the "
        "vector's `rgb` exactly. `refused` files are not used.",
        "files": [
            {
                "name": name,
                "file": base64.b64encode(data).decode(),
                "tolerance": tolerance,
                "height": rgb[name].shape[0],
                "width": rgb[name].shape[1],
                "rgb": base64.b64encode(rgb[name].tobytes()).decode(),
            }
            for name, (data, tolerance) in FILES.items()
        ],
        "cases": [_case(name, spec) for name in FILES for spec in SPECS.get(name, (_SQUARE,))],
        "refused": _refused(),
    }


def _noise(height: int, width: int, channels: int, *, seed: int, most: int = 256) -> NDArray[Any]:
    """Return blocks of noise, (height, width, channels): neither flat nor only fine detail."""
    # Not NumPy's generator, whose streams may change.
    values = [
        (1103515245 * (at + 977 * seed + 1) ** 2 + 12345) >> 7 for at in range(height * width * channels)
    ]
    fine = np.array(values, np.int64).reshape(height, width, channels) % most
    ramp = np.linspace(0, most - 1, height)[:, None, None] + np.linspace(0, most - 1, width)[None, :, None]
    return (fine // 2 + ramp.astype(np.int64) // 4).astype(np.uint8 if most <= 256 else np.uint16)


def _png(values: NDArray[Any], color: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG file of pixels (H, W, channels), not compressed, so that no version of zlib changes its bytes."""
    height, width, _ = values.shape
    bits = 8 * values.dtype.itemsize
    rows = b"".join(b"\0" + row.astype(values.dtype.newbyteorder(">")).tobytes() for row in values)
    stored = b"".join(
        struct.pack("<BHH", at + 65535 >= len(rows), len(part := rows[at : at + 65535]), len(part) ^ 65535)
        + part
        for at in range(0, len(rows), 65535)
    )
    data = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(rows))
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    every = ((b"IHDR", header), *chunks, (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in every
    )


def _exif(orientation: int) -> bytes:
    return b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + struct.pack(">HH", orientation, 0) + bytes(4)


def _turned(jpeg: bytes, orientation: int) -> bytes:
    segment = b"Exif\0\0" + _exif(orientation)
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + jpeg[2:]


def _files() -> dict[str, tuple[bytes, int]]:
    """Return files of many kinds, and by how many levels decoders may differ."""
    rgb = _noise(9, 14, 3, seed=1)
    alpha = np.concatenate([rgb, _noise(9, 14, 1, seed=2)], axis=2)
    alpha[0, :5, 3], alpha[0, 5:10, 3] = 0, 255
    gray, deep = _noise(9, 14, 1, seed=3), _noise(9, 14, 1, seed=4, most=65536)
    indices = _noise(9, 14, 1, seed=5, most=4)
    palette = (b"PLTE", bytes([255, 0, 0, 0, 128, 0, 10, 20, 250, 7, 7, 7]))
    color, level = struct.pack(">HHH", *map(int, rgb[3, 4])), struct.pack(">H", int(gray[5, 5, 0]))
    exact = {
        "wide": _png(rgb, _RGB),
        "large": _png(_noise(22, 31, 3, seed=9), _RGB),
        "tall": _png(_noise(31, 5, 3, seed=8), _RGB),
        "very tall": _png(_noise(300, 2, 3, seed=10), _RGB),
        "the size of the crop": _png(_noise(12, 12, 3, seed=11), _RGB),
        "one pixel": _png(rgb[:1, :1], _RGB),
        "gray": _png(gray, _GRAY),
        "gray of 16 bits": _png(deep, _GRAY),
        "RGB of 16 bits": _png(_noise(9, 14, 3, seed=6, most=65536), _RGB),
        "RGB and alpha": _png(alpha, _RGBA),
        "gray and alpha": _png(alpha[..., 2:], _GRAY_ALPHA),
        "a palette": _png(indices, _PALETTE, palette),
        "a palette with transparency": _png(indices, _PALETTE, palette, (b"tRNS", bytes([255, 0, 100]))),
        "a transparent color": _png(rgb, _RGB, (b"tRNS", color)),
        "a transparent level of gray": _png(gray, _GRAY, (b"tRNS", level)),
        "a gamma of 1, which does not count": _png(rgb, _RGB, (b"gAMA", struct.pack(">I", 100_000))),
        "EXIF in PNG, orientation 6": _png(rgb, _RGB, (b"eXIf", _exif(6))),
    }
    decoded_by_others = {"JPEG": JPEG, "JPEG, gray": GRAY_JPEG}
    decoded_by_others |= {
        f"JPEG, EXIF orientation {number}": _turned(JPEG, number) for number in range(1, 10)
    }
    return {name: (data, 0) for name, data in exact.items()} | {
        name: (data, 4) for name, data in decoded_by_others.items()
    }


FILES = _files()


def _specs() -> dict[str, tuple[Preprocessing, ...]]:
    change = msgspec.structs.replace
    border = change(_SQUARE, crop_mode="border", fill=(124, 116, 104))
    many = (
        _SQUARE,
        *(
            change(_SQUARE, interpolation=each)
            for each in ("nearest", "bilinear", "box", "hamming", "lanczos")
        ),
        change(_SQUARE, crop_mode="squash"),
        border,
        Preprocessing(height=11, width=8, crop_mode="border", fill=(1, 2, 3)),
        Preprocessing(height=8, width=13, crop_pct=0.9),
        Preprocessing(height=9, width=9, crop_pct=0.8),
        Preprocessing(height=19, width=19, crop_pct=0.95),
    )
    upright = dict.fromkeys((name for name in FILES if "EXIF" in name), (_WHOLE,))
    return {
        "wide": many,
        "large": many,
        "very tall": (_SQUARE, border),
        "the size of the crop": (_WHOLE,),
    } | upright


SPECS = _specs()
"""The preprocessing of a file, if it is not `_SQUARE`."""


def _refused() -> list[dict[str, Any]]:
    rgb = _noise(9, 14, 3, seed=1)
    clear = np.concatenate([rgb, np.zeros((9, 14, 1), np.uint8)], axis=2)
    whole = _png(rgb, _RGB)
    cases = [
        ("no bytes", b"", _SQUARE),
        ("no image", b"GET / HTTP/1.1\r\n\r\n", _SQUARE),
        ("cut in the middle", whole[: len(whole) // 2], _SQUARE),
        ("every pixel is transparent", _png(clear, _RGBA), _SQUARE),
        ("16 bits below a quarter of white", _png(_noise(9, 14, 1, seed=4, most=16384), _GRAY), _SQUARE),
        (
            "more than 2^24 pixels after resizing",
            _png(_noise(17, 1, 3, seed=1), _RGB),
            Preprocessing(height=1024, width=1024),
        ),
    ]
    return [
        {
            "name": name,
            "preprocessing": spec,
            "file": base64.b64encode(data).decode(),
            "refused": is_refused(data, spec),
        }
        for name, data, spec in cases
    ]


def is_refused(data: bytes, spec: Preprocessing) -> bool:
    """Return whether a file is not used."""
    try:
        pixels(data, spec)
    except UnreadableImage:
        return True
    return False


def pixels(data: bytes, spec: Preprocessing) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return a file's pixels in RGB, (height, width, 3), and what a backbone gets of them, (H, W, 3)."""
    with decoded(data) as image:
        return np.asarray(to_rgb(image)), preprocess(image, spec)


def _case(name: str, spec: Preprocessing) -> dict[str, Any]:
    rgb, made = pixels(FILES[name][0], spec)
    assert np.array_equal(preprocess(Image.fromarray(rgb), spec), made)
    return {"file": name, "preprocessing": spec, "pixels": base64.b64encode(made.tobytes()).decode()}
