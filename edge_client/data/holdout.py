"""The held-out images of a device: which images heads are evaluated on."""

import hashlib
import os

from edge_client.data.images import LabeledImage


def held_out(image: LabeledImage, fraction: float) -> bool:
    """Return whether an image is held out of the prototypes, to evaluate heads on.

    This depends only on its relative path, so that neither other images nor a restart change it.
    """
    drawn = hashlib.sha256(os.fsencode(image.relative)).digest()[:8]
    return int.from_bytes(drawn, "big") < fraction * 2**64
