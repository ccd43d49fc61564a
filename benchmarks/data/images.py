"""Public data sets from the folder of real data, as arrays of images."""

import io
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protocol.errors import ConfigError

ROOT = Path(__file__).parents[2]
NAMES = ("mnist", "fashion_mnist", "cifar10")
ARCHIVES = ("cifar10", "cifar100", "pacs", "tiny_imagenet")
"""Data sets that are archives of image files; others are arrays."""
DIGITS = ("mnist", "usps", "mnist_m", "digits")
"""Ten digits in four hands: the domains of one benchmark."""
PACS = ("pacs_photo", "pacs_art_painting", "pacs_cartoon", "pacs_sketch")
"""Seven things as photographs and as three kinds of image: the domains of another."""
MNIST_TEST_IMAGES = 10_000
PAIRED = 2500
"""Sampled test images of MNIST that have no twin among MNIST-M's training images."""


@dataclass(frozen=True)
class Labeled:
    """Images (n, H, W) gray or (n, H, W, 3) RGB, uint8, and their classes (n,) int64."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class DataSet:
    """Images that are divided among devices, and images for the evaluation."""

    train: Labeled
    test: Labeled


class MissingFile(ConfigError):
    """A file of data or weights is not in its folder."""


def data_folder() -> Path:
    """Return where the data sets lie: PROTOFLEET_BENCH_DATA, or ../shared/data beside the repository."""
    return Path(os.environ.get("PROTOFLEET_BENCH_DATA", ROOT.parent / "shared" / "data"))


def weights_folder() -> Path:
    """Return where weights lie: PROTOFLEET_BENCH_WEIGHTS, or ../shared/weights beside the repository."""
    return Path(os.environ.get("PROTOFLEET_BENCH_WEIGHTS", ROOT.parent / "shared" / "weights"))


def load_data(name: str) -> DataSet:
    """Load one of NAMES, DIGITS, ARCHIVES or PACS; what comes in one part is always cut in the same two.

    Raises:
        MissingFile: it is not in the data folder.
    """
    if name == "digits":
        return _scikit_learn_digits()
    kind = "pacs" if name in PACS else name
    path = data_folder() / (f"{kind}.zip" if kind in ARCHIVES else f"{name}.npz")
    if not path.is_file():
        raise MissingFile(
            f"no {path}: put it there, or point PROTOFLEET_BENCH_DATA at the folder that has it"
        )
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            if kind == "pacs":
                domains = PACS if name == kind else (name,)
                parts = [
                    _cut(_unzip(archive, each.removeprefix("pacs_")), train_share=0.5) for each in domains
                ]
                return DataSet(
                    _pooled([each.train for each in parts]), _pooled([each.test for each in parts])
                )
            return DataSet(_unzip(archive, "train"), _unzip(archive, "test"))
    with np.load(path) as arrays:
        if name == "mnist_m":
            return _cut_by_source(Labeled(arrays["x"], arrays["y"].astype(np.int64)))
        return DataSet(
            *(
                Labeled(arrays[f"x_{part}"], arrays[f"y_{part}"].astype(np.int64))
                for part in ("train", "test")
            )
        )


def sample(data: Labeled, count: int) -> Labeled:
    """Return `count` of the images, or all if there are no more, the same ones every time."""
    return _rows(data, np.sort(_shuffled(len(data.labels))[:count]))


def _shuffled(count: int) -> NDArray[np.int64]:
    """Return the numbers below `count` in the order in which `sample` takes images."""
    return np.random.default_rng(0).permutation(count)


def _rows(data: Labeled, rows: NDArray[np.int64]) -> Labeled:
    return Labeled(data.images[rows], data.labels[rows])


def _pooled(parts: Sequence[Labeled]) -> Labeled:
    return Labeled(
        np.concatenate([each.images for each in parts]), np.concatenate([each.labels for each in parts])
    )


def _cut_by_source(data: Labeled) -> DataSet:
    """Cut MNIST-M, whose image i is made of MNIST's test image i.

    Images made of the first PAIRED that `sample` takes are for evaluation: no image for training has a twin there.
    """
    order = _shuffled(MNIST_TEST_IMAGES)
    held_out, rest = (np.sort(part[part < len(data.labels)]) for part in (order[:PAIRED], order[PAIRED:]))
    return DataSet(_rows(data, rest), _rows(data, held_out))


def _scikit_learn_digits() -> DataSet:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8) * 15).astype(np.uint8)
    return _cut(Labeled(images, labels.astype(np.int64)), train_share=0.55)


def _cut(data: Labeled, *, train_share: float) -> DataSet:
    """Cut every class in two, at random but the same way every time."""
    order = np.random.default_rng(0).permutation(len(data.labels))
    by_class = [order[data.labels[order] == label] for label in np.unique(data.labels)]
    ends = [round(train_share * len(members)) for members in by_class]
    train = np.concatenate([members[:end] for members, end in zip(by_class, ends, strict=True)])
    test = np.concatenate([members[end:] for members, end in zip(by_class, ends, strict=True)])
    return DataSet(_rows(data, train), _rows(data, test))


def _unzip(archive: zipfile.ZipFile, part: str) -> Labeled:
    """Decode `part/class/*.jpg`, `*.JPEG` or `*.png`; classes are numbered in the order of their names."""
    names = sorted(
        name
        for name in archive.namelist()
        if name.startswith(f"{part}/") and name.endswith((".jpg", ".JPEG", ".png"))
    )
    folders = [name.split("/")[1] for name in names]
    images = [np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB")) for name in names]
    return Labeled(np.stack(images), np.unique(folders, return_inverse=True)[1].astype(np.int64))
