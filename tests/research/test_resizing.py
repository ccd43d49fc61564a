"""Resizes that the contract is compared with."""

import numpy as np
from PIL import Image

from research.resizing import bilinear_of_four


def test_four_pixels_are_all_that_an_enlarged_image_needs() -> None:
    """There it is Pillow's filter, which takes more pixels only of an image that shrinks."""
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    enlarged = image.resize((30, 14), Image.Resampling.BILINEAR)
    found = np.asarray(bilinear_of_four(image, (30, 14)), np.int16)
    assert np.abs(found - np.asarray(enlarged, np.int16)).max() <= 1
