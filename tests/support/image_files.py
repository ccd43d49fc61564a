"""Image files for tests, written by Pillow, and a process without root's permissions."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def noise(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Return an image of random pixels, which no codec can compress."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def image_file(path: Path, image: Image.Image | None = None, **options: Any) -> Path:
    """Write an image, random pixels by default, and create its folders; `options` are Pillow's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or noise()).save(path, **options)
    return path


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """Drop root's permissions."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
