"""The images that a release under differential privacy counts: distinct ones, and of each person only some."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from edge_client.images.images import LabeledImage, normal
from edge_client.kinds.distinct_images import DistinctImages
from edge_client.kinds.image_features import FoundImages, Workspace
from edge_client.privacy.image_choice import chosen
from protocol.log import event
from protocol.statistics.noisy_sums import hidden_images, unit_in_words
from protocol.wire.messages import DifferentialPrivacy, TaskManifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CountedImages:
    """The images that a release counts, and how they were chosen."""

    by_label: tuple[tuple[LabeledImage, ...], ...]
    persons: int = 0
    """Persons that a list or a folder names."""
    left_out: int = 0
    """Images of these that do not count, as the persons are on more."""
    unnamed: int = 0
    """Images of which no person is named: all count, and nobody may be on more of them than the task says."""


def counted_images(
    workspace: Workspace, task: TaskManifest, found: FoundImages, *, key: bytes
) -> CountedImages:
    """Return the images that count; each person's depend on this person's images alone.

    Where the unit is an image, files of equal pixels are one image, in the first of its classes. Where it is a person,
    they are one image of each person, so that nobody's images change what counts of somebody else, and of each person
    at most `images_per_person` count, which the device's secret key decides.
    """
    private = task.differential_privacy
    if private is None or not (most := private.images_per_person):
        by_label = DistinctImages(workspace, task, found).by_label()
        return CountedImages(by_label=tuple(tuple(images.values()) for images in by_label))
    digests = workspace.cache.contents()
    of_person: dict[str, dict[bytes, LabeledImage]] = {}
    for label in range(len(task.classes)):
        for image in found.for_training(label):
            if image.identity in digests:
                images = of_person.setdefault(person_of(image, private), {})
                images.setdefault(digests[image.identity], image)
    unnamed = of_person.pop("", {})
    counted = list(unnamed.values())
    for images in of_person.values():
        counted += [images[digest] for digest in chosen(images, most, key)]
    counted.sort(key=lambda image: (image.label, image.relative))
    every_label = range(len(task.classes))
    return CountedImages(
        by_label=tuple(tuple(image for image in counted if image.label == label) for label in every_label),
        persons=len(of_person),
        left_out=sum(map(len, of_person.values())) + len(unnamed) - len(counted),
        unnamed=len(unnamed),
    )


def log_unit(counted: CountedImages, private: DifferentialPrivacy, *, noise_multiplier: float) -> None:
    """Log the unit of privacy and the images that count, in this device's log only."""
    by_class = list(map(len, counted.by_label))
    hidden = hidden_images(noise_multiplier, devices=1)
    unit = unit_in_words(private.images_per_person or None)
    event(log, logging.INFO, "unit of privacy", unit=unit, images=sum(by_class), persons=counted.persons)
    if counted.left_out:
        text = "images left out: their persons are on more than count"
        event(log, logging.WARNING, text, left_out=counted.left_out, of_a_person=private.images_per_person)
    if counted.unnamed and private.images_per_person:
        text = "images without a person all count: nobody may be on more of them than count of a person"
        event(log, logging.WARNING, text, images=counted.unnamed, of_a_person=private.images_per_person)
    if max(by_class) < hidden:
        text = "this device's noise is larger than its images: only many such devices together make a head"
        event(log, logging.WARNING, text, largest_class=max(by_class), noise_of_images=hidden)


def person_of(image: LabeledImage, private: DifferentialPrivacy) -> str:
    """Return the person that the list, or else the task's folder level, names for an image; empty if none."""
    if image.person or not private.person_level:
        return image.person
    folders = PurePath(image.relative).parts[:-1]
    return normal(folders[private.person_level - 1]) if len(folders) >= private.person_level else ""


def listing_of(images: Sequence[LabeledImage], private: DifferentialPrivacy) -> bytes:
    """Return what a release depends on beside the files: labels and, where they are the unit, persons."""
    if not private.images_per_person:
        return ",".join(str(image.label) for image in images).encode()
    lines = (f"{image.label} {person_of(image, private)}" for image in images)
    return "\0".join(lines).encode(errors="surrogateescape")
