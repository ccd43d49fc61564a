"""Preprocess images for a backbone, identically in the exporter and on devices.

The rules, including their rounding, are those of timm's evaluation transform (``transforms_imagenet_eval``) on
Pillow images, without the normalization, which is a part of the backbone's graph. Three rules differ: an image is what
a viewer shows on a white page, where timm reads the hidden pixels under transparency, 16 bits are scaled to 8, where
Pillow clips them, and the width is resized before the height, where Pillow from version 13 on begins with the height of
tall images. `docs/protocol.md` states all rules, for other implementations.
"""

import math
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from PIL import Image

from protocol.errors import UnreadableImage

CropMode = Literal["center", "squash", "border"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]

MAX_RESIZED_PIXELS = 2**24
"""Limit after resizing (64 MiB), which an image of 1 x 100,000 pixels would exceed."""

VERSION = 2
"""Of the pixels that images become. It is raised with a change for some images, whose stored features are then computed
again: version 2 scales by the declared bits, refuses 16 bits without a white level, and puts transparency on white."""

WHITE_FROM = 64
"""In 8 bits. Cameras of 12 and 14 bits write 16 bits that never reach it."""

_Edge = Annotated[int, Meta(gt=0, le=4096)]
_Level = Annotated[int, Meta(ge=0, le=255)]


class Preprocessing(msgspec.Struct, frozen=True, kw_only=True):
    """Preprocessing of a backbone, named as in timm's data config."""

    height: _Edge
    """H, pixels."""
    width: _Edge
    """W, pixels."""
    crop_pct: Annotated[float, Meta(ge=0.1, le=1)] = 1.0
    """Fraction of the resized image inside the crop: its edge is ``floor(H / crop_pct)`` pixels."""
    crop_mode: CropMode = "center"
    """``center`` crops, ``squash`` distorts, ``border`` pads."""
    interpolation: Interpolation = "bicubic"
    fill: tuple[_Level, _Level, _Level] = (0, 0, 0)
    """RGB color of the padding."""


def preprocess(image: Image.Image, spec: Preprocessing) -> NDArray[np.uint8]:
    """Resize and crop any Pillow image to RGB, uint8 (H, W, 3).

    Gray, palette and CMYK are converted, 16-bit gray keeps its upper eight bits, and what is transparent is put on
    white. The EXIF orientation is not applied.

    Raises:
        UnreadableImage: as for `to_rgb`, or the aspect ratio is too extreme to resize.
    """
    rgb = to_rgb(image)
    width, height = _resized_size(rgb.width, rgb.height, spec)
    if width * max(height, rgb.height if width > rgb.width else 0) > MAX_RESIZED_PIXELS:
        raise UnreadableImage(
            f"an image of {rgb.width} x {rgb.height} pixels would be {width} x {height} after resizing; "
            "crop it to a less extreme aspect ratio"
        )
    resampling = Image.Resampling[spec.interpolation.upper()]
    wide = rgb if rgb.width == width else rgb.resize((width, rgb.height), resampling)
    resized = wide.resize((width, height), resampling)
    canvas = Image.new("RGB", (spec.width, spec.height), spec.fill)
    canvas.paste(resized, (-_crop_start(width, spec.width), -_crop_start(height, spec.height)))
    return np.asarray(canvas)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB, as `preprocess` sees it.

    Raises:
        UnreadableImage: it has no pixels, only transparent ones, or 16 bits without a white level.
    """
    if image.width == 0 or image.height == 0:
        raise UnreadableImage(f"an image of {image.width} x {image.height} pixels is empty")
    if image.mode.startswith("I;16"):
        image = gray_of_16_bits(image)
        require_white_level(image)
    if image.has_transparency_data:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")  # which copies


def gray_of_16_bits(image: Image.Image, *, bits: int = 16) -> Image.Image:
    """Return gray of 8 bits for gray of up to 16, whose white level is `2**bits - 1`: Pillow clips to 255, white."""
    values = np.asarray(image)
    gray = Image.fromarray((values >> (bits - 8)).astype(np.uint8))
    if (transparent := image.info.get("transparency")) is not None:
        gray.putalpha(Image.fromarray((values != transparent).astype(np.uint8) * 255))
    return gray


def require_white_level(image: Image.Image) -> None:
    """Raise UnreadableImage if an image that had 16 bits a channel is nearly black in 8: its white level is unknown."""
    bands, extrema = image.getbands(), cast("Any", image.getextrema())  # a pair, or one of each band
    pairs = [extrema] if len(bands) == 1 else extrema
    levels = [high for band, (_, high) in zip(bands, pairs, strict=True) if band in "LRGB"]
    if levels and max(levels) < WHITE_FROM:
        raise UnreadableImage(
            "its 16-bit values stay below a quarter of the range, as those of 12- and 14-bit cameras do, and would be "
            "nearly black: scale them to 65535, or save it with 8 bits a channel"
        )


def _on_white(image: Image.Image) -> Image.Image:
    """Return an image in RGB as browsers show it on a white page."""
    layer = image if image.mode == "RGBA" else image.convert("RGBA")
    if layer.getbbox(alpha_only=True) is None:
        raise UnreadableImage("every pixel is transparent: save it without its alpha channel")
    page = Image.new("RGB", layer.size, "white")
    page.paste(layer, mask=layer)
    return page


def _resized_size(width: int, height: int, spec: Preprocessing) -> tuple[int, int]:
    """Return (width, height) in pixels after resizing, at least 1 each."""
    target_w, target_h = math.floor(spec.width / spec.crop_pct), math.floor(spec.height / spec.crop_pct)
    if spec.crop_mode == "squash":
        return target_w, target_h
    if spec.crop_mode == "center" and target_w == target_h:
        long = int(target_w * max(width, height) / min(width, height))
        return (target_w, long) if width <= height else (long, target_w)
    pick = max if spec.crop_mode == "border" else min
    ratio = pick(height / target_h, width / target_w)
    return max(1, round(width / ratio)), max(1, round(height / ratio))


def _crop_start(size: int, crop: int) -> int:
    """Return the start of the central crop, in pixels of the resized edge; negative if it pads."""
    return -((crop - size) // 2) if crop > size else round((size - crop) / 2)
