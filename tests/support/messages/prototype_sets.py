"""Prototypes of synthetic fleets, with correct and with shifted labels."""

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Contribution
from aggregator.intake.validation import Prototypes
from protocol.wire.principal_prototypes import PrincipalPrototypes
from tests.support.messages.submissions import FEATURE_SIZE

CLASSES = ("cat", "dog", "fox")
IMAGES = 5
BLOB_SIZE = 8
Features = NDArray[np.float32]
Integers = NDArray[np.int64]


def honest(
    device: int, *, labels: tuple[int, ...] = (0, 1, 2), prototypes: int = 6, shift: float = 0.1
) -> Prototypes:
    """Return the prototypes of a device with these classes, whose means differ by `shift` from the other devices'."""
    random = np.random.default_rng(device)
    centers = 3 * np.random.default_rng(0).normal(size=(len(CLASSES), FEATURE_SIZE))
    centers = centers + shift * random.normal(size=centers.shape)
    of = np.repeat(np.array(labels), prototypes)
    noise = random.normal(size=(len(of), FEATURE_SIZE)) / np.sqrt(IMAGES)
    return Prototypes((centers[of] + noise).astype(np.float32), of, np.full(len(of), IMAGES))


def flipped(part: Prototypes) -> Prototypes:
    return Prototypes(part.values, (part.labels + 1) % len(CLASSES), part.counts)


def fleet(devices: int, *, shift: float = 0.1) -> dict[str, Prototypes]:
    return {f"dev{device}": honest(device, shift=shift) for device in range(devices)}


def blobs(*labels: int, per_class: int = 20, seed: int = 0) -> tuple[Features, Integers, Integers]:
    """Return prototypes of well separated classes, one unit vector per class and noise, with labels and counts."""
    rng = np.random.default_rng(seed)
    of = np.repeat(labels, per_class)
    noise = rng.normal(scale=0.1, size=(len(of), BLOB_SIZE))
    return (np.eye(BLOB_SIZE)[of] + noise).astype(np.float32), of, np.full(len(of), IMAGES)


def uploaded(
    device: str, prototypes: dict[int, list[float]], counts: dict[int, int] | None = None
) -> Contribution:
    """Return a contribution of prototypes by class, of one image each without counts."""
    labels = sorted(prototypes)
    return Contribution(
        device=device,
        values=np.array([prototypes[label] for label in labels] or np.zeros((0, 2)), dtype=np.float32),
        labels=np.array(labels, dtype=np.int64),
        counts=np.array([(counts or {}).get(label, 1) for label in labels], dtype=np.int64),
        tensors={},
    )


def in_blocks(
    device: int, *, labels: tuple[int, ...] = (0, 1, 2), images: int = 30, shift: float = 0.1
) -> Prototypes:
    """Return a device like `honest` whose images, so many of each class, are in a block."""
    random = np.random.default_rng(device)
    centers = 3 * np.random.default_rng(0).normal(size=(len(CLASSES), FEATURE_SIZE))
    centers = centers + shift * random.normal(size=centers.shape)
    means = centers[list(labels)] + random.normal(size=(len(labels), FEATURE_SIZE)) / np.sqrt(images)
    number = images * len(labels)
    rows = np.sqrt(number) * np.eye(3, FEATURE_SIZE)
    left = number * (np.arange(FEATURE_SIZE) >= len(rows))
    block = PrincipalPrototypes(
        *(means.astype(np.float32), np.array(labels), np.full(len(labels), images)),
        *(rows.astype(np.float32), left.astype(np.float32)),
    )
    nothing = np.zeros(0, np.int64)
    return Prototypes(np.zeros((0, FEATURE_SIZE), np.float32), nothing, nothing, block=block)
