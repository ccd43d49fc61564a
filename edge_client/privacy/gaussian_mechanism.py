"""Prototypes by the Gaussian mechanism, pure: one image more or less hardly changes what leaves the device.

**Unit and adjacency.** Two sets of images are neighbors if one of them has one image (a file) more. It belongs
to one class and goes into one batch, whatever other images there are: a keyed hash of its own identity says into
which.

**What is released of a class**, in two steps, s being the deviation of all noise in them, w = COUNT_WEIGHT and S
the norm that features are clipped to:

1. w n + s g, n being the number of the class's images. The number of batches M follows from nothing but this.
2. of each of the M batches, (sum of its clipped features / S, w n_b) + s g, L + 1 values; n_b is its number of
   images.

Every class of the task is released, also those without images. **Sensitivity:** the image changes step 1 by w
in one class, and step 2 by a vector of norm at most sqrt(1 + w^2) in one batch of that class. These are Gaussian
mechanisms with the multipliers s / w and s / sqrt(1 + w^2), the second chosen by what the first has given. Together
they are as one with the multiplier z, 1 / z^2 = w^2 / s^2 + (1 + w^2) / s^2 (Dong, Roth and Su 2022, Gaussian
differential privacy, section 3: compositions of Gaussian mechanisms are Gaussian, adaptive ones too). Hence s = z
sqrt(1 + 2 w^2), and **one submission is one Gaussian event of noise multiplier z**, which is what the accountant is
told.

All that follows (division, rounding, clipping to what float16 holds) is post-processing. What is computed in
float64 is not the mechanism of real numbers (Mironov 2012): docs/privacy.md says what that leaves open.
"""

import hashlib
import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.privacy.noise import gaussian, subkey
from protocol.errors import PrivacyRefused

COUNT_WEIGHT = 0.25
"""w: counts of a few dozen bear more noise than sums of a thousand values do, so that they get less of the budget."""

MAX_PROTOTYPES = 1024
"""Of one class: no noise, and nobody who chooses how much of it there is, makes a device run out of memory."""

_BLOCK_ROWS = 256
_ROUNDING = 1 - 1e-9
"""Clipped features are a hair shorter than S, so that no rounding makes one longer."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """How features become prototypes that may leave.

    Args:
        clip_norm: S, the L2 norm that a longer feature is shortened to.
        noise_multiplier: z, of one submission.
        batch_size: B, images in a prototype on average, at least.
        min_images: no prototype says that it has fewer.
    """

    clip_norm: float
    noise_multiplier: float
    batch_size: int
    min_images: int

    @property
    def noise(self) -> float:
        """Deviation s of the noise, where sums are counted in S."""
        return self.noise_multiplier * math.sqrt(1 + 2 * COUNT_WEIGHT**2)


def private_prototypes(
    features: NDArray[np.float32],
    identities: Sequence[str],
    mechanism: Mechanism,
    *,
    secret: bytes,
    key: bytes,
) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Average the features of one class into prototypes by the Gaussian mechanism.

    Args:
        features: float32 (n, L), finite; n may be 0.
        identities: (n,), of the images, each another one.
        mechanism: how much noise, and how it is cut.
        secret: the device's, 32 bytes: by it images are dealt out to batches, always in the same way.
        key: 32 bytes from the operating system's randomness, for this class of this release and for no other: all noise
            follows from it. The same inputs with the same key are the same release, which costs nothing more. Other
            inputs with a key that was used give away the difference.

    Returns:
        Prototypes float32 (m, L), and the noisy number of images in each, rounded and raised to `min_images`,
        uint32 (m,): where batches are small, counts are too large on average, and prototypes too short. There
        are floor(noisy n / B) of them, and none where the noisy n is below `min_images` or B.

    Raises:
        PrivacyRefused: a setting out of its range, or a feature that is not finite.
    """
    _check(features, identities, mechanism)
    count_noise = mechanism.noise / COUNT_WEIGHT
    noisy_images = len(features) + count_noise * float(gaussian(subkey(key, b"class"), (1,))[0])
    batches = _batches(noisy_images, mechanism)
    size = features.shape[1]
    dealt = np.array([_batch_of(identity, batches, secret) for identity in identities], dtype=np.intp)
    sums = _clipped_sums(features, dealt, batches=batches, clip_norm=mechanism.clip_norm)
    noise = gaussian(subkey(key, b"batches"), (batches, size + 1))
    sums += mechanism.noise * noise[:, :size]
    counts = np.bincount(dealt, minlength=batches) + count_noise * noise[:, size]
    values = mechanism.clip_norm * sums / np.maximum(counts, 1)[:, None]
    least = max(mechanism.min_images, 1)
    return values.astype(np.float32), np.maximum(np.rint(counts), least).astype(np.uint32)


def _batches(noisy_images: float, mechanism: Mechanism) -> int:
    if noisy_images < max(mechanism.min_images, mechanism.batch_size):
        return 0
    return min(int(noisy_images // mechanism.batch_size), MAX_PROTOTYPES)


def _batch_of(identity: str, batches: int, secret: bytes) -> int:
    """The batch of an image, which no other image has a say in; 0 where there are none, and nothing is released."""
    name = identity.encode(errors="surrogateescape")
    drawn = hmac.digest(secret, name, hashlib.sha256)
    return int.from_bytes(drawn[:8], "big") % max(batches, 1)


def _clipped_sums(
    features: NDArray[np.float32], dealt: NDArray[np.intp], *, batches: int, clip_norm: float
) -> NDArray[np.float64]:
    """Sums of the clipped features of each batch in units of S, float64 (M, L); of no feature more than 1 is in it."""
    sums = np.zeros((batches, features.shape[1]))
    if not batches:
        return sums
    for start in range(0, len(features), _BLOCK_ROWS):
        block = features[start : start + _BLOCK_ROWS].astype(np.float64) / clip_norm
        norms = np.linalg.norm(block, axis=1, keepdims=True)
        block *= _ROUNDING / np.maximum(norms, 1)
        np.add.at(sums, dealt[start : start + _BLOCK_ROWS], block)
    if not np.isfinite(sums).all():
        raise PrivacyRefused("clipping has failed: nothing is uploaded")
    return sums


def _check(features: NDArray[np.float32], identities: Sequence[str], mechanism: Mechanism) -> None:
    positive = (mechanism.clip_norm, mechanism.noise_multiplier)
    if not all(math.isfinite(value) and value > 0 for value in positive):
        raise PrivacyRefused("the norm to clip to and the noise must be above 0: nothing is uploaded")
    if features.ndim != 2 or len(features) != len(identities) or len(set(identities)) != len(identities):
        raise PrivacyRefused("expected one feature of each image, each image once: nothing is uploaded")
    if not np.isfinite(features).all():
        raise PrivacyRefused("a feature is not finite: nothing is uploaded")
