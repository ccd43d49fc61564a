"""An image -> uint8 (H, W, 3), as a backbone's metadata says: the contract between export and device.

The rules, and every rounding in them, are those of timm's evaluation transform (``transforms_imagenet_eval``)
on Pillow images, up to and without the normalization, which lives inside the backbone's graph.
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

LARGEST_RESIZED_PIXELS = 2**24
"""No image is scaled to more (64 MiB): one of 1 x 100,000 pixels would be, to fill a square."""

_Edge = Annotated[int, Meta(gt=0, le=4096)]
_Level = Annotated[int, Meta(ge=0, le=255)]


class Preprocessing(msgspec.Struct, frozen=True, kw_only=True):
    """How an image becomes the input of a backbone, in the words of timm's data config."""

    height: _Edge
    """H, pixels."""
    width: _Edge
    """W, pixels."""
    crop_pct: Annotated[float, Meta(ge=0.1, le=1)] = 1.0
    """The part of the resized image that the crop keeps: its edge is ``floor(H / crop_pct)`` pixels."""
    crop_mode: CropMode = "center"
    """``center`` cuts what sticks out, ``squash`` distorts, ``border`` pads what is missing."""
    interpolation: Interpolation = "bicubic"
    fill: tuple[_Level, _Level, _Level] = (0, 0, 0)
    """RGB of what the crop holds beyond the image."""


def preprocess(image: Image.Image, spec: Preprocessing) -> NDArray[np.uint8]:
    """Resize and crop an image as the backbone's training did.

    Args:
        image: any Pillow image; gray, palette and CMYK become RGB, alpha is dropped, 16-bit gray keeps its
            upper eight bits. It is not turned by its EXIF orientation.
        spec: what the backbone wants.

    Returns:
        (H, W, 3) uint8, RGB.

    Raises:
        UnreadableImage: if the image has no pixels, or is so long and thin that resizing it is hopeless.
    """
    rgb = _to_rgb(image)
    width, height = _resized_size(rgb.width, rgb.height, spec)
    if width * height > LARGEST_RESIZED_PIXELS:
        raise UnreadableImage(
            f"an image of {rgb.width} x {rgb.height} pixels would be {width} x {height} after resizing; "
            "cut it to a less extreme shape"
        )
    resized = rgb.resize((width, height), Image.Resampling[spec.interpolation.upper()])
    canvas = Image.new("RGB", (spec.width, spec.height), spec.fill)
    canvas.paste(resized, (-_crop_start(width, spec.width), -_crop_start(height, spec.height)))
    return np.asarray(canvas)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.width == 0 or image.height == 0:
        raise UnreadableImage(f"an image of {image.width} x {image.height} pixels has nothing to see")
    if image.mode.startswith("I;16"):  # Pillow would clip to 255, which leaves nearly every image white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _resized_size(width: int, height: int, spec: Preprocessing) -> tuple[int, int]:
    """(width, height) in pixels after resizing; 0-pixel edges of extreme images become 1."""
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
    """Where the central crop starts, in pixels of the resized edge; negative where it pads."""
    return -((crop - size) // 2) if crop > size else round((size - crop) / 2)
