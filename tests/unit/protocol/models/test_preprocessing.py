"""The device's preprocessing is timm's, to the last bit."""

from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from protocol.errors import UnreadableImage
from protocol.models.preprocessing import CropMode, Interpolation, Preprocessing, preprocess


def random_image(width: int, height: int, *, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Random blocks with hard edges: every misplaced pixel shows."""
    blocks = np.random.default_rng(seed).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def timm_preprocess(image: Image.Image, spec: Preprocessing) -> NDArray[np.uint8]:
    """Return the image after timm's own evaluation transform, before normalization."""
    factory = pytest.importorskip("timm.data.transforms_factory")
    transform = factory.transforms_imagenet_eval(
        (spec.height, spec.width),
        crop_pct=spec.crop_pct,
        crop_mode=spec.crop_mode,
        interpolation=spec.interpolation,
        mean=[level / 255 for level in spec.fill],
        normalize=False,
    )
    pixels: NDArray[np.uint8] = transform(image.convert("RGB")).numpy().transpose(1, 2, 0)
    return pixels


edges = st.integers(1, 70)


@settings(max_examples=300, deadline=None)
@given(
    size=st.tuples(edges, edges),
    target=st.one_of(st.tuples(edges, edges), edges.map(lambda edge: (edge, edge))),
    crop_pct=st.one_of(st.sampled_from([0.875, 0.9, 0.95, 0.965, 1.0]), st.floats(0.1, 1)),
    crop_mode=st.sampled_from(get_args(CropMode)),
    interpolation=st.sampled_from(get_args(Interpolation)),
)
def test_every_pixel_equals_timm(
    size: tuple[int, int],
    target: tuple[int, int],
    crop_pct: float,
    crop_mode: CropMode,
    interpolation: Interpolation,
) -> None:
    spec = Preprocessing(
        height=target[0],
        width=target[1],
        crop_pct=crop_pct,
        crop_mode=crop_mode,
        interpolation=interpolation,
        fill=(124, 116, 104) if crop_mode == "border" else (0, 0, 0),
    )
    image = random_image(*size)
    ours = preprocess(image, spec)
    assert ours.shape == (*target, 3)
    assert ours.dtype == np.uint8
    try:
        theirs = timm_preprocess(image, spec)
    except ValueError:  # where an edge rounds to 0 pixels, timm fails and we keep one pixel
        assume(False)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr"])
def test_color_modes_are_converted_like_timm(mode: str) -> None:
    spec = Preprocessing(height=24, width=24, crop_pct=0.875)
    image = random_image(50, 31, mode="RGBA" if mode == "PA" else "RGB").convert(mode)
    np.testing.assert_array_equal(preprocess(image, spec), timm_preprocess(image, spec))


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_sixteen_bit_gray_keeps_its_shades(mode: str) -> None:
    gray = np.asarray(random_image(16, 16, mode="L"))
    raw = (gray.astype(np.uint16) << 8).astype(">u2" if mode.endswith("B") else "<u2")
    image = Image.frombytes(mode, (16, 16), raw.tobytes())
    pixels = preprocess(image, Preprocessing(height=16, width=16))
    np.testing.assert_array_equal(pixels, np.repeat(gray[:, :, None], 3, axis=2))


@pytest.mark.parametrize(
    ("size", "reason"), [((1, 9000), "1 x 9000 .* 224 x 2016000"), ((0, 5), "0 x 5 pixels is empty")]
)
def test_empty_or_extreme_image_is_refused(size: tuple[int, int], reason: str) -> None:
    with pytest.raises(UnreadableImage, match=reason):
        preprocess(Image.new("RGB", size), Preprocessing(height=224, width=224))


@pytest.mark.parametrize(
    "wrong",
    [{"height": 0}, {"width": 5000}, {"crop_pct": 0.0}, {"crop_mode": "round"}, {"interpolation": "best"}],
)
def test_settings_are_bounded(wrong: dict[str, object]) -> None:
    settings_read = {"height": 8, "width": 8} | wrong
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings_read, Preprocessing)
