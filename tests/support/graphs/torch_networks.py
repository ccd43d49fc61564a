"""A small torch network and its metadata, for the tests of the export."""

import torch
from torch import nn

from protocol.models.onnx_metadata import BackboneMetadata
from protocol.models.preprocessing import Preprocessing

EDGE = 16
FEATURE_SIZE = 12


def tiny_network() -> nn.Module:
    """A convolutional network of two layers: (n, 3, H, W) to (n, 12)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Conv2d(8, FEATURE_SIZE, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).eval()


def described(*, feature_size: int = FEATURE_SIZE) -> BackboneMetadata:
    return BackboneMetadata(
        model="tiny",
        feature_size=feature_size,
        preprocessing=Preprocessing(height=EDGE, width=EDGE, crop_pct=0.875),
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.25, 0.3),
        weights_sha256="0" * 64,
    )
