"""What a device has uploaded last, and whether enough has changed since: what two submissions differ in can be told.

The prototypes of a class, weighted by their counts, add up to the sum of its features. So what lies between two
submissions is the sum of the features that came, less that of those that went: of one image, that is its feature.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_client.data.images import LabeledImage
from edge_client.storage.facts import UploadedImages
from protocol.errors import MalformedMessage
from protocol.wire.codec import decode, digest_of, to_array
from protocol.wire.messages import Submission

KEY_BYTES = 8
"""Of an image's name as it is remembered: enough to tell one device's images apart."""


@dataclass(frozen=True)
class LastSubmission:
    """A device's last submission.

    Args:
        images: of each class by name, the keys of the images behind its prototypes.
        submission: it, if it is of the same task.
    """

    images: Mapping[str, frozenset[str]] = field(default_factory=dict)
    submission: Submission | None = None

    def waiting(self, name: str, kept: Sequence[LabeledImage], *, least: int) -> int:
        """Images of a class that have come or gone, if they are fewer than `least`; else 0, and they count.

        All of a class may come at once, or go: a prototype of few is the task's to allow.
        """
        before, now = self.images.get(name, frozenset()), keys_of(kept)
        changed = len(before ^ now)
        return changed if before and now and changed < least else 0

    def stays(self, name: str, kept: Sequence[LabeledImage]) -> list[LabeledImage] | None:
        """Those of the images that were uploaded; None if some of those that were are gone."""
        before = self.images.get(name, frozenset())
        same = [image for image in kept if key_of(image) in before]
        return same if len(same) == len(before) else None

    def rows(self, label: int) -> tuple[NDArray[np.float16], NDArray[np.uint32]] | None:
        """A class's prototypes float16 (m, L) and counts uint32 (m,) as uploaded; None if not for this task."""
        if self.submission is None:
            return None
        mine = to_array(self.submission.labels) == label
        counts = to_array(self.submission.counts)[mine].astype(np.uint32)
        return to_array(self.submission.prototypes)[mine].astype(np.float16), counts


NO_SUBMISSION = LastSubmission()


def key_of(image: LabeledImage) -> str:
    """What an image is remembered by; another one if the file was changed."""
    return digest_of(image.identity.encode(errors="surrogateescape"))[:KEY_BYTES].hex()


def keys_of(images: Iterable[LabeledImage]) -> frozenset[str]:
    """What images are remembered by."""
    return frozenset(map(key_of, images))


def last_submission(uploaded: UploadedImages, payload: bytes | None) -> LastSubmission:
    """Return the stored submission; without its prototypes if the payload is None or cannot be decoded."""
    try:
        submission = None if payload is None else decode(payload, Submission, max_bytes=len(payload))
    except (MalformedMessage, msgspec.MsgspecError):
        submission = None
    return LastSubmission(uploaded.classes, submission)
