"""Images of more than 8 bits a channel: scaled by what the file declares, or refused, never nearly black."""

import struct
import zlib
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_client.images.decoding import decoded
from protocol.errors import UnreadableImage
from protocol.models.preprocessing import to_rgb
from tests.support.devices.device_factory import png_of

Values: TypeAlias = NDArray[np.integer[Any]]

RAMP: Values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
"""Gray from black to white."""

COLORS: Values = np.stack([RAMP, RAMP.T, RAMP[::-1]], axis=-1)


def png(pixels: Values, *, transparent: int | None = None) -> bytes:
    """Return a PNG file of 16 bits a channel, (H, W) or (H, W, 3), in which one level is transparent."""
    height, width = pixels.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 16, 2 * (pixels.ndim - 2), 0, 0, 0)
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in pixels)
    key = (
        {}
        if transparent is None
        else {b"tRNS": struct.pack(">H", transparent) * (3 if pixels.ndim == 3 else 1)}
    )
    return png_of({b"IHDR": header, **key, b"IDAT": zlib.compress(lines)})


def tiff(data: bytes, *, bits: int, bands: int = 1, photometric: int = 1, signed: bool = False) -> bytes:
    """Return a TIFF file of 8 x 8 pixels; `photometric` is 0 if 0 is white, 1 if it is black, and 2 for RGB."""
    shorts = {256: 8, 257: 8, 259: 1, 262: photometric, 277: bands, 278: 8, 339: 2 if signed else 1}
    widths = struct.pack(f"<{bands}H", *[bits] * bands)
    end = 8 + 2 + 12 * (len(shorts) + 3) + 4
    entries = {tag: struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in shorts.items()}
    in_place = widths.ljust(4, b"\0") if len(widths) <= 4 else struct.pack("<I", end)
    entries[258] = struct.pack("<HHI", 258, 3, bands) + in_place
    entries[273] = struct.pack("<HHII", 273, 4, 1, end + len(widths))
    entries[279] = struct.pack("<HHII", 279, 4, 1, len(data))
    table = b"".join(entry for _, entry in sorted(entries.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4) + widths + data


def packed_12_bits(values: Values) -> bytes:
    """Return values of 12 bits, two of them in three bytes."""
    first, second = values.reshape(-1, 2).T
    return (
        np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=-1)
        .astype(np.uint8)
        .tobytes()
    )


def pgm(values: Values, most: int) -> bytes:
    return f"P{5 + (values.ndim - 2)} 8 8 {most}\n".encode() + values.astype(">u2").tobytes()


USABLE = {
    "PNG of 16 bits": (png(RAMP), RAMP),
    "PNG of 48 bits": (png(COLORS), COLORS),
    "TIFF of 16 bits": (tiff(RAMP.tobytes(), bits=16), RAMP),
    "TIFF of 48 bits": (tiff(COLORS.tobytes(), bits=16, bands=3, photometric=2), COLORS),
    "TIFF in which 0 is white": (tiff((65535 - RAMP).tobytes(), bits=16, photometric=0), RAMP),
    "TIFF that declares 12 bits": (tiff(packed_12_bits(RAMP >> 4), bits=12), RAMP),
    "dark TIFF that declares 12 bits": (tiff(packed_12_bits(RAMP >> 8), bits=12), RAMP >> 4),
    "PGM of 16 bits": (pgm(RAMP, 65535), RAMP),
    "PGM of 12 bits": (pgm(RAMP >> 4, 4095), RAMP),
    "dark PGM of 12 bits": (pgm(RAMP >> 8, 4095), RAMP >> 4),
    "PPM of 14 bits": (pgm(COLORS >> 2, 16383), COLORS),
}


@pytest.mark.parametrize(("data", "levels"), USABLE.values(), ids=USABLE)
def test_values_are_scaled_by_what_the_file_declares(data: bytes, levels: Values) -> None:
    """The result is that of the same image in 8 bits, but for rounding."""
    with decoded(data) as image:
        pixels = np.asarray(to_rgb(image)).astype(int)
    expected = levels if levels.ndim == 3 else np.repeat(levels[:, :, None], 3, axis=2)
    assert np.abs(pixels - (expected >> 8)).max() <= 1


NO_WHITE = "its 16-bit values stay below a quarter of the range"
UNUSABLE = {
    "12 bits in a PNG of 16": (png(RAMP >> 4), NO_WHITE),
    "14 bits in a PNG of 16": (png(RAMP >> 2), NO_WHITE),
    "14 bits in a PNG of 48": (png(COLORS >> 2), NO_WHITE),
    "12 bits in a TIFF of 16": (tiff((RAMP >> 4).tobytes(), bits=16), NO_WHITE),
    "12 bits in a TIFF of 48": (tiff((COLORS >> 4).tobytes(), bits=16, bands=3, photometric=2), NO_WHITE),
    "12 bits in a PGM of 16": (pgm(RAMP >> 4, 65535), NO_WHITE),
    "12 bits in a PPM of 48": (pgm(COLORS >> 4, 65535), NO_WHITE),
    "signed": (
        tiff((RAMP >> 1).tobytes(), bits=16, signed=True),
        "the white level of signed and 32-bit pixels",
    ),
    "32 bits": (tiff(RAMP.astype("<u4").tobytes(), bits=32), "the white level of signed and 32-bit pixels"),
    "five bands": (
        tiff(bytes(320), bits=8, bands=5, photometric=2),
        "it is a damaged TIFF, or of an unsupported",
    ),
    "14 bits in a TIFF": (tiff(bytes(112), bits=14), "it is a damaged TIFF, or of an unsupported"),
}


@pytest.mark.parametrize(("data", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_images_without_a_white_level_are_refused(data: bytes, reason: str) -> None:
    """12 and 14 bits in a file of 16 would be nearly black."""
    with pytest.raises(UnreadableImage, match=f"^{reason}.*8 bits a channel$"), decoded(data):
        pass


def test_a_transparent_level_of_gray_is_transparent() -> None:
    """It is compared with all 16 bits."""
    with decoded(png(RAMP, transparent=1040)) as image:
        pixels = np.asarray(to_rgb(image))[0, :, 0]
    assert RAMP[0, :3].tolist() == [0, 1040, 2080]
    assert pixels[:3].tolist() == [0, 255, 8]


def test_a_transparent_color_of_48_bits_is_transparent() -> None:
    """Pillow keeps its 16 bits a channel beside pixels of 8, where 40,000 would be 64."""
    levels: Values = np.full((8, 8, 3), 40_000, np.uint16)
    levels[0, :2] = [[64 << 8], [65_535]]
    with decoded(png(levels, transparent=40_000)) as image:
        pixels = np.asarray(to_rgb(image))[0, :, 0]
    assert pixels[:3].tolist() == [64, 255, 255]
