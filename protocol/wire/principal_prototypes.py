"""Principal prototypes: a second form of prototypes, of a block of at least 50 images. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_BLOCK_IMAGES = 50
"""Images of a block, at least."""

MIN_GROUP_IMAGES = 5
"""Images of a group in a block, at least, whatever the task says."""

IMAGES_PER_ROW = 10
"""Images of a block for each row, at least."""

MAX_VALUES = 4096
"""Values of a prototype, at most: the scatter of more does not fit in a device's memory."""


@dataclass(frozen=True, eq=False)
class PrincipalPrototypes:
    """The principal prototypes of a block of images, or of several blocks of a device, one after the other.

    Attributes:
        means: float32 (p, L), the mean of each class of each block.
        labels: int64 (p,), the class of each mean.
        counts: int64 (p,), the images in each mean.
        rows: float32 (k, L), the strongest directions of the scatter within these classes, each times the root of its
            eigenvalue: sums of the images' deviations from their means, with fixed coefficients.
        diagonal: float32 (L,), not negative: what is left of the sum of squared deviations of each value.
    """

    means: NDArray[np.float32]
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: NDArray[np.float32]
    diagonal: NDArray[np.float32]

    @property
    def images(self) -> int:
        return int(self.counts.sum())


def joined(blocks: Sequence[PrincipalPrototypes]) -> PrincipalPrototypes:
    """Return the principal prototypes of several blocks as one."""
    return PrincipalPrototypes(
        means=np.concatenate([each.means for each in blocks]),
        labels=np.concatenate([each.labels for each in blocks]),
        counts=np.concatenate([each.counts for each in blocks]),
        rows=np.concatenate([each.rows for each in blocks]),
        diagonal=np.sum([each.diagonal for each in blocks], axis=0, dtype=np.float32),
    )
