"""A guard against differencing: a class changes in a submission only once enough of its images have.

The prototypes of a class, weighted by their counts, add up to the sum of its features. The difference of two
submissions is the sum of the added features minus that of the removed ones: for one image, its feature.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_client.data.images import LabeledImage
from edge_client.storage.stored_values import UploadedImages
from protocol.errors import MalformedMessage
from protocol.wire.codec import decode, digest_of, to_array
from protocol.wire.messages import Submission

KEY_BYTES = 8
"""Bytes of an image's key: enough to distinguish one device's images."""


@dataclass(frozen=True)
class LastSubmission:
    """A device's last submission."""

    images: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Keys of the images in each class's prototypes, by class name."""
    submission: Submission | None = None
    """None if it belongs to another task."""

    def waiting(self, name: str, kept: Sequence[LabeledImage], *, least: int) -> int:
        """Return how many images of a class were added or removed, if fewer than `least`; else 0: they count.

        A whole class may appear or disappear at once: the task decides how few images may make a prototype.
        """
        before, now = self.images.get(name, frozenset()), keys_of(kept)
        changed = len(before ^ now)
        return changed if before and now and changed < least else 0

    def stays(self, name: str, kept: Sequence[LabeledImage]) -> list[LabeledImage] | None:
        """Return the images that were uploaded; None if some of those are gone."""
        before = self.images.get(name, frozenset())
        same = [image for image in kept if key_of(image) in before]
        return same if len(same) == len(before) else None

    def rows(self, label: int) -> tuple[NDArray[np.float16], NDArray[np.uint32]] | None:
        """Return a class's uploaded prototypes float16 (m, L) and counts uint32 (m,); None for another task."""
        if self.submission is None:
            return None
        mine = to_array(self.submission.labels) == label
        counts = to_array(self.submission.counts)[mine].astype(np.uint32)
        return to_array(self.submission.prototypes)[mine].astype(np.float16), counts


NO_SUBMISSION = LastSubmission()


def key_of(image: LabeledImage) -> str:
    """Return an image's key, which changes with its file."""
    return digest_of(image.identity.encode(errors="surrogateescape"))[:KEY_BYTES].hex()


def keys_of(images: Iterable[LabeledImage]) -> frozenset[str]:
    """Return the keys of images."""
    return frozenset(map(key_of, images))


def last_submission(uploaded: UploadedImages, payload: bytes | None) -> LastSubmission:
    """Return the stored submission; without its prototypes if the payload is None or cannot be decoded."""
    try:
        submission = None if payload is None else decode(payload, Submission, max_bytes=len(payload))
    except (MalformedMessage, msgspec.MsgspecError):
        submission = None
    return LastSubmission(uploaded.classes, submission)
