"""A block is averaged over the image, however its network arranges channels and positions; else it is refused."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor, nn

from export.backbones import Backbone
from export.layers import Graph, select_layers
from protocol.errors import ConfigError
from tests.support.graphs.torch_networks import described

EDGE = 8
"""Also the number of channels, so that shapes do not tell dimensions apart."""


class Block(nn.Module):
    """x + linear(norm(x)), on channels that are last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(EDGE)
        self.linear = nn.Linear(EDGE, EDGE)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        total: Tensor = x + self.linear(self.norm(x))
        return total


class Network(nn.Module):
    """A convolution, a change of arrangement, a block, and the mean of all of its values per image and channel."""

    def __init__(self, arrange: Callable[[Tensor], Tensor], *, relu6: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, EDGE, 1)
        self.block = Block()
        self.act = nn.ReLU6() if relu6 else nn.Identity()
        self._arrange = arrange

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, C)."""
        value: Tensor = self.act(self.block(self._arrange(self.stem(images))))
        return value.reshape(len(images), -1, EDGE).mean(1)


def channels_last(value: Tensor) -> Tensor:
    """(n, C, H, W) to (n, H, W, C)."""
    return value.permute(0, 2, 3, 1)


def with_class_token(value: Tensor) -> Tensor:
    """(n, C, H, W) to (n, 1 + H W, C)."""
    tokens = value.flatten(2).transpose(1, 2)
    return torch.cat([tokens[:, :1] * 100, tokens], dim=1)


def windows(value: Tensor) -> Tensor:
    """(n, C, H, W) to (n, windows, tokens, C)."""
    parts = value.reshape(len(value), EDGE, 2, EDGE // 2, 2, EDGE // 2)
    return parts.permute(0, 2, 4, 3, 5, 1).reshape(len(value), 4, -1, EDGE)


def windows_as_images(value: Tensor) -> Tensor:
    """(n, C, H, W) to (n windows, tokens, C)."""
    return windows(value).reshape(4 * len(value), -1, EDGE)


def loaded(network: nn.Module) -> Backbone:
    torch.manual_seed(0)
    metadata = described(feature_size=EDGE)
    metadata = msgspec.structs.replace(metadata, feature_size=EDGE)
    return Backbone(network.eval(), {"input_size": (3, EDGE, EDGE)}, metadata)


@pytest.mark.parametrize(
    ("arrange", "positions", "prefix_tokens"),
    [(channels_last, (1, 2), 0), (windows, (1, 2), 0), (with_class_token, (1,), 1)],
)
@pytest.mark.parametrize("relu6", [False, True])
def test_positions_are_found_by_what_the_network_does_with_them(
    arrange: Callable[[Tensor], Tensor], positions: tuple[int, ...], prefix_tokens: int, *, relu6: bool
) -> None:
    network = Network(arrange, relu6=relu6)
    path = "act" if relu6 else "block"
    backbone = loaded(network)
    layout = Graph(network, (3, EDGE, EDGE)).layout(path)
    assert (layout.positions, layout.prefix_tokens) == (positions, prefix_tokens)
    images = torch.randn(2, 3, EDGE, EDGE, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        values = network.act(network.block(arrange(network.stem(images))))
        pooled = values[:, prefix_tokens:].mean(positions)
        roots = pooled.sign() * pooled.abs().sqrt()
        expected = nn.functional.layer_norm(roots, [EDGE])
        torch.testing.assert_close(select_layers(backbone, [path]).module(images), expected)


def test_parts_of_an_image_are_no_block() -> None:
    backbone = loaded(Network(windows_as_images))
    with pytest.raises(ConfigError, match="cannot pool the output of 'block', 4x16x8 for one image"):
        select_layers(backbone, ["block"])
    with pytest.raises(ConfigError, match="no block 'residual'"):
        select_layers(backbone, ["residual"])


def test_what_mixes_channels_and_positions_is_refused() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, EDGE, 1),
        nn.Flatten(),
        nn.Linear(EDGE**3, EDGE**3),
        nn.Unflatten(1, (EDGE, EDGE, EDGE)),
        nn.Flatten(),
    )
    with pytest.raises(
        ConfigError, match="which of its dimensions are positions of the image cannot be known"
    ):
        select_layers(loaded(network), ["3"])


class Twice(nn.Module):
    """A network whose last sum is in no module of its own, and whose feature is its last block's mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, EDGE, 1)
        self.block = nn.Conv2d(EDGE, EDGE, 1)
        self.same = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, C)."""
        value = self.stem(images)
        total: Tensor = self.same(value + self.block(value))
        return total.mean((2, 3))


def test_a_sum_of_the_network_itself_is_no_block_and_equal_blocks_count_once() -> None:
    backbone = loaded(Twice())
    with pytest.raises(ConfigError, match="no block 'residual'"):
        select_layers(backbone, ["residual"])
    blocks = select_layers(backbone, ["same", "all"]).metadata.blocks
    assert blocks
    assert [block.name for block in blocks] == ["same"]
