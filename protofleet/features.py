"""Features of images by frozen backbones."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
from numpy.typing import NDArray

from edge_client.graphs.backbone import Backbone, open_backbone
from protocol.errors import ConfigError, UnreadableImage
from protofleet.images import BATCH_SIZE, Batch, ImageSource, batches

if TYPE_CHECKING:
    from edge_client.graphs.session import Provider

AnyBackbone = str | os.PathLike[str] | Backbone
"""The path of an ONNX file that `export-backbone` wrote, or what `load_backbone` returned."""


def load_backbone(
    path: str | os.PathLike[str], *, provider: "Provider" = "auto", threads: int | None = None
) -> Backbone:
    """Open an ONNX file that `export-backbone` wrote.

    Args:
        path: the file.
        provider: `cpu`, `cuda`, `tensorrt`, or `auto` for CUDA if available.
        threads: CPU threads of a run; None for all cores.

    Raises:
        RuntimeMissing: ONNX Runtime is not installed.
        BackboneMismatch: the file is no backbone.
    """
    return open_backbone(Path(path), provider=provider, threads=threads)


def load_backbones(backbones: AnyBackbone | Sequence[AnyBackbone]) -> list[Backbone]:
    """Open one or several backbones; those that are open stay as they are."""
    several = [backbones] if isinstance(backbones, str | os.PathLike | Backbone) else backbones
    return [each if isinstance(each, Backbone) else load_backbone(each) for each in several]


@overload
def extract_features(
    images: Iterable[ImageSource],
    backbone: AnyBackbone | Sequence[AnyBackbone],
    *,
    batch_size: int = BATCH_SIZE,
    on_error: Literal["raise"] = "raise",
    on_progress: Callable[[int], None] = ...,
) -> NDArray[np.float32]: ...


@overload
def extract_features(
    images: Iterable[ImageSource],
    backbone: AnyBackbone | Sequence[AnyBackbone],
    *,
    batch_size: int = BATCH_SIZE,
    on_error: Literal["skip"],
    on_progress: Callable[[int], None] = ...,
) -> tuple[NDArray[np.float32], dict[int, str]]: ...


def extract_features(
    images: Iterable[ImageSource],
    backbone: AnyBackbone | Sequence[AnyBackbone],
    *,
    batch_size: int = BATCH_SIZE,
    on_error: Literal["raise", "skip"] = "raise",
    on_progress: Callable[[int], None] = lambda _: None,
) -> NDArray[np.float32] | tuple[NDArray[np.float32], dict[int, str]]:
    """Return the features of images, float32 (n, L), as a device computes them.

    Args:
        images: n paths, Pillow images or arrays uint8 (H, W, 3), of any sizes.
        backbone: one backbone, or several whose features are concatenated: a file or what `load_backbone` returned.
        batch_size: images in a run of a backbone.
        on_error: `raise`, or `skip` for images that cannot be decoded: returns the features of the others, and the
            reasons by the position of each skipped image. `np.delete(labels, list(skipped))` has their labels.
        on_progress: called after every batch with the number of images in it that were not skipped.

    Raises:
        ConfigError: there are no images, `batch_size` is below 1, or an array is no image.
        UnreadableImage: an image cannot be decoded.
        BackboneMismatch: a file is no backbone.
    """
    if on_error not in ("raise", "skip"):
        raise ConfigError(f"expected on_error raise or skip, got {on_error!r}")
    backbones = load_backbones(backbone)
    skipped: dict[int, str] = {}

    def skip(number: int, error: UnreadableImage) -> None:
        skipped[number] = str(error)

    rows = []
    for batch in batches(
        images,
        {each.metadata.preprocessing for each in backbones},
        batch_size=batch_size,
        on_unreadable=skip if on_error == "skip" else None,
    ):
        rows.append(features_of(batch, backbones))
        on_progress(len(rows[-1]))
    if on_error == "raise":
        return joined(rows)
    if skipped and not rows:
        rows = [np.zeros((0, sum(each.metadata.feature_size for each in backbones)), np.float32)]
    return joined(rows), skipped


def joined(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the rows of all batches as one array; raises ConfigError if there are none."""
    if not rows:
        raise ConfigError("expected at least one image, got none: check the folder or pattern")
    return np.concatenate(rows)


def features_of(batch: Batch, backbones: Sequence[Backbone]) -> NDArray[np.float32]:
    """Return the features of a preprocessed batch, float32 (n, L1 + ... + LK), by K backbones."""
    parts = [each.features(batch[each.metadata.preprocessing]) for each in backbones]
    return np.concatenate(parts, axis=1)
