"""Distorts images for the training of the demo's backbone, so that its features depend on shapes and strokes.

Garments are rotated, enlarged, reduced to outlines or to few pixels, partly hidden, or inverted.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

EDGE = 32
"""Height and width of the output, pixels."""

_SOBEL = ((-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0))


def distort(images: Tensor, generator: torch.Generator) -> Tensor:
    """Distort each image (n, 1, h, w), from 0, the background, to 1, in its own way, to (n, 1, EDGE, EDGE)."""
    warped = _warp(images, generator)
    drawn = _to_some(warped, 0.5, _outline, generator)
    coarse = _to_some(drawn, 0.6, _coarsen, generator)
    cut = _to_some(coarse, 0.3, _cut_out, generator)
    n = len(cut)
    contrast, light = (
        _uniform((n, 1, 1, 1), 0.7, 1.3, generator),
        _uniform((n, 1, 1, 1), -0.1, 0.1, generator),
    )
    noise = 0.03 * torch.randn(cut.shape, generator=generator)
    lit = (contrast * cut + light + noise).clamp(0, 1)
    return _to_some(lit, 0.2, lambda some, _: 1 - some, generator)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(low, high, generator=generator)


def _to_some(
    images: Tensor,
    share: float,
    change: Callable[[Tensor, torch.Generator], Tensor],
    generator: torch.Generator,
) -> Tensor:
    """Change a random share of the images."""
    chosen = torch.rand(len(images), generator=generator) < share
    changed = images.clone()
    changed[chosen] = change(images[chosen], generator)
    return changed


def _warp(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turn by up to 25 degrees, scale from 0.77 to 1.8, stretch, shear and shift."""
    n = len(images)
    angle = _uniform((n,), -math.radians(25), math.radians(25), generator)
    zoom = torch.exp(_uniform((n,), math.log(0.55), math.log(1.3), generator))
    stretch = torch.exp(_uniform((n,), -0.25, 0.25, generator))
    shear = _uniform((n,), -0.25, 0.25, generator)
    shift = _uniform((n, 2), -0.15, 0.15, generator)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    rows = (
        torch.stack([cosine * zoom * stretch, shear - sine, shift[:, 0]], dim=1),
        torch.stack([sine * zoom, cosine * zoom / stretch, shift[:, 1]], dim=1),
    )
    grid = functional.affine_grid(torch.stack(rows, dim=1), [n, 1, EDGE, EDGE], align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def _outline(images: Tensor, generator: torch.Generator) -> Tensor:
    """Draw where the brightness changes, in thin or thick lines, pale or strong."""
    sobel = torch.tensor(_SOBEL)[None, None]
    framed = functional.pad(images, (1, 1, 1, 1), mode="replicate")
    slope = torch.hypot(functional.conv2d(framed, sobel), functional.conv2d(framed, sobel.mT))
    if torch.rand((), generator=generator) < 0.5:
        slope = functional.max_pool2d(slope, 3, stride=1, padding=1)
    strength = torch.exp(_uniform((len(images), 1, 1, 1), -0.7, 0.7, generator))
    return (slope / (slope.amax((2, 3), keepdim=True) + 1e-3)) ** strength


def _coarsen(images: Tensor, generator: torch.Generator) -> Tensor:
    """Keep no more than 7 to 13 pixels in each direction."""
    edge = int(torch.randint(7, 14, (), generator=generator))
    small = functional.interpolate(images, (edge, edge), mode="area")
    return functional.interpolate(small, (EDGE, EDGE), mode="bicubic", align_corners=False).clamp(0, 1)


def _cut_out(images: Tensor, generator: torch.Generator) -> Tensor:
    """Blacken a square of 4 to 12 pixels."""
    n = len(images)
    x, y = _uniform((2, n, 1, 1, 1), 0, EDGE, generator)
    half = _uniform((n, 1, 1, 1), 2, 6, generator)
    steps = torch.arange(EDGE, dtype=torch.float32)
    inside = ((steps - x).abs() < half) & ((steps[:, None] - y).abs() < half)
    return images.masked_fill(inside, 0.0)
