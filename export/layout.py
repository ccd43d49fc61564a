"""Find which dimensions of a module's output hold the positions of an image, and which one its channels."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from math import sqrt

import torch
from torch import Tensor, nn

TRIED = 16
"""Indices of a dimension that are tried, at most twice as many."""

LAST_PARAMETERS = 32
"""Parameters before an output that are tried: the first one decides, unless an output concatenates those of layers."""


@dataclass(frozen=True)
class Layout:
    """How an output is averaged over the positions of an image."""

    positions: tuple[int, ...] = ()
    """Dimensions of height and width, or of tokens; none if the output is (n, C)."""
    prefix_tokens: int = 0
    """Tokens before those of the image, such as a class token."""

    def pool(self, output: Tensor) -> Tensor:
        """Return the mean (n, C) over the image's positions."""
        if self.prefix_tokens:
            output = output[:, self.prefix_tokens :]
        return output.mean(self.positions) if self.positions else output


def find_layout(
    output: Tensor, parameters: Iterable[nn.Parameter], *, prefix_tokens: int, aspect: float
) -> Layout | None:
    """Return the layout of a module's output for one image, computed with gradients; None if it cannot be known.

    `parameters` are those of the layers that were called before it, the last one first. `prefix_tokens` is the number
    that timm states for the network; `aspect` is the image's H / W.
    """
    if len(output) != 1:  # windows or parts of the image in place of images
        return None
    if output.ndim == 2:
        return Layout()
    if not output.requires_grad:  # no layer is before it
        return None
    channels = _channel_dimension(output, parameters)
    if channels is None:
        return None
    positions = tuple(number for number in range(1, output.ndim) if number != channels)
    if positions != (1,):
        return Layout(positions)
    tokens = output.shape[1]
    # A later block may add the class token, and some networks have one without stating it.
    prefix = next((count for count in (prefix_tokens, 0, 1) if _is_grid(tokens - count, aspect)), None)
    return None if prefix is None else Layout(positions, prefix)


def _channel_dimension(output: Tensor, parameters: Iterable[nn.Parameter]) -> int | None:
    """Return the dimension along which one index depends on a single row of the last layer that it depends on.

    Row k of a layer's weight or bias makes the layer's output channel k. A position has all channels, and depends on
    all rows.
    """
    dimensions = [number for number in range(1, output.ndim) if output.shape[number] > 1]
    for parameter in islice(parameters, LAST_PARAMETERS):
        found = [number for number in dimensions if _is_one_row(output, number, parameter)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _is_one_row(output: Tensor, dimension: int, parameter: nn.Parameter) -> bool:
    """Return whether an output at one index of a dimension depends on at most one row of a parameter, and some on one.

    An activation may be constant at any of the indices.
    """
    length, found = output.shape[dimension], False
    for index in range(0, length, max(1, length // TRIED)):
        weights = torch.zeros_like(output)
        weights.select(dimension, index).normal_(generator=torch.Generator().manual_seed(0))
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            output, parameter, weights, retain_graph=True, allow_unused=True
        )
        if gradients[0] is None:
            return False
        rows = int(gradients[0].reshape(len(parameter), -1).any(1).sum())
        if rows > 1:
            return False
        found = found or rows == 1
    return found


def _is_grid(tokens: int, aspect: float) -> bool:
    return tokens > 0 and round(sqrt(tokens * aspect)) * round(sqrt(tokens / aspect)) == tokens
