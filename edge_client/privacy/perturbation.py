"""Perturbation as in FedTC (appendix C.2, eq. 6), pure: t <- t (1 - p) + e, on prototypes or on images.

It makes what leaves a device less exact, and that is all that can be said of it: it bounds nothing. The noise hangs on
a secret of the device and on what it is added to, so that the same images make the same submission, and asking again
averages nothing away. Other settings give noise that has nothing to do with it: of t (1 - p) + s e for two pairs
of p and s with one e, anybody could solve for t.
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_client.privacy.noise import KEY_BYTES, NOISES, subkey
from protocol.errors import PrivacyRefused
from protocol.preprocessing import Preprocessing
from protocol.wire.codec import digest_of
from protocol.wire.messages import Perturbation

MAX_FLOAT16 = 65504.0


def perturb_prototypes(
    prototypes: NDArray[np.float32], labels: NDArray[np.uint32], how: Perturbation, *, secret: bytes
) -> NDArray[np.float16]:
    """Perturb prototypes, each with noise of its own, which is the same for the same prototype of the same class.

    Args:
        prototypes: float32 (m, L), finite.
        labels: uint32 (m,).
        how: what noise, and how much of it.
        secret: the device's, 32 bytes.

    Returns:
        float16 (m, L), finite: what grows past float16 becomes the greatest that it holds.

    Raises:
        PrivacyRefused: there is no secret, or a prototype is not finite.
    """
    _check(secret, prototypes)
    perturbed = np.empty(prototypes.shape, np.float16)
    for row, (prototype, label) in enumerate(zip(prototypes, labels, strict=True)):
        key = subkey(secret, b"prototype", msgspec.json.encode(how), b"%d" % label, prototype.tobytes())
        perturbed[row] = to_half(_perturb(prototype, how, key))
    return perturbed


def perturb_image(
    pixels: NDArray[np.uint8], how: Perturbation, *, identity: str, wanted: Preprocessing, secret: bytes
) -> NDArray[np.uint8]:
    """Perturb an image as it is before the backbone, its values taken from 0 to 1, once and for all.

    Args:
        pixels: uint8 (H, W, 3).
        how: what noise, and how much of it.
        identity: the image's.
        wanted: how it got its size, for a backbone that wants it otherwise gets other pixels.
        secret: the device's, 32 bytes.

    Returns:
        uint8 (H, W, 3): what leaves the range from 0 to 1 is cut off, and the rest is rounded.

    Raises:
        PrivacyRefused: there is no secret.
    """
    unit = pixels.astype(np.float64) / 255
    _check(secret, unit)
    name = identity.encode(errors="surrogateescape")
    key = subkey(secret, b"image", msgspec.json.encode(how), name, msgspec.json.encode(wanted))
    return np.rint(np.clip(_perturb(unit, how, key), 0, 1) * 255).astype(np.uint8)


def cache_tag(how: Perturbation) -> str:
    """What tells features of images perturbed in this way from all others in the cache."""
    return f"+{digest_of(msgspec.json.encode(how)).hex()[:32]}"


def to_half(values: NDArray[np.floating[Any]]) -> NDArray[np.float16]:
    """Finite values as float16; what it does not hold becomes the greatest that it does."""
    half: NDArray[np.float16] = np.clip(values, -MAX_FLOAT16, MAX_FLOAT16).astype(np.float16)
    return half


def _perturb(
    values: NDArray[np.float32] | NDArray[np.float64], how: Perturbation, key: bytes
) -> NDArray[np.float64]:
    noise = how.scale * NOISES[how.noise](key, values.shape)
    perturbed: NDArray[np.float64] = values.astype(np.float64) * (1 - how.shrink) + noise
    return perturbed


def _check(secret: bytes, values: NDArray[np.float32] | NDArray[np.float64]) -> None:
    if len(secret) != KEY_BYTES:
        raise PrivacyRefused(
            "the task wants what leaves this device perturbed, and there is no secret for it"
        )
    if not np.isfinite(values).all():
        raise PrivacyRefused("what is to be perturbed is not finite: nothing is uploaded")
