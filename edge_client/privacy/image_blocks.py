"""Blocks: groups of images that leave the device as principal prototypes. Pure.

A **block** consists of groups that were formed together, of images that were in no group before. What leaves the device
of a block are class means, rows and one diagonal. Rows are linear combinations of the images, whose coefficients are
computed once and kept (`edge_client.prototypes.principal_prototypes`).

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

Only files dissolve a block, never a task: an image was deleted, or MOVED_SHARE of its images, or all of one class, lie
in other classes than they are counted in, or the file with the coefficients is lost. If no image of a class lies in it
any more, and most lie in one that the block does not have, it was renamed, and so are the groups. A dissolved block's
groups are never split, and an image that was moved stays in its group: a group is released in the class in which most
of its images lie. What is left of groups that lost an image may have more than 2 / b together with a new group. So it
is used once, when the block is dissolved, in one group of each class, after the exact shares with these were computed
(`with_leftovers`). A group that loses an image later is not released until that returns.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from edge_client.privacy.image_groups import regroup
from edge_client.prototypes.principal_prototypes import basis, share, share_of_new
from edge_client.store.image_group_record import Block, Group, Key, Partition

MOVED_SHARE = 0.25
"""Share of a block's images in other classes than they are counted in that dissolves it."""

Places = Mapping[Key, Sequence[str]]
"""The classes in which each image was found, in the order of the task's."""


@dataclass(frozen=True)
class Dissolved:
    """A block that is dissolved."""

    block: Block
    members: Mapping[Key, int]
    """Its images in the order of the coefficients' columns, with the numbers of their groups."""
    reason: str


def after_scan(
    partition: Partition,
    places: Places,
    *,
    seen: Collection[str],
    now_s: float,
    replaced: Collection[Key] = (),
    unusable: Collection[Key] = (),
) -> tuple[Partition, list[Dissolved]]:
    """Return the partition that awaits the missing images, and the blocks that are dissolved.

    Args:
        partition: all groups of the device.
        places: the images that were found.
        seen: the classes whose images were all looked for: the task's, and those that do not exist any more.
        now_s: elapsed seconds.
        replaced: images in whose files other ones are now: they are not awaited.
        unusable: images whose files are there, of which the task's backbones give no features.
    """
    partition = _renamed(replace(partition, moved=_moved(partition, places, seen)))
    missing = _missing(partition, places, seen).difference(unusable)
    there = places.keys() | set(unusable)
    since_s = {
        key: since_s
        for key, since_s in partition.missing_since_s.items()
        if key not in there and partition.groups[partition.number_of[key]].block
    }  # a task without its class does not begin an image's day anew
    partition = partition.after_scan(
        frozenset(places), now_s=now_s, replaced=replaced, missing=frozenset(missing)
    )
    partition = replace(partition, missing_since_s={**since_s, **partition.missing_since_s})
    done: list[Dissolved] = []
    for number, block in partition.blocks.items():
        members = partition.members(number)
        gone = sum(key in missing and key not in partition.awaited for key in members)
        moved = sum(key in partition.moved for key in members)
        lying = _lying(partition, number)
        if gone or moved >= MOVED_SHARE * len(members) or any(name not in now for name, now in lying.items()):
            partition = dissolved(partition, number)
            reason = f"{gone} missing" if gone else f"{moved} in other classes"
            done.append(Dissolved(block, members, reason))
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


def with_leftovers(
    partition: Partition, block: Dissolved, coefficients: NDArray[np.float16], found: Collection[Key]
) -> Partition:
    """Return the partition with one group of each class of what is left of a dissolved block's broken groups.

    It weighs at least what a group does in `regroup`, and no image has more than 2 / b with it: broken groups that
    would exceed this stay out. It is done once, when the block is dissolved.
    """
    keys, least = [*block.members], block.block.batch_size
    numbers = np.unique([*block.members.values()], return_inverse=True)[1]
    base, axes = (
        1 / np.bincount(numbers)[numbers] + share(coefficients, numbers),
        basis(coefficients, numbers),
    )
    broken: dict[str, list[Group]] = {}
    for number in dict.fromkeys(block.members.values()):
        group = partition.groups[number]
        lost = group.images.difference(found)
        if lost and lost.isdisjoint(partition.awaited):
            broken.setdefault(group.name, []).append(group)
    while broken:
        left = {name: _leftovers(groups, found) for name, groups in broken.items()}
        few = [name for name, group in left.items() if group.weight < least]
        if few:
            del broken[few[0]]
            continue
        new = np.array([[key in group.images for key in keys] for group in left.values()], float)
        excess = base + share_of_new(new, axes, numbers) - 2 / least
        worst = int(excess.argmax())
        if excess[worst] <= 0:
            return _with_leftovers(partition, broken, left, found)
        group = partition.groups[block.members[keys[worst]]]
        if group not in broken.get(group.name, ()):  # the worst image is in a whole group
            del broken[max(broken, key=lambda name: len(broken[name]))]
        else:
            broken[group.name].remove(group)
    return partition


def _with_leftovers(
    partition: Partition,
    broken: Mapping[str, Sequence[Group]],
    left: Mapping[str, Group],
    found: Collection[Key],
) -> Partition:
    """Return the partition in which broken groups have only what they lost, and what is left is in groups."""
    lost = {
        number: replace(group, images=group.images.difference(found), weight=0, is_unmixed=False)
        for number, group in partition.groups.items()
        if group in broken.get(group.name, ())
    }
    new = zip(count(max(partition.groups) + 1), left.values())
    return replace(partition, groups={**partition.groups, **lost, **dict(new)})


def _leftovers(groups: Sequence[Group], found: Collection[Key]) -> Group:
    """Return what is left of broken groups as one, which weighs what `regroup` counts."""
    left = [group.images.intersection(found) for group in groups]
    return Group(
        frozenset().union(*left),
        sum(min(len(each), len(group.images) - len(each)) for each, group in zip(left, groups, strict=True)),
        is_unmixed=False,
        largest_min_images=max(group.largest_min_images for group in groups),
        name=groups[0].name,
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


def _lying(partition: Partition, number: int) -> dict[str, Counter[str]]:
    """Return the classes of a block, each with the numbers of its images in those in which they lie."""
    lying: dict[str, Counter[str]] = {}
    for key, group in partition.members(number).items():
        name = partition.groups[group].name
        lying.setdefault(name, Counter())[partition.moved.get(key, name)] += 1
    return lying


def _renamed(partition: Partition) -> Partition:
    """Return the partition with the names that classes of blocks have now."""
    for number in partition.blocks:
        lying = _lying(partition, number)
        most = {name: now.most_common(1)[0][0] for name, now in lying.items() if name not in now}
        taken = lying.keys() | {name for name, times in Counter(most.values()).items() if times > 1}
        names = {name: now for name, now in most.items() if now not in taken}
        if names:
            groups = {
                each: replace(group, name=names.get(group.name, group.name))
                if group.block == number
                else group
                for each, group in partition.groups.items()
            }
            stays = {
                key: now
                for key, now in partition.moved.items()
                if groups[partition.number_of[key]].name != now
            }
            partition = replace(partition, groups=groups, moved=stays)
    return partition


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
