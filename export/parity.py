"""Compare features: PyTorch with timm's transform against ONNX Runtime with the device's preprocessing."""

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from protocol.errors import ConfigError, UnreadableImage
from protocol.models.cpu_session import cpu_session
from protocol.models.onnx_metadata import Parity
from protocol.models.preprocessing import Preprocessing, preprocess, to_rgb

BATCH = 16
"""Photos in memory at a time."""

COMPARED = 100
"""Photos of a folder that are compared, at most."""

Reference = Callable[[Image.Image], NDArray[np.float32]]
"""Computes the expected feature of a photo, (L,) float32."""


def sample_photos() -> list[Image.Image]:
    """Return the two photos of scikit-learn."""
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(photo) for photo in load_sample_images().images]


def compared_photos(folder: Path | None) -> Iterable[Image.Image]:
    """Return photos evenly spaced over a folder's, or scikit-learn's two.

    Raises:
        ConfigError: the folder has no photos, or one cannot be read.
    """
    if folder is None:
        return sample_photos()
    paths = photo_files(folder)
    return map(read_photo, paths[:: math.ceil(len(paths) / COMPARED)])


def photo_files(folder: Path) -> list[Path]:
    """Return the photos in a folder and its subfolders, in the order of their names.

    Raises:
        ConfigError: there is none.
    """
    suffixes = Image.registered_extensions()
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if not paths:
        raise ConfigError(f"no photos in {folder}: expected files such as .jpg or .png")
    return paths


def read_photo(path: Path) -> Image.Image:
    """Return a photo in RGB, as devices see it; raises ConfigError if it cannot be read."""
    try:
        with Image.open(path) as photo:
            photo.load()
            return to_rgb(photo)
    except (OSError, Image.DecompressionBombError, UnreadableImage) as error:
        raise ConfigError(f"cannot read {path}: {error}; remove it from the folder") from error


def timm_reference(module: nn.Module, config: Mapping[str, Any]) -> Reference:
    """Return the network with timm's evaluation transform for a data config."""
    from timm.data import create_transform

    transform = create_transform(**config)

    def feature(photo: Image.Image) -> NDArray[np.float32]:
        with torch.inference_mode():
            values: NDArray[np.float32] = module(transform(photo)[None])[0].numpy()
        return values

    return feature


def compare(
    file: bytes, *, preprocessing: Preprocessing, reference: Reference, photos: Iterable[Image.Image]
) -> Parity:
    """Return the worst cosine and relative error of an ONNX backbone over photos, each alone and in a batch.

    They are NaN if a feature is NaN, or an expected one is zero. There must be at least one photo.
    """
    session = cpu_session(file)
    remaining, cosines, errors = iter(photos), [], []
    while batch := list(islice(remaining, BATCH)):
        images = np.stack([preprocess(photo, preprocessing) for photo in batch])
        expected = np.stack([reference(photo) for photo in batch]).astype(np.float64)
        singly = np.concatenate([session.run(["feature"], {"image": image[None]})[0] for image in images])
        together = session.run(["feature"], {"image": images})[0]
        lengths = np.linalg.norm(expected, axis=1)
        for features in (singly.astype(np.float64), together.astype(np.float64)):
            with np.errstate(invalid="ignore", divide="ignore"):
                products = (features * expected).sum(axis=1)
                cosines += (products / (np.linalg.norm(features, axis=1) * lengths)).tolist()
                errors += (np.linalg.norm(features - expected, axis=1) / lengths).tolist()
    return Parity(
        cosine=float(np.min(cosines)), relative_error=float(np.max(errors)), images=len(errors) // 2
    )
