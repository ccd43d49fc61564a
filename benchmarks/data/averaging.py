"""Prototypes of one class on a device that uploads for the first time, by the device's own functions."""

import numpy as np
from numpy.typing import NDArray

from edge_client.data.outlier_filter import closest_features
from edge_client.data.prototype_averaging import average


def averaged(
    features: NDArray[np.float32],
    *,
    batch: int,
    rng: np.random.Generator,
    alpha: float = 1.0,
    min_images: int = 2,
) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Return prototypes (m, L) of features (n, L), and the number of images in each, (m,) (FedTC eq. 1-4).

    Laws: the counts add up to the images kept, and the count-weighted mean of the prototypes is the mean of the kept
    features. The remainder of the batches joins the last one; fewer than `min_images` give no prototype.
    """
    kept = np.flatnonzero(closest_features(lambda: [features], alpha=alpha))
    batches = max(len(kept) // batch, int(len(kept) >= min(min_images, batch)))
    kept = kept if batches else kept[:0]
    numbers = np.minimum(np.arange(len(kept)) // batch, batches - 1)
    in_order = np.argsort(rng.permutation(len(kept)))
    return average(lambda: [features[kept]], numbers[in_order])
