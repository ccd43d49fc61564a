"""Project a backbone's features on their leading principal components, as a part of the graph."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from export.backbones import Backbone
from export.parity import timm_reference
from protocol.errors import ConfigError


class Projection(nn.Module):
    """A network whose features (n, L) are multiplied by directions (L, D)."""

    directions: Tensor

    def __init__(self, network: nn.Module, directions: NDArray[np.float32]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("directions", torch.from_numpy(directions))

    def forward(self, images: Tensor) -> Tensor:
        """Return the projected features (n, D)."""
        features: Tensor = self.network(images)
        return features @ self.directions


def project_features(backbone: Backbone, size: int, photos: Iterable[Image.Image]) -> Backbone:
    """Return a backbone with `size` features: its own, projected on their principal components over photos.

    The mean stays in, as heads do not depend on it.

    Raises:
        ConfigError: the backbone has no more features than that, or there are too few photos.
    """
    own = backbone.metadata.feature_size
    if size >= own:
        raise ConfigError(f"{backbone.metadata.model} has {own} features: project them on fewer")
    reference = timm_reference(backbone.module, backbone.config)
    features = np.stack([reference(photo) for photo in photos])
    if len(features) <= size:
        raise ConfigError(
            f"expected more than {size} photos for as many principal components, got {len(features)}: any photos will "
            "do, a few thousand of different things are best"
        )
    return replace(
        backbone,
        module=Projection(backbone.module, principal_components(features, size)).eval(),
        metadata=msgspec.structs.replace(backbone.metadata, feature_size=size, blocks=msgspec.UNSET),
    )


def principal_components(features: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Return the directions (L, size) of unit length in which features (n, L) vary most, as scikit-learn finds them."""
    from sklearn.decomposition import PCA

    found = PCA(size, svd_solver="full").fit(features.astype(np.float64))
    directions: NDArray[np.float32] = np.ascontiguousarray(found.components_.T, dtype=np.float32)
    return directions
