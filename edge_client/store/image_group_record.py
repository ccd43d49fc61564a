"""The record of image groups, written before anything is released that is made of them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from protocol.storage.database import Database

Key = bytes
"""An image's: a digest of its file."""

AWAIT_S = 24 * 3600.0
"""How long missing images are awaited: they return when a folder has been copied again, or a disk works again."""


@dataclass(frozen=True)
class Group:
    """Images that are released together."""

    images: frozenset[Key]
    weight: int
    """Images that a combination of this group and earlier ones contains at least."""
    is_unmixed: bool = True
    """True if none of its images was in another group before."""
    largest_min_images: int = 0
    """The largest `min_images` of all tasks that an image of it was released to, in this or an earlier group; or 0."""
    block: int = 0
    """The block that it is in, or 0."""
    name: str = ""
    """Of a group that is or was in a block, the class that its images are counted in; else empty."""

    @property
    def is_apart(self) -> bool:
        """True if it takes part in no regrouping: it is in a block, or was lost by a group of a dissolved one."""
        return self.block > 0 or (self.name != "" and not self.weight)


@dataclass(frozen=True)
class Block:
    """Groups that are uploaded as principal prototypes; its images are those of the groups."""

    batch_size: int
    """Images in each of its groups, at least."""
    digest: bytes
    """Of the file with its coefficients."""


@dataclass(frozen=True)
class Partition:
    """All groups of a device by their numbers."""

    groups: Mapping[int, Group] = field(default_factory=dict)
    missing_since_s: Mapping[Key, float] = field(default_factory=dict)
    """When images of groups of which others are there were found missing (elapsed seconds)."""
    awaited: frozenset[Key] = field(default=frozenset(), compare=False)
    """Images that are missing for less than AWAIT_S: their groups stay as they are, and are not released."""
    blocks: Mapping[int, Block] = field(default_factory=dict)
    """The blocks that are not dissolved, by their numbers."""
    moved: Mapping[Key, str] = field(default_factory=dict)
    """Images of blocks that lie in another class than they are counted in, with that class."""

    @cached_property
    def number_of(self) -> Mapping[Key, int]:
        """The number of each image's group."""
        return {key: number for number, group in self.groups.items() for key in group.images}

    def members(self, block: int) -> dict[Key, int]:
        """Return the images of a block in the order of its coefficients' columns, with the numbers of their groups."""
        groups = ((number, group) for number, group in self.groups.items() if group.block == block)
        return dict(sorted((key, number) for number, group in groups for key in group.images))

    def is_apart(self, key: Key) -> bool:
        """Return whether an image is in a block, or was lost by a group of a dissolved one whose rest is used."""
        return key in self.number_of and self.groups[self.number_of[key]].is_apart

    def after_scan(
        self,
        found: frozenset[Key],
        *,
        now_s: float,
        replaced: Collection[Key] = (),
        missing: frozenset[Key] = frozenset(),
    ) -> "Partition":
        """Return the partition that awaits the missing images; `found` are those of all classes.

        Images in whose files other ones are now, `replaced`, are not awaited: nobody can restore what was in a file
        that was half-copied. `missing` are those of blocks.
        """
        missing |= frozenset().union(*(group.images for group in self._touching(found).values())) - found
        since_s = {key: self.missing_since_s.get(key, now_s) for key in missing}
        since_s |= dict.fromkeys(missing.intersection(replaced), now_s - AWAIT_S)
        awaited = frozenset(key for key in missing if now_s - since_s[key] < AWAIT_S)
        return replace(self, missing_since_s=since_s, awaited=awaited)

    def touching(self, present: Collection[Key]) -> dict[int, Group]:
        """Return the groups outside of blocks that some of these images are in, without those that await an image."""
        groups = self._touching(present).items()
        return {number: group for number, group in groups if not self.lost_by(group)}

    def awaiting(self, present: Collection[Key]) -> list[Group]:
        """Return the groups outside of blocks that some of these images are in, and that await others."""
        return [group for group in self._touching(present).values() if self.lost_by(group)]

    def lost_by(self, group: Group) -> frozenset[Key]:
        """Return the images that a group awaits: for a day, or for ever if it was in a block."""
        return group.images.intersection(self.missing_since_s if group.name else self.awaited)

    def released(self, present: frozenset[Key], *, min_images: int) -> list[frozenset[Key]]:
        """Return the groups of a class with these images that may be in a prototype."""
        return [group.images for group in self._released(present, min_images).values()]

    def after_release(self, present: frozenset[Key], *, min_images: int) -> "Partition":
        """Return the partition with the note that `released` has left the device."""
        noted = {
            number: replace(group, largest_min_images=max(min_images, group.largest_min_images))
            for number, group in self._released(present, min_images).items()
        }
        return replace(self, groups={**self.groups, **noted}) if noted else self

    def _touching(self, present: Collection[Key]) -> dict[int, Group]:
        numbers = {self.number_of[key] for key in present if key in self.number_of}
        return {number: self.groups[number] for number in sorted(numbers) if not self.groups[number].is_apart}

    def _released(self, present: frozenset[Key], min_images: int) -> dict[int, Group]:
        groups = self.touching(present).items()
        return {n: group for n, group in groups if group.images <= present and group.weight >= min_images}


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
            number: Group(frozenset(images.get(number, ())), weight, bool(is_unmixed), largest, block, name)
            for number, weight, is_unmixed, largest, block, name in self._database.read(
                "SELECT number, weight, is_unmixed, largest_min_images, block, class FROM image_groups"
            )
        }
        rows = self._database.read("SELECT number, batch_size, digest FROM blocks")
        return Partition(
            groups,
            dict(self._database.read("SELECT image, since_s FROM missing_images")),
            blocks={number: Block(batch_size, digest) for number, batch_size, digest in rows},
            moved=dict(self._database.read("SELECT image, class FROM moved_images")),
        )

    def files(self) -> set[bytes]:
        """Return the digests of the blobs with the coefficients of blocks.

        Raises:
            StateError: the disk fails.
        """
        return {digest for (digest,) in self._database.read("SELECT digest FROM blocks")}

    def write(self, after: Partition) -> None:
        """Record all groups in place of the recorded ones, all or nothing.

        Raises:
            StateError: the disk is full or fails.
        """
        before = self.read()
        if after == before:
            return
        new = [
            (number, group) for number, group in after.groups.items() if before.groups.get(number) != group
        ]
        rows = [(image, number) for number, group in new for image in group.images]
        with self._database.transaction() as database:
            gone = [(number,) for number in before.groups.keys() - after.groups.keys()]
            database.executemany("DELETE FROM image_groups WHERE number = ?", gone)
            values = [
                (
                    *(number, group.weight, int(group.is_unmixed), group.largest_min_images),
                    *(group.block, group.name),
                )
                for number, group in new
            ]
            database.executemany("INSERT OR REPLACE INTO image_groups VALUES (?, ?, ?, ?, ?, ?)", values)
            database.executemany("INSERT OR REPLACE INTO grouped_images VALUES (?, ?)", rows)
            if after.missing_since_s != before.missing_since_s:
                database.execute("DELETE FROM missing_images")
                database.executemany(
                    "INSERT INTO missing_images VALUES (?, ?)", after.missing_since_s.items()
                )
            if after.moved != before.moved:
                database.execute("DELETE FROM moved_images")
                database.executemany("INSERT INTO moved_images VALUES (?, ?)", after.moved.items())
            if after.blocks != before.blocks:
                database.execute("DELETE FROM blocks")
                blocks = [(number, block.batch_size, block.digest) for number, block in after.blocks.items()]
                database.executemany("INSERT INTO blocks VALUES (?, ?, ?)", blocks)
