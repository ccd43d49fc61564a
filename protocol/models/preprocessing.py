"""Preprocess images for a backbone, identically in the exporter and on devices.

The rules, including their rounding, are those of timm's evaluation transform (``transforms_imagenet_eval``) on
Pillow images, without the normalization, which is a part of the backbone's graph.
"""

import math
from typing import Annotated, Literal

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

    Gray, palette and CMYK are converted, alpha is dropped, 16-bit gray keeps its upper eight bits. The EXIF orientation
    is not applied.

    Raises:
        UnreadableImage: the image has no pixels, or its aspect ratio is too extreme to resize.
    """
    rgb = to_rgb(image)
    width, height = _resized_size(rgb.width, rgb.height, spec)
    if width * height > MAX_RESIZED_PIXELS:
        raise UnreadableImage(
            f"an image of {rgb.width} x {rgb.height} pixels would be {width} x {height} after resizing; "
            "crop it to a less extreme aspect ratio"
        )
    resized = rgb.resize((width, height), Image.Resampling[spec.interpolation.upper()])
    canvas = Image.new("RGB", (spec.width, spec.height), spec.fill)
    canvas.paste(resized, (-_crop_start(width, spec.width), -_crop_start(height, spec.height)))
    return np.asarray(canvas)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB, as `preprocess` sees it; raises UnreadableImage if it has no pixels."""
    if image.width == 0 or image.height == 0:
        raise UnreadableImage(f"an image of {image.width} x {image.height} pixels is empty")
    if image.mode.startswith("I;16"):  # Pillow clips to 255, which makes nearly every image white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")  # which copies


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
