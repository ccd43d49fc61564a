"""Prototypes by the Gaussian mechanism: adding or removing one image hardly changes what leaves the device. Pure.

**Adjacency.** Two sets of images are neighbors if one has one image (a file) more. It belongs to one class and one
batch, whatever other images there are: a keyed hash of its identity determines the batch.

**Released for a class**, in two steps, with noise of standard deviation s, w = COUNT_WEIGHT and clipping norm S:

1. w n + s g, n being the number of the class's images. Only this determines the number of batches M.
2. for each of the M batches, (sum of its clipped features / S, w n_b) + s g, L + 1 values; n_b is its number of
   images.

Every class of the task is released, also those without images. **Sensitivity:** the image changes step 1 by w
in one class, and step 2 by a vector of norm at most sqrt(1 + w^2) in one batch of that class. These are Gaussian
mechanisms with the multipliers s / w and s / sqrt(1 + w^2), the second chosen by the result of the first. Together
they are equivalent to one with the multiplier z, 1 / z^2 = w^2 / s^2 + (1 + w^2) / s^2 (Dong, Roth and Su 2022,
Gaussian differential privacy, section 3: adaptive compositions of Gaussian mechanisms are Gaussian). Hence s = z
sqrt(1 + 2 w^2), and **one submission is one Gaussian event of noise multiplier z** for the accountant.

Everything after that (division, rounding, clipping to float16) is post-processing. A computation in float64 is not
the mechanism of real numbers (Mironov 2012): docs/privacy.md states what remains open.
"""

import hashlib
import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.privacy.noise import gaussian
from edge_client.privacy.noise_key import subkey
from protocol.errors import PrivacyRefused

COUNT_WEIGHT = 0.25
"""w: counts tolerate more noise than sums of a thousand values do, and get less of the budget."""

MAX_PROTOTYPES = 1024
"""Per class."""

MAX_VALUES = 2**24
"""Values of a submission, 32 MiB as float16: no noise, whatever its amount, exhausts the device's memory."""

TOO_LARGE = "the task asks for more classes and features than differential privacy is made for on a device"

_BLOCK_ROWS = 256
_ROUNDING = 1 - 1e-9
"""Features are clipped slightly below S, so that rounding cannot exceed it."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """The parameters of the mechanism."""

    clip_norm: float
    """S, the L2 norm that longer features are scaled to."""
    noise_multiplier: float
    """z, of one submission."""
    batch_size: int
    """B, the least number of images in a prototype on average."""
    min_images: int
    """The least count of a prototype."""
    max_prototypes: int = MAX_PROTOTYPES
    """Prototypes of a class; with more images, batches are larger."""

    @property
    def noise(self) -> float:
        """Standard deviation s of the noise, in units of S."""
        return self.noise_multiplier * math.sqrt(1 + 2 * COUNT_WEIGHT**2)


def max_prototypes(classes: int, feature_size: int) -> int:
    """Return how many prototypes each class may have, so that all of a submission's values stay within MAX_VALUES.

    Raises:
        PrivacyRefused: not even one prototype of each class does.
    """
    most = min(MAX_PROTOTYPES, MAX_VALUES // (classes * (feature_size + 1)))
    if not most:
        raise PrivacyRefused(TOO_LARGE)
    return most


def private_prototypes(
    features: NDArray[np.float32],
    identities: Sequence[str],
    mechanism: Mechanism,
    *,
    secret: bytes,
    key: bytes,
) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Return prototypes of one class by the Gaussian mechanism, and their noisy counts.

    Args:
        features: float32 (n, L), finite; n may be 0.
        identities: (n,), of the images, all different.
        mechanism: the parameters.
        secret: the device's, 32 bytes; it determines each image's batch.
        key: 32 random bytes from the operating system, used for this class of this release only: the noise is derived
            from it. The same inputs with the same key are the same release, which costs nothing more. Other inputs
            with a used key would reveal their difference.

    Returns:
        Prototypes float32 (m, L), and the noisy number of images in each, rounded and at least `min_images`,
        uint32 (m,): for small batches, counts are too large and prototypes too short on average. There are
        floor(noisy n / B) of them, at most `max_prototypes`, and none if the noisy n is below `min_images` or B.

    Raises:
        PrivacyRefused: a parameter is out of range, or a feature is not finite.
    """
    if not all(
        math.isfinite(value) and value > 0 for value in (mechanism.clip_norm, mechanism.noise_multiplier)
    ):
        raise PrivacyRefused("the clipping norm and the noise must be above 0: nothing is uploaded")
    if features.ndim != 2 or len(features) != len(identities) or len(set(identities)) != len(identities):
        raise PrivacyRefused("expected one feature per image, each image once: nothing is uploaded")
    if not np.isfinite(features).all():
        raise PrivacyRefused("a feature is not finite: nothing is uploaded")
    count_noise = mechanism.noise / COUNT_WEIGHT
    noisy_images = len(features) + count_noise * float(gaussian(subkey(key, b"class"), (1,))[0])
    batches = _batches(noisy_images, mechanism)
    size = features.shape[1]
    assigned = np.array([_batch_of(identity, batches, secret) for identity in identities], dtype=np.intp)
    sums = _clipped_sums(features, assigned, batches=batches, clip_norm=mechanism.clip_norm)
    noise = gaussian(subkey(key, b"batches"), (batches, size + 1))
    sums += mechanism.noise * noise[:, :size]
    counts = np.bincount(assigned, minlength=batches) + count_noise * noise[:, size]
    values = mechanism.clip_norm * sums / np.maximum(counts, 1)[:, None]
    least = max(mechanism.min_images, 1)
    return values.astype(np.float32), np.maximum(np.rint(counts), least).astype(np.uint32)


def _batches(noisy_images: float, mechanism: Mechanism) -> int:
    if noisy_images < max(mechanism.min_images, mechanism.batch_size):
        return 0
    return min(int(noisy_images // mechanism.batch_size), mechanism.max_prototypes)


def _batch_of(identity: str, batches: int, secret: bytes) -> int:
    """Return an image's batch, which no other image influences; 0 if there are none."""
    name = identity.encode(errors="surrogateescape")
    drawn = hmac.digest(secret, name, hashlib.sha256)
    return int.from_bytes(drawn[:8], "big") % max(batches, 1)


def _clipped_sums(
    features: NDArray[np.float32], assigned: NDArray[np.intp], *, batches: int, clip_norm: float
) -> NDArray[np.float64]:
    """Return each batch's sum of clipped features in units of S, float64 (M, L); each contributes at most norm 1."""
    sums = np.zeros((batches, features.shape[1]))
    if not batches:
        return sums
    for start in range(0, len(features), _BLOCK_ROWS):
        block = features[start : start + _BLOCK_ROWS].astype(np.float64) / clip_norm
        norms = np.linalg.norm(block, axis=1, keepdims=True)
        block *= _ROUNDING / np.maximum(norms, 1)
        np.add.at(sums, assigned[start : start + _BLOCK_ROWS], block)
    if not np.isfinite(sums).all():
        raise PrivacyRefused("clipping failed: nothing is uploaded")
    return sums
