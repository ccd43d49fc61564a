"""Decoding of images: upright, with 8 bits a channel, and within limits of size and memory."""

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageOps, PngImagePlugin, PpmImagePlugin, TiffImagePlugin, UnidentifiedImageError

from edge_client.images.decoding_memory import decoding_bytes, reserve
from edge_client.images.file_kind import HEAD_BYTES, IMAGE_FORMATS, kind_of, open_file, unidentified
from protocol.errors import UnreadableImage
from protocol.models.preprocessing import gray_of_16_bits, require_white_level, to_rgb
from protocol.threads import available_cores

MAX_FILE_BYTES = 2**29
"""Of an image: about the largest that is decoded, without compression and with 16 bits a channel. Pillow reads some
parts of a file into memory as a whole."""

MAX_ROWS = 2**20
"""Of an image: Pillow takes about 20 bytes for each, 1.8 GB for one pixel in each of 89 million rows."""

DIGEST_EDGE = 256


def decoding_threads() -> int:
    """Return how many threads decode images: one for each core, at most 4."""
    return min(4, available_cores())


def decode(path: Path) -> Image.Image:
    """Return one image in 8 bits a channel, loaded and upright by its EXIF orientation; the first frame of several.

    Values are scaled by the bits or the greatest value that the file declares.

    Raises:
        UnreadableImage: it is not an image, truncated, corrupt, or too large, or its white level is unknown; the
            message names the file.
    """
    with contextlib.ExitStack() as reserved:
        return _loaded(path, reserved)


@contextlib.contextmanager
def decoded(source: Path | bytes) -> Iterator[Image.Image]:
    """Give an image as `decode` does, of a file or its bytes; memory to convert it to RGB stays reserved until the end.

    Raises:
        UnreadableImage: as for `decode`. Its cause is a MemoryError if there is too little memory.
    """
    with contextlib.ExitStack() as reserved:
        image = _loaded(source, reserved)
        reserved.callback(image.close)  # the caller has a reference
        yield image


def pixel_digest(image: Image.Image) -> bytes:
    """Return a digest of an upright image, 16 bytes: of its size, and of at most 256 x 256 of its pixels in RGB.

    Names, places and ratings that programs write into a file do not change it: such a file would otherwise be another
    image with the same feature, and the difference of two submissions could be the feature of a single one.
    """
    size = min(image.width, DIGEST_EDGE), min(image.height, DIGEST_EDGE)
    pixels = to_rgb(image.resize(size, Image.Resampling.NEAREST)).tobytes()
    return hashlib.sha256(f"{image.width} x {image.height}".encode() + pixels).digest()[:16]


def has_other_pixels(path: Path) -> bool:
    """Return whether version 2 of the preprocessing may change an image's pixels, by its header."""
    try:
        with open_file(path) as file:
            if kind_of(file.read(HEAD_BYTES)) == "JPEG":  # always of 8 bits and opaque, and slow to parse
                return False
        with _open(path) as (image, _):
            return image.mode.startswith("I") or image.has_transparency_data or _declared_bits(image) == 16
    except Exception:  # it is decoded again, for the reason
        return True


def _loaded(source: Path | bytes, reserved: contextlib.ExitStack) -> Image.Image:
    with _naming(source), _open(source) as (image, file_bytes):
        _check_kind(image)
        reserved.enter_context(reserve(decoding_bytes(image, file_bytes)))
        bits, is_negative = _declared_bits(image), _is_negative(image)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return _in_8_bits(image, bits, is_negative=is_negative)


def _declared_bits(image: Image.Image) -> int:
    """Return the bits of a channel's values by the header of an opened image; 8 where Pillow scales them to 8 or 16."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return int(max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))))
    if isinstance(image, PngImagePlugin.PngImageFile | PpmImagePlugin.PpmImageFile) and image.tile:
        # "I;16B", or of a PPM a mode and its greatest value: "('RGB', 65535)"
        decoder = str(image.tile[0][3])
        return 16 if decoder.endswith((";16B", ", 65535)")) else 8
    return 8


def _is_negative(image: Image.Image) -> bool:
    """Return whether an opened image has gray of 16 bits in which 0 is white, which Pillow does not invert."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile) or not image.mode.startswith("I;16"):
        return False
    return bool(image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0)


def _in_8_bits(image: Image.Image, bits: int, *, is_negative: bool) -> Image.Image:
    """Return a decoded image with 8 bits a channel.

    Raises:
        UnreadableImage: its white level is not in the file, as `require_white_level` finds it.
    """
    if image.mode.startswith("I"):
        image = gray_of_16_bits(image, bits=12 if bits == 12 else 16)
    if bits == 16:
        require_white_level(image)
        if isinstance(color := image.info.get("transparency"), tuple):  # which Pillow leaves at 16 bits
            image.info["transparency"] = tuple(level >> 8 for level in color)
    return ImageOps.invert(image) if is_negative else image


@contextlib.contextmanager
def _naming(source: Path | bytes) -> Iterator[None]:
    """Raise every error of an image as UnreadableImage, which begins with its path."""
    name = f"{source}: " if isinstance(source, Path) else ""
    try:
        yield
    except OSError as error:
        raise UnreadableImage(f"{name}{error.strerror or error}") from error
    except Exception as error:  # decoders raise errors of many classes on broken files
        raise UnreadableImage(f"{name}{error or type(error).__name__}") from error


@contextlib.contextmanager
def _open(source: Path | bytes) -> Iterator[tuple[Image.Image, int]]:
    """Give an opened image, which is not decoded, and the size of its file, bytes."""
    with open_file(source) if isinstance(source, Path) else io.BytesIO(source) as file:
        size = os.fstat(file.fileno()).st_size if isinstance(source, Path) else len(source)
        if not size:
            raise UnreadableImage("the file is empty")
        if size > MAX_FILE_BYTES:
            raise UnreadableImage(f"expected a file of at most {MAX_FILE_BYTES} bytes, got one of {size}")
        try:
            opened = Image.open(file, formats=IMAGE_FORMATS)
        except UnidentifiedImageError as error:
            file.seek(0)
            raise UnreadableImage(unidentified(file.read(HEAD_BYTES))) from error
        with opened as image:
            yield image, size


def _check_kind(image: Image.Image) -> None:
    pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS or 0
    if pixels > most > 0:
        raise UnreadableImage(
            f"{image.width} x {image.height} pixels are more than the {most} that are decoded"
        )
    if image.height > MAX_ROWS:
        raise UnreadableImage(f"{image.height} rows are more than the {MAX_ROWS} that are decoded")
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        text = "the white level of signed and 32-bit pixels is undefined: save it with 8 bits a channel"
        raise UnreadableImage(text)
