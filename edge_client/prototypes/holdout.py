"""The held-out images of a device: which images heads are evaluated on."""

import hashlib
import math
import os
from collections.abc import Collection, Sequence
from fractions import Fraction

from edge_client.images.images import LabeledImage

FEW_IMAGES = 5
"""Images of a class from which at least one is held out."""


def held_out(
    images: Sequence[LabeledImage], fraction: float, *, grouped: Collection[str] = frozenset()
) -> frozenset[str]:
    """Return the relative paths of the images that are held out of the prototypes, to evaluate heads on.

    Of each class, these are the images with the lowest hashes of their paths, except those in `grouped`, which were in
    a prototype. Laws: other classes and the order of the images do not matter; one image more
    in a class changes the side of at most one of the others.
    """
    classes: dict[int, list[str]] = {}
    for image in images:
        classes.setdefault(image.label, []).append(image.relative)
    return frozenset(
        path
        for paths in classes.values()
        for path in sorted(set(paths) - set(grouped), key=_rank)[: held_out_count(len(paths), fraction)]
    )


def held_out_count(images: int, fraction: float) -> int:
    """Return how many of a class's images are held out: the fraction rounded down, and at least one of FEW_IMAGES."""
    least = 1 if fraction > 0 and images >= FEW_IMAGES else 0
    return max(least, math.floor(Fraction(str(fraction)) * images))


def _rank(path: str) -> bytes:
    return hashlib.sha256(os.fsencode(path)).digest()
