"""Share of the variance of pixels within classes that reconstructions explain, and a linear decoder."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from research.privacy.decoder import Decoder, as_values, decode
from research.privacy.reconstruction import Form, Scene, class_looks

STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)
"""Ridge relative to the mean variance of a value; held-out public images choose."""
FITTED = 0.8
"""Share of the public images that each candidate is fitted to; the others choose."""


@dataclass(frozen=True)
class LinearDecoder:
    """Ridge regression from the deviation of a feature from its class mean to that of the pixels."""

    centers: NDArray[np.float32]
    """Mean public feature of each class, (C, L)."""
    looks: NDArray[np.float32]
    """Mean public image of each class, (C, P)."""
    weights: NDArray[np.float32]
    """(L, P)."""

    def decode(self, features: NDArray[np.float32], labels: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return pixels (n, P), not clipped, for features (n, L) of known classes (n,)."""
        pixels: NDArray[np.float32] = (
            self.looks[labels] + (features - self.centers[labels]) @ self.weights
        ).astype(np.float32)
        return pixels


def fit_linear(scene: Scene) -> LinearDecoder:
    """Fit a linear decoder to the public images."""
    features, labels = scene.public
    looks = class_looks(scene).reshape(len(scene.non_members), -1)
    centers = np.stack([features[labels == label].mean(axis=0) for label in scene.non_members])
    deviations = features - centers[labels]
    pixels = as_values(scene.public_images).reshape(len(features), -1) - looks[labels]
    end = int(FITTED * len(features))
    errors = {
        strength: float(np.square(pixels[end:] - deviations[end:] @ weights).sum())
        for strength, weights in ridges(deviations[:end], pixels[:end], STRENGTHS).items()
    }
    best = min(errors, key=errors.__getitem__)
    return LinearDecoder(centers, looks, ridges(deviations, pixels, (best,))[best])


def ridges(
    inputs: NDArray[np.float32], outputs: NDArray[np.float32], strengths: tuple[float, ...]
) -> dict[float, NDArray[np.float32]]:
    """Return the ridge regression (L, P) of outputs (n, P) on inputs (n, L) with each strength."""
    variances, axes = np.linalg.eigh((inputs.T @ inputs).astype(np.float64))
    along = axes.T @ (inputs.T @ outputs)
    return {
        strength: (axes @ (along / (variances.clip(0) + strength * variances.mean())[:, None])).astype(
            np.float32
        )
        for strength in strengths
    }


def explained(scene: Scene, form: Form, *, linear: LinearDecoder, decoder: Decoder) -> tuple[float, float]:
    """Return R^2 beyond the mean public image of the class, by the linear and by the trained decoder.

    Each image in a prototype is compared with the reconstruction from the prototype.
    """
    shape, release = scene.images.shape[1:], form.release
    trained = decode(decoder, form.guess, shape).reshape(len(form.guess), -1)
    sums = np.zeros(3)
    for number, members in enumerate(release.members):
        look = linear.looks[release.labels[number]]
        own = scene.images[members].reshape(len(members), -1)
        predicted = linear.decode(form.guess[number][None], release.labels[number][None])
        sums += [float(np.square(own - each).sum()) for each in (look, predicted, trained[number])]
    total, by_line, by_network = sums
    return 1 - by_line / total, 1 - by_network / total
