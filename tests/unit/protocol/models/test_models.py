"""Metadata in ONNX files; the device's preprocessing is timm's, to the last bit."""

from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from protocol.errors import BackboneMismatch, UnreadableImage
from protocol.models.onnx_metadata import (
    PROPERTY,
    BackboneMetadata,
    Block,
    GraphMetadata,
    HeadMetadata,
    ModelMetadata,
    Parity,
    read_metadata,
    to_properties,
)
from protocol.models.preprocessing import CropMode, Interpolation, Preprocessing, preprocess, to_rgb

BACKBONE = BackboneMetadata(
    model="resnet18",
    feature_size=512,
    preprocessing=Preprocessing(height=224, width=192, crop_pct=0.875, crop_mode="border", fill=(1, 2, 3)),
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    weights_sha256="0" * 64,
    weights="resnet18.safetensors",
    parity=Parity(cosine=0.999, relative_error=1e-6, images=2),
)
HEAD = HeadMetadata(
    classes=("cat", "dog"),
    version=3,
    task="1" * 64,
    backbones=("2" * 64,),
    feature_size=512,
    training={"epochs": 15.0},
)
GRAPH = GraphMetadata(
    role="step",
    algorithm="fedpcl",
    classes=10,
    feature_size=1280,
    projection_size=256,
    opset=18,
    runtime_min="1.14",
)
BLOCKS = msgspec.structs.replace(
    BACKBONE, blocks=(Block(name="c384", width=384), Block(name="last", width=128))
)
MODEL = ModelMetadata(backbones={"image": BACKBONE}, head=HEAD)


@pytest.mark.parametrize("metadata", [BACKBONE, BLOCKS, HEAD, GRAPH, MODEL])
def test_metadata_is_read_back(metadata: Any) -> None:
    assert read_metadata(to_properties(metadata), type(metadata)) == metadata


@given(classes=st.lists(st.text(), min_size=1), training=st.dictionaries(st.text(), st.floats(-1e9, 1e9)))
def test_any_class_name_and_metric_is_read_back(classes: list[str], training: dict[str, float]) -> None:
    head = msgspec.structs.replace(HEAD, classes=tuple(classes), training=training)
    assert read_metadata(to_properties(head), HeadMetadata) == head


@pytest.mark.parametrize("kind", [BackboneMetadata, HeadMetadata, GraphMetadata, ModelMetadata])
def test_missing_or_invalid_metadata_is_refused(kind: Any) -> None:
    with pytest.raises(BackboneMismatch, match=r"no 'protofleet' metadata .*: expected a protofleet"):
        read_metadata({"producer": "another"}, kind)
    for text in ("", "{", "[]", "{}", '{"kind": "other"}', "\ud800"):
        with pytest.raises(BackboneMismatch, match="invalid 'protofleet' metadata"):
            read_metadata({PROPERTY: text}, kind)


def test_blocks_are_the_whole_feature_and_sizes_are_bounded() -> None:
    text = to_properties(BLOCKS)[PROPERTY]
    for wrong in (text.replace('"width":128', '"width":127'), text.replace('"c384"', '""')):
        with pytest.raises(BackboneMismatch, match="invalid"):
            read_metadata({PROPERTY: wrong}, BackboneMetadata)
    for size in (0, -1, 2**20 + 1, 2**62):
        with pytest.raises(BackboneMismatch, match="invalid"):
            read_metadata(to_properties(msgspec.structs.replace(GRAPH, projection_size=size)), GraphMetadata)


@pytest.mark.parametrize(
    ("found", "kind", "expected"),
    [
        (HEAD, BackboneMetadata, "make one with export-backbone"),
        (BACKBONE, HeadMetadata, r"head\.onnx"),
        (HEAD, GraphMetadata, "graph of a program"),
        (HEAD, ModelMetadata, r"model\.onnx"),
    ],
)
def test_another_kind_of_file_is_refused(found: Any, kind: Any, expected: str) -> None:
    with pytest.raises(BackboneMismatch, match=expected):
        read_metadata(to_properties(found), kind)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "resize", width_first)
        pixels: NDArray[np.uint8] = transform(image.convert("RGB")).numpy().transpose(1, 2, 0)
    return pixels


RESIZE = Image.Image.resize


def width_first(image: Image.Image, size: tuple[int, int], resampling: Any = None) -> Image.Image:
    """Resize as Pillow does below version 13; later ones begin with the height of tall images."""
    return RESIZE(RESIZE(image, (size[0], image.height), resampling), size, resampling)


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
    """Where every pixel is opaque."""
    spec = Preprocessing(height=24, width=24, crop_pct=0.875)
    image = random_image(50, 31, mode="RGBA" if mode == "PA" else "RGB").convert(mode)
    np.testing.assert_array_equal(preprocess(image, spec), timm_preprocess(image, spec))


def test_transparent_images_are_put_on_white() -> None:
    """In every way in which Pillow stores it; hidden pixels do not count, and half of an opacity mixes."""
    image = Image.new("RGBA", (3, 1))
    for place, color in enumerate([(200, 0, 0, 255), (0, 0, 0, 0), (0, 0, 0, 128)]):
        image.putpixel((place, 0), color)
    assert np.asarray(to_rgb(image)).tolist() == [[[200, 0, 0], [255, 255, 255], [127, 127, 127]]]
    gray = np.asarray(to_rgb(image.convert("LA")))
    assert gray[0, 1:, 0].tolist() == [255, 127]
    for mode, key in {"L": 7, "P": 7, "RGB": (7, 7, 7)}.items():
        keyed = Image.fromarray(np.array([[90, 7]], np.uint8)).convert(mode)
        keyed.info["transparency"] = key
        assert np.asarray(to_rgb(keyed))[0, :, 0].tolist() == [90, 255], mode


def test_an_image_without_a_visible_pixel_is_refused() -> None:
    """It would be white, whatever is in it."""
    image = random_image(8, 8)
    image.putalpha(0)
    with pytest.raises(
        UnreadableImage, match="every pixel is transparent: save it without its alpha channel"
    ):
        to_rgb(image)


def test_sixteen_bits_without_a_white_level_are_refused() -> None:
    image = Image.fromarray(np.full((4, 4), 4095, np.uint16))
    with pytest.raises(UnreadableImage, match="values stay below a quarter of the range"):
        to_rgb(image)


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


def test_image_that_is_extreme_with_its_new_width_is_refused() -> None:
    """It has 224 x 224 pixels in the end, and 224 x 75,000 before its height is resized."""
    spec = Preprocessing(height=224, width=224, crop_mode="squash")
    preprocess(Image.new("RGB", (1, 74_000)), spec)
    preprocess(Image.new("RGB", (300, 75_000)), spec)
    with pytest.raises(UnreadableImage, match=r"1 x 75000 .* 224 x 224"):
        preprocess(Image.new("RGB", (1, 75_000)), spec)


@pytest.mark.parametrize(
    "wrong",
    [{"height": 0}, {"width": 5000}, {"crop_pct": 0.0}, {"crop_mode": "round"}, {"interpolation": "best"}],
)
def test_settings_are_bounded(wrong: dict[str, object]) -> None:
    settings_read = {"height": 8, "width": 8} | wrong
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings_read, Preprocessing)
