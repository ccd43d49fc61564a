"""Blocks: groups of images that leave the device as principal prototypes. Pure.

A **block** consists of groups that were formed together, of images that were in no group before. What leaves the device
of a block are class means, rows and one diagonal. Rows are linear combinations of the images, whose coefficients are
computed once and kept (`edge_client.data.principal_prototypes`).

**Law.** Take everything that was released, of all backbones and layers, and write each vector as coefficients on the
images. In every linear combination, an image of a block has at most 1 / b of the squared coefficients, where b is the
least number of images in the block's groups; of a dissolved block, at most 2 / b.

**Proof.** Images of a block, or of one that was dissolved, are in no other group that adds to the space of what was
released: a block takes new images only, `regroup` takes neither its groups nor what is left of them apart, and a group
that is merged with them later equals its other images up to a vector of the block. Thus the spaces of different blocks,
and of all other groups, have no image in common, and are orthogonal: the image's largest share is that within its
block's space. This is spanned by the indicators of the classes, and by the rows. Rows less their class means are
orthogonal to the indicators. An image of a class of n images has 1 / n from the indicators, and h, its share of these
rows, orthonormalized: 1 / n + h <= 1 / b when the block was made. Other backbones and layers have the same
coefficients, so that the space never grows. Dissolving adds the indicators of groups, of which the classes' are sums.
Rows less their group means are orthogonal to these, and an image has 1 / g + h' of them, where g >= b is the size of
its group, and h' <= 1 / b was ascertained when the block was made.

Only files dissolve a block, never a task: an image was deleted, or MOVED_SHARE of its images lie in other classes than
they are counted in, or the file with the coefficients is lost. A dissolved block's groups are never split, and an image
that was moved stays in its group: a group is released in the class in which most of its images lie. One that lost an
image is not released until it returns; what is left of it would have more than 2 / b together with a new group.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge_client.privacy.image_groups import regroup
from edge_client.storage.image_group_record import Block, Group, Key, Partition

MOVED_SHARE = 0.25
"""Share of a block's images in other classes than they are counted in that dissolves it."""

Places = Mapping[Key, Sequence[str]]
"""The classes in which each image was found, in the order of the task's."""


@dataclass(frozen=True)
class Dissolved:
    """A block that is dissolved, for the log."""

    images: int
    reason: str


def after_scan(
    partition: Partition,
    places: Places,
    *,
    seen: Collection[str],
    now_s: float,
    replaced: Collection[Key] = (),
) -> tuple[Partition, list[Dissolved]]:
    """Return the partition that awaits the missing images, and the blocks that are dissolved.

    Args:
        partition: all groups of the device.
        places: the images that were found.
        seen: the classes whose images were all looked for: the task's, and those that do not exist any more.
        now_s: elapsed seconds.
        replaced: images in whose files other ones are now: they are not awaited.
    """
    partition = replace(partition, moved=_moved(partition, places, seen))
    missing = _missing(partition, places, seen)
    partition = partition.after_scan(
        frozenset(places), now_s=now_s, replaced=replaced, missing=frozenset(missing)
    )
    done: list[Dissolved] = []
    for number in partition.blocks:
        members = partition.members(number)
        gone = sum(key in missing and key not in partition.awaited for key in members)
        moved = sum(key in partition.moved for key in members)
        if gone or moved >= MOVED_SHARE * len(members):
            partition = dissolved(partition, number)
            reason = f"{gone} missing" if gone else f"{moved} in other classes"
            done.append(Dissolved(len(members), reason))
    return partition, done


def dissolved(partition: Partition, number: int) -> Partition:
    """Return the partition in which a block's groups are in no block."""
    members = partition.members(number)
    groups = {each: replace(partition.groups[each], block=0) for each in members.values()}
    return replace(
        partition,
        groups={**partition.groups, **groups},
        blocks={each: block for each, block in partition.blocks.items() if each != number},
        moved={key: name for key, name in partition.moved.items() if key not in members},
    )


def suits(partition: Partition, number: int, classes: Sequence[str], *, least: int) -> bool:
    """Return whether a task with these classes gets a block: all of its classes, each of at least `least` images."""
    members = partition.members(number)
    images = Counter(partition.groups[each].name for each in members.values())
    needed = images.keys() | {partition.moved[key] for key in members if key in partition.moved}
    return needed <= set(classes) and min(images.values()) >= least


def places_of_groups(partition: Partition, places: Places) -> dict[Key, str]:
    """Return the class of each image of a dissolved block's groups that is whole: that of most of its images."""
    found: dict[Key, str] = {}
    for group in partition.groups.values():
        if group.name and not group.block and group.images <= places.keys():
            lying = Counter(_place(group, places[key]) for key in group.images)
            most = max(lying.values())
            name = min(name for name, images in lying.items() if images == most)
            found |= dict.fromkeys(group.images, name)
    return found


def regroup_for_block(
    partition: Partition,
    present: frozenset[Key],
    new: Sequence[Key],
    *,
    size: int,
    min_images: int,
    rng: np.random.Generator,
) -> tuple[Partition, list[int]]:
    """Return the groups after a class has changed, and the numbers of those for a block; as before if there is none.

    These are of at least `size` images that were in no group before. The other arguments are those of `regroup`.
    """
    after = regroup(partition, present, new, batch_size=size, min_images=min_images, rng=rng)
    taken = [
        number
        for number, group in after.groups.items()
        if group.is_unmixed and len(group.images) >= size and group.images.isdisjoint(partition.number_of)
    ]
    return (after, taken) if taken else (partition, [])


def with_block(partition: Partition, names: Mapping[int, str], block: Block) -> tuple[Partition, int]:
    """Return the partition in which groups form a block, and its number; `names` are the classes of the groups."""
    number = max((group.block for group in partition.groups.values()), default=0) + 1
    groups = {each: replace(partition.groups[each], block=number, name=name) for each, name in names.items()}
    partition = replace(partition, groups={**partition.groups, **groups})
    return replace(partition, blocks={**partition.blocks, number: block}), number


def after_release(partition: Partition, number: int, *, min_images: int) -> Partition:
    """Return the partition with the note that a block has left the device."""
    noted = {
        each: replace(group, largest_min_images=max(min_images, group.largest_min_images))
        for each, group in partition.groups.items()
        if group.block == number
    }
    return replace(partition, groups={**partition.groups, **noted})


def _moved(partition: Partition, places: Places, seen: Collection[str]) -> dict[Key, str]:
    """Return the images of blocks that lie in another class; where a class was not looked at, nothing changes."""
    moved: dict[Key, str] = {}
    for group in partition.groups.values():
        for key in group.images if group.block else ():
            where = _place(group, places[key]) if key in places else partition.moved.get(key, group.name)
            if where != group.name and group.name not in seen:
                where = partition.moved.get(key, group.name)
            if where != group.name:
                moved[key] = where
    return moved


def _missing(partition: Partition, places: Places, seen: Collection[str]) -> set[Key]:
    """Return the images of blocks that were not found where they were, if others of their block were."""
    missing: set[Key] = set()
    for number in partition.blocks:
        members = partition.members(number)
        if not members.keys().isdisjoint(places):
            missing.update(
                key
                for key, group in members.items()
                if key not in places and partition.moved.get(key, partition.groups[group].name) in seen
            )
    return missing


def _place(group: Group, places: Sequence[str]) -> str:
    """Return the class of an image of a group that was found in these."""
    return group.name if group.name in places else places[0]
