"""An attacker's decoder: from the feature of an image back to the image (FedTC, appendix C).

The operator of a fleet has its backbone and public images of the same kind: any number of pairs of image and feature.
"""

import math
import sys

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

HIDDEN = 1024
BATCH = 128
PEAK_RATE = 2e-3
SSIM_WEIGHT = 0.2
WINDOW = 7


class Decoder(nn.Module):
    """Features (n, L), standardized by those it was made from, to pixels (n, H * W * channels) in 0 to 1."""

    mean: Tensor
    scale: Tensor

    def __init__(self, features: Tensor, *, pixels: int) -> None:
        super().__init__()
        spread = features.std(dim=0, correction=0)
        self.register_buffer("mean", features.mean(dim=0))
        self.register_buffer("scale", spread.clamp_min(spread.mean().item() / 100 or 1.0))
        self.layers = nn.Sequential(
            *(nn.Linear(features.shape[1], HIDDEN), nn.ReLU()),
            *(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()),
            *(nn.Linear(HIDDEN, pixels), nn.Sigmoid()),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return pixels."""
        pixels: Tensor = self.layers((features - self.mean) / self.scale)
        return pixels


def as_values(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return images of any shape as values from 0 to 1."""
    return (images / 255).astype(np.float32)


def train_decoder(
    features: NDArray[np.float32], images: NDArray[np.uint8], *, epochs: int, seed: int, device: str
) -> Decoder:
    """Train a decoder to reconstruct images (n, H, W) or (n, H, W, 3) from their features (n, L).

    The loss is small for small errors in pixels, and a high SSIM.
    """
    known = torch.from_numpy(features).to(device)
    wanted = torch.from_numpy(as_values(images).reshape(len(images), -1)).to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder = Decoder(known, pixels=wanted.shape[1]).to(device)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=PEAK_RATE)
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * math.ceil(len(known) / BATCH)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    with click.progressbar(length=steps, label="training a decoder", file=sys.stderr) as bar:
        for _ in range(epochs):
            for members in torch.split(torch.randperm(len(known), generator=generator), BATCH):
                decoded = decoder(known[members])
                similarity = _mean_ssim(*(_stack(each, images.shape) for each in (decoded, wanted[members])))
                loss = functional.l1_loss(decoded, wanted[members]) + SSIM_WEIGHT * (1 - similarity)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                cycle.step()
                bar.update(1)
    return decoder.eval()


def decode(decoder: Decoder, features: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the images (n, *shape) that an attacker reconstructs from features (n, L), values from 0 to 1."""
    with torch.inference_mode():
        pixels = decoder(torch.from_numpy(features).to(decoder.mean.device)).cpu()
    decoded: NDArray[np.float32] = pixels.numpy().reshape(len(features), *shape)
    return decoded


def _stack(pixels: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pixels (n, H * W * channels) of images (any, H, W) or (any, H, W, 3) as (n * channels, 1, H, W)."""
    images = pixels.reshape(len(pixels), *shape[1:3], -1)
    return images.permute(0, 3, 1, 2).reshape(-1, 1, *shape[1:3])


def _mean_ssim(one: Tensor, other: Tensor) -> Tensor:
    """Structural similarity in square windows (Wang et al. 2004, eq. 13), of (n, 1, H, W) in 0 to 1."""

    def mean(values: Tensor) -> Tensor:
        return functional.avg_pool2d(values, WINDOW, 1)

    one_mean, other_mean = mean(one), mean(other)
    variances = mean(one * one) - one_mean**2 + mean(other * other) - other_mean**2
    covariance = mean(one * other) - one_mean * other_mean
    brightness = (2 * one_mean * other_mean + 0.01**2) / (one_mean**2 + other_mean**2 + 0.01**2)
    structure = (2 * covariance + 0.03**2) / (variances + 0.03**2)
    return (brightness * structure).mean()
