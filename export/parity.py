"""Is the ONNX file the network? torch behind timm's own transform against ONNX Runtime behind the device's."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from protocol.errors import ConfigError
from protocol.metadata import Parity
from protocol.preprocessing import Preprocessing, preprocess

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}

Reference = Callable[[Image.Image], NDArray[np.float32]]
"""A picture to its feature, (L,) float32, as the network's authors would compute it."""


def sample_photos() -> list[Image.Image]:
    """Two real photographs that come with scikit-learn."""
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(picture) for picture in load_sample_images().images]


def photos_in(folder: Path) -> list[Image.Image]:
    """Every photograph in a folder.

    Raises:
        ConfigError: there is none, or one cannot be read.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise ConfigError(f"no photographs ({', '.join(sorted(SUFFIXES))}) in {folder}")
    return list(_read(paths))


def _read(paths: Iterable[Path]) -> Iterator[Image.Image]:
    for path in paths:
        try:
            with Image.open(path) as picture:
                yield picture.convert("RGB")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error}") from error


def timm_reference(module: nn.Module, config: dict[str, Any]) -> Reference:
    """The network behind its own evaluation transform."""
    from timm.data import create_transform

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transform = create_transform(**config)

    def feature(picture: Image.Image) -> NDArray[np.float32]:
        with torch.inference_mode():
            values: NDArray[np.float32] = module(transform(picture)[None])[0].numpy()
        return values

    return feature


def compare(
    file: bytes, *, preprocessing: Preprocessing, reference: Reference, photos: Sequence[Image.Image]
) -> Parity:
    """The worst cosine and relative error over photographs, alone and as one batch.

    Args:
        file: the ONNX backbone.
        preprocessing: what the device does to pictures.
        reference: what the features should be.
        photos: at least one.
    """
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    images = np.stack([preprocess(photo, preprocessing) for photo in photos])
    expected = np.stack([reference(photo) for photo in photos]).astype(np.float64)
    singly = np.concatenate([session.run(["feature"], {"image": image[None]})[0] for image in images])
    together = session.run(["feature"], {"image": images})[0]
    cosines, errors = [], []
    for features in (singly, together):
        ours = features.astype(np.float64)
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(expected, axis=1)
        cosines.append((ours * expected).sum(axis=1) / np.maximum(lengths, np.finfo(float).tiny))
        errors.append(np.linalg.norm(ours - expected, axis=1) / np.linalg.norm(expected, axis=1))
    return Parity(cosine=float(np.min(cosines)), relative_error=float(np.max(errors)), pictures=len(photos))
