"""Scans of the data folder, one after the other: what is complete, and what was left out."""

import itertools
import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge_client.images import file_ages
from edge_client.images.file_ages import FileAges
from edge_client.images.images import ImageScan, LabeledImage, log_skipped, name_some, scan_images
from protocol.cli import plain
from protocol.errors import ConfigError
from protocol.log import event

log = logging.getLogger(__name__)

BEING_WRITTEN = "still being written: a later scan uses it"


@dataclass(frozen=True)
class Scan:
    """The complete images of a data folder; or the `problem` with it, and no image.

    `being_written` are the relative paths of files that are left out, because they may be incomplete. `unknown` names
    folders or labels that are no class of the task, for people; `unknown_names` are these as `normal` returns them.
    """

    images: tuple[LabeledImage, ...] = ()
    being_written: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()
    unknown_names: frozenset[str] = frozenset()
    skipped: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def identities(self) -> tuple[str, ...]:
        """The identities of the images; the problem, if there is one."""
        return (self.problem,) if self.problem else tuple(image.identity for image in self.images)

    def missing(self, earlier: Iterable[str]) -> set[str]:
        """Return the identities of an earlier scan that this one misses, without files that are being written."""
        missing = set(earlier).difference(self.identities)
        return {each for each in missing if path_of(each) not in self.being_written}


def path_of(identity: str) -> str:
    """Return the relative path in an image's identity."""
    return identity.split("-", 2)[-1]


class ImageScanner:
    """Scans a data folder again and again; `ages` tell which of its files have been complete for long enough."""

    def __init__(self, data: Path, ages: FileAges | None = None) -> None:
        self._data = data
        self._ages = ages or FileAges()
        self._classes: Sequence[str] = ()
        self._logged: set[str] = set()
        self._unknown: Collection[str] = ()

    def scan(self, classes: Sequence[str]) -> Scan:
        """Find the complete images of these classes, and log what is left out.

        Where the first scan finds files that were changed a moment ago, it is repeated once they may be complete.
        """
        try:
            found, ages = self._find(classes)
        except ConfigError as error:
            return Scan(problem=plain(str(error)))  # the folder's name may be any bytes
        is_complete = [age_s >= file_ages.SETTLE_S for age_s in ages]
        images = tuple(itertools.compress(found.images, is_complete))
        incomplete = [
            image.relative for image, complete in zip(found.images, is_complete, strict=True) if not complete
        ]
        skipped = {BEING_WRITTEN: len(incomplete), **found.skipped} if incomplete else found.skipped
        if found.unknown and found.unknown != self._unknown:
            text = "no class of the task, images left out: rename the folders, or add the classes to the task file"
            event(log, logging.WARNING, text, unknown=name_some(found.unknown), data=self._data)
        self._unknown = found.unknown
        log_skipped(skipped, self._logged, self._data)
        return Scan(images, frozenset(incomplete), found.unknown, found.unknown_names, skipped)

    def _find(self, classes: Sequence[str]) -> tuple[ImageScan, list[float]]:
        """Return what the data folder has, and the images' ages; at the first scan for these classes after a pause."""
        if classes != self._classes:
            self._classes = classes
            self._ages.forget()
        is_first = self._ages.is_new
        found = scan_images(self._data, classes)
        ages = self._ages.update(found.images)
        if is_first and (pause_s := file_ages.SETTLE_S - min(ages, default=math.inf)) > 0:
            time.sleep(pause_s)
            found = scan_images(self._data, classes)
            ages = self._ages.update(found.images)
        return found, ages
