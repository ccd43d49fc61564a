"""The demo's data: scikit-learn's 1,797 real handwritten digits, divided among devices as folders of images."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

CLASSES = tuple("0123456789")
CLASSES_EACH = 2
"""Classes that a device has images of: the sharding of the federated papers with delta = 2."""
FEWEST_DEVICES = len(CLASSES) // CLASSES_EACH
"""Fewer could not have images of every class."""
INK = 16
"""The darkest of the 8 x 8 cells: each counts the set pixels of a 4 x 4 patch of the scan."""


@dataclass(frozen=True)
class Digits:
    """Images (n, 8, 8), white on black, and their digits (n,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.intp]


@dataclass(frozen=True)
class Deal:
    """Division of the images: ascending numbers for each device, and of the images that no device gets."""

    shares: tuple[NDArray[np.intp], ...]
    held_out: NDArray[np.intp]


def load() -> Digits:
    """Read the digits that come with scikit-learn."""
    data = load_digits()
    images = np.rint(data.images * (255 / INK)).astype(np.uint8)
    return Digits(images, data.target.astype(np.intp))


def deal(labels: NDArray[np.intp], *, devices: int, seed: int, held_out: float = 0.2) -> Deal:
    """Hold a share of every class out, and divide the rest: two classes to a device, every class to some device.

    The classes are shuffled and dealt in pairs, like cards, until every device has two; the devices with a class share
    its images evenly.

    Raises:
        ValueError: too few devices for all classes.
    """
    if devices < FEWEST_DEVICES:
        raise ValueError(f"at least {FEWEST_DEVICES} devices cover {len(CLASSES)} classes, not {devices}")
    rng = np.random.default_rng(seed)
    decks = -(-devices // FEWEST_DEVICES)
    cards = np.concatenate([rng.permutation(len(CLASSES)) for _ in range(decks)])
    hands = cards[: devices * CLASSES_EACH].reshape(devices, CLASSES_EACH)
    kept_back: list[NDArray[np.intp]] = []
    shares: list[list[NDArray[np.intp]]] = [[] for _ in range(devices)]
    for label in range(len(CLASSES)):
        members = rng.permutation(np.flatnonzero(labels == label))
        back, rest = np.split(members, [round(held_out * len(members))])
        kept_back.append(back)
        owners = np.flatnonzero((hands == label).any(axis=1))
        for owner, part in zip(owners, np.array_split(rest, len(owners)), strict=True):
            shares[owner].append(part)
    return Deal(tuple(np.sort(np.concatenate(share)) for share in shares), np.sort(np.concatenate(kept_back)))


def write_images(folder: Path, digits: Digits, numbers: NDArray[np.intp]) -> None:
    """Write images as PNG files, in one sub-folder a class."""
    for number in numbers:
        place = folder / CLASSES[digits.labels[number]]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images[number]).save(place / f"{number:04}.png")
