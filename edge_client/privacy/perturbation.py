"""Perturbation as in FedTC (appendix C.2, eq. 6): t <- t (1 - p) + s e, on prototypes or images. Pure.

It makes uploads less exact, and guarantees nothing beyond that. The noise is derived from the device's secret and from
the values it is added to: the same images give the same submission, and repeated requests do not average it away.
Other settings give independent noise: from t (1 - p) + s e for two pairs of p and s with one e, t could be computed.
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_client.privacy.noise import NOISES
from edge_client.privacy.noise_key import KEY_BYTES, subkey
from protocol.errors import PrivacyRefused
from protocol.models.preprocessing import Preprocessing
from protocol.wire.codec import digest_of
from protocol.wire.messages import Perturbation

MAX_FLOAT16 = 65504.0


def perturb_prototypes(
    prototypes: NDArray[np.float32], labels: NDArray[np.uint32], how: Perturbation, *, secret: bytes
) -> NDArray[np.float16]:
    """Return perturbed prototypes (m, L) of the classes in `labels`, clipped to the range of float16.

    Each prototype has independent noise, which is always the same for the same prototype of the same class.

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
    """Return a preprocessed image (H, W, 3) with noise on its values from 0 to 1, clipped and rounded.

    The noise of an image is always the same; another preprocessing gives other pixels, and independent noise.

    Raises:
        PrivacyRefused: there is no secret.
    """
    unit = pixels.astype(np.float64) / 255
    _check(secret, unit)
    name = identity.encode(errors="surrogateescape")
    key = subkey(secret, b"image", msgspec.json.encode(how), name, msgspec.json.encode(wanted))
    return np.rint(np.clip(_perturb(unit, how, key), 0, 1) * 255).astype(np.uint8)


def cache_tag(how: Perturbation) -> str:
    """Return the cache's tag of the features of images perturbed in this way."""
    return f"+{digest_of(msgspec.json.encode(how)).hex()[:32]}"


def to_half(values: NDArray[np.floating[Any]]) -> NDArray[np.float16]:
    """Return finite values as float16, clipped to its range."""
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
        raise PrivacyRefused("the task asks for perturbation, and this device has no secret for its noise")
    if not np.isfinite(values).all():
        raise PrivacyRefused("a value to perturb is not finite: nothing is uploaded")
