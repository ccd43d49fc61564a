"""The record of image groups, written before anything is released that is made of them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from edge_client.storage.stored_values import read_fact, write_facts
from protocol.storage.database import Database

Key = bytes
"""An image's: a digest of its file."""


@dataclass(frozen=True)
class Group:
    """Images that are released together."""

    images: frozenset[Key]
    weight: int
    """Images that a combination of this group and earlier ones contains at least."""
    is_unmixed: bool = True
    """True if none of its images was in another group before."""


@dataclass(frozen=True)
class Partition:
    """All groups of a device by their numbers."""

    groups: Mapping[int, Group] = field(default_factory=dict)
    largest_min_images: int = 0
    """Of all tasks so far that something was released to."""

    @cached_property
    def number_of(self) -> Mapping[Key, int]:
        """The number of each image's group."""
        return {key: number for number, group in self.groups.items() for key in group.images}

    def touching(self, present: Collection[Key]) -> dict[int, Group]:
        """Return the groups that some of these images are in."""
        numbers = {self.number_of[key] for key in present if key in self.number_of}
        return {number: self.groups[number] for number in sorted(numbers)}

    def released(self, present: frozenset[Key], *, min_images: int) -> list[frozenset[Key]]:
        """Return the groups of a class with these images that may be in a prototype."""
        groups = self.touching(present).values()
        return [group.images for group in groups if group.images <= present and group.weight >= min_images]


class LargestMinImages(msgspec.Struct, frozen=True):
    """The largest `min_images` of all tasks that images were released to."""

    number: int = 0


class ImageGroupRecord:
    """A device's image groups in its database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self) -> Partition:
        """Return all groups.

        Raises:
            StateError: the disk fails.
        """
        images: dict[int, set[bytes]] = {}
        for image, number in self._database.read("SELECT image, number FROM grouped_images"):
            images.setdefault(number, set()).add(image)
        groups = {
            number: Group(frozenset(images.get(number, ())), weight, bool(is_unmixed))
            for number, weight, is_unmixed in self._database.read(
                "SELECT number, weight, is_unmixed FROM image_groups"
            )
        }
        largest = read_fact(self._database, LargestMinImages).number
        return Partition(groups, largest)

    def write(self, before: Partition, after: Partition) -> None:
        """Replace `before`, which is recorded, by `after`, all or nothing.

        Raises:
            StateError: the disk is full or fails.
        """
        if after == before:
            return
        new = [
            (number, group) for number, group in after.groups.items() if before.groups.get(number) != group
        ]
        rows = [(image, number) for number, group in new for image in group.images]
        with self._database.transaction() as database:
            gone = [(number,) for number in before.groups.keys() - after.groups.keys()]
            database.executemany("DELETE FROM image_groups WHERE number = ?", gone)
            values = [(number, group.weight, int(group.is_unmixed)) for number, group in new]
            database.executemany("INSERT OR REPLACE INTO image_groups VALUES (?, ?, ?)", values)
            database.executemany("INSERT OR REPLACE INTO grouped_images VALUES (?, ?)", rows)
            write_facts(self._database, LargestMinImages(after.largest_min_images))
