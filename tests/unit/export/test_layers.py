"""Features of blocks: which modules they are, how each is scaled, and where the file ends."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from export.backbones import Backbone, Choice, load_backbone
from export.layers import list_layers, select_default, select_layers
from export.to_onnx import to_onnx
from protocol.errors import ConfigError

MODEL = "test_efficientnet"
EDGE = 32


def loaded(model: str = MODEL) -> Backbone:
    torch.manual_seed(0)
    return load_backbone(Choice(model, random=True, image_size=EDGE))


def widths(backbone: Backbone) -> dict[str, int]:
    return {block.name: block.width for block in backbone.metadata.blocks or ()}


def scaled(pooled: torch.Tensor) -> NDArray[np.float32]:
    """Signed root, then mean 0 and length sqrt(width), of each row."""
    rows = pooled.numpy()
    roots = np.sign(rows) * np.sqrt(np.abs(rows))
    centered = roots - roots.mean(axis=1, keepdims=True)
    scale: NDArray[np.float32] = centered / np.sqrt(centered.var(axis=1, keepdims=True) + 1e-5)
    return scale


STAGES = [f"blocks.{number}" for number in range(6)]


@pytest.mark.parametrize(
    ("model", "residual"),
    [
        ("mobilenetv2_100", dict(zip(STAGES[1:], (24, 32, 64, 96, 160), strict=True))),
        ("mobilenetv3_small_050", {"blocks.1": 16, "blocks.3": 24, "blocks.4": 48}),
        ("efficientnet_b0", dict(zip(STAGES[1:], (24, 40, 80, 112, 192), strict=True))),
        ("regnetx_002", {"s1": 24, "s2": 56, "s3": 152, "s4": 368}),
        ("test_resnet", {"layer1": 32, "layer2": 48, "layer3": 192, "layer4": 96}),
        ("test_convnext", {"stages.0": 24, "stages.1": 32, "stages.2": 48, "stages.3": 64}),
        ("test_vit", dict.fromkeys(("blocks.0", "blocks.2", "blocks.3", "blocks.5"), 64)),
    ],
)
def test_residual_is_the_last_block_of_each_width(model: str, residual: dict[str, int]) -> None:
    backbone = select_layers(loaded(model), ["residual"])
    assert widths(backbone) == residual
    assert backbone.metadata.feature_size == sum(residual.values())
    with torch.inference_mode():
        features = backbone.module(torch.randn(2, 3, EDGE, EDGE)).numpy()
    for part in np.split(features, np.cumsum(list(residual.values()))[:-1], axis=1):
        np.testing.assert_allclose(part.mean(axis=1), 0, atol=1e-4)


def test_a_depthwise_activation_is_the_last_of_its_width() -> None:
    backbone = select_layers(loaded("mobilenetv2_100"), ["c576", "c384"])
    assert list(widths(backbone)) == ["c576", "c384"]
    assert backbone.module.paths == ("blocks.5.0.bn2", "blocks.4.0.bn2")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("mobilenetv2_100", {"c384": 384, "c576": 576, "c960": 960}),
        ("mobilenetv3_small_050", {"c72": 72, "c144": 144, "c288": 288}),
        (MODEL, {"c128": 128, "c192": 192}),  # it has no others
        # Blocks without such an activation follow the last one.
        ("mobilevitv2_050", {"last": 256} | {f"stages.{at}.1.transformer": 32 * at for at in (2, 3, 4)}),
        ("test_resnet", {"last": 96, "layer1": 32, "layer2": 48, "layer3": 192}),
    ],
)
def test_the_default_is_the_last_depthwise_activations_else_the_last_layer_and_residual_sums(
    model: str, expected: dict[str, int]
) -> None:
    """The depthwise activations are a group of `--layers`, which others are not in."""
    backbone = loaded(model)
    assert widths(select_default(backbone)) == expected
    if "last" in expected:
        with pytest.raises(ConfigError, match="no block 'depthwise'"):
            select_layers(backbone, ["depthwise"])
        return
    blocks = select_layers(backbone, ["last", "depthwise"]).metadata.blocks or ()
    assert [block.name for block in blocks if block.depthwise] == list(expected)
    assert len(blocks) == len(expected) + 1


def test_the_last_feature_is_not_in_a_group_twice() -> None:
    resnet = loaded("test_resnet")
    assert list(widths(select_layers(resnet, ["last", "residual"]))) == ["last", "layer1", "layer2", "layer3"]
    assert list(widths(select_layers(resnet, ["all"]))) == ["act1", "layer1", "layer2", "layer3", "last"]
    assert list(widths(select_layers(resnet, ["layer4", "last"]))) == ["layer4", "last"]


def test_tokens_of_the_class_and_channels_last_are_pooled_over_the_image() -> None:
    for model, block in (("test_vit", "blocks.1"), ("swin_tiny_patch4_window7_224", "layers.0")):
        backbone = load_backbone(Choice(model, random=True))
        images = torch.randn(2, *backbone.config["input_size"])
        outputs: list[torch.Tensor] = []
        handle = backbone.module.get_submodule(block).register_forward_hook(
            lambda _module, _inputs, output, outputs=outputs: outputs.append(output)
        )
        with torch.inference_mode():
            backbone.module(images)
            handle.remove()
            pooled = outputs[0][:, 1:].mean(1) if model == "test_vit" else outputs[0].mean((1, 2))
            features = select_layers(backbone, [block]).module(images).numpy()
        np.testing.assert_allclose(features, scaled(pooled), atol=1e-4)


def test_the_file_has_the_scaled_blocks_and_ends_with_the_last_one() -> None:
    backbone = loaded()
    network: Any = backbone.module
    selected = select_layers(backbone, ["c128", "blocks.1"])
    file = to_onnx(selected.module, selected.metadata)
    model = onnx.load_from_string(file)
    names = {tensor.name for tensor in model.graph.initializer}
    assert not any(
        part in name for name in names for part in ("blocks.4", "blocks.3.0.conv_pwl", "conv_head")
    )
    images = np.random.default_rng(0).integers(0, 256, (2, EDGE, EDGE, 3), dtype=np.uint8)
    mean, std = (
        torch.tensor(values).reshape(3, 1, 1) for values in (backbone.metadata.mean, backbone.metadata.std)
    )
    with torch.inference_mode():
        pixels = (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - mean) / std
        second = network.blocks[:2](network.bn1(network.conv_stem(pixels)))
        block = network.blocks[3][0]
        wide = block.bn1(block.conv_pw(network.blocks[2](second)))
        expected = [scaled(part.mean((2, 3))) for part in (block.bn2(block.conv_dw(wide)), second)]
    found = onnxruntime.InferenceSession(file).run(["feature"], {"image": images})[0]
    np.testing.assert_allclose(found, np.concatenate(expected, axis=1), atol=1e-4)


def test_an_unknown_block_is_refused_with_names() -> None:
    with pytest.raises(ConfigError, match=r"no block 'c129' for --layers; did you mean .*c128"):
        select_layers(loaded(), ["c129"])
    with pytest.raises(ConfigError, match=r"no block 'residual' for --layers; it has blocks\.0, "):
        select_layers(loaded(), ["residual"])


def test_listed_layers_have_the_size_of_their_file() -> None:
    backbone = loaded()
    rows = list_layers(backbone)
    assert [row["name"] for row in rows] == [*STAGES[:3], "c128", "blocks.3", "c192", "blocks.4", "last"]
    assert [(row["width"], row["resolution"]) for row in rows[-2:]] == [(64, (1, 1)), (256, ())]
    cut, size = select_layers(backbone, ["c128"]), {row["name"]: row["size_bytes"] for row in rows}
    assert size["c128"] == pytest.approx(len(to_onnx(cut.module, cut.metadata)), rel=0.1)
    assert list(size.values()) == sorted(size.values())
    assert rows[-1]["time_share"] == 1
    assert all(row["time_share"] > 0 for row in rows)
