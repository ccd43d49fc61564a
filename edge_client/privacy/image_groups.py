"""Groups of images are permanent, and leave the device whole or not at all. Pure.

The values that a device uploads for one backbone are sums over whole groups, divided by their counts. An attacker who
has all of them, of any number of submissions and tasks, can compute linear combinations of these sums.

**Law.** Take what was released to tasks whose `min_images` was at least m. Each linear combination of it is zero, or
contains at least m images with a factor other than zero.

**Proof.** Of the groups in a combination, take the one that was formed last. Images that were in no group before it
are in no other group of the combination: their factors are its factor. Of an unmixed group that lost the images M, and
whose other images L are in this one now, an image of L has the sum of both groups' factors and one of M has the earlier
group's: they are not both zero, which leaves all of L or all of M. A group's weight counts the former, and the smaller
of L and M of the latter, and only groups with a weight of at least m are released. M is then a group of weight 0,
which adds nothing to a later group's weight.

Whole groups are merged with each other only if each has at least the weight of all tasks that an image of any of them
was released to (`largest_min_images`). For these tasks, read the merged group as the sum of its parts, and take the
last part or group whose factor is not zero: its weight is sufficient. To a task of a larger m nothing was released that
has an image of the merged group, so that all of its images count. A group that may not be merged so joins one that is
just being formed, whose own weight is sufficient for the task. It adds its weight if its images were released to no
task that asks for more than that own weight: to one that does, they are in no other group, as before.

A group that awaits missing images (`Partition.awaited`) takes part in nothing: it is not released, and no group is
formed of what is left of it.

Groups that are or were in a block have a law of their own (`image_blocks`), and are never split here.

The law is about linear combinations. A backbone that an attacker has designed can put single images into places of
their own in the features, which no averaging hides: `docs/privacy.md`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from edge_client.store.image_group_record import Group, Key, Partition


def regroup(
    partition: Partition,
    present: frozenset[Key],
    new: Sequence[Key],
    *,
    batch_size: int,
    min_images: int,
    rng: np.random.Generator,
) -> Partition:
    """Return the groups after a class has changed; its new images are those in no group.

    What is left of groups that lost images, and new images, form groups with weights of at least `batch_size`; the
    remainder joins the last one. A class of which nothing is released may have one of `min_images`. Groups that are
    too small for `min_images` are merged, and never split. The images that a group has lost wait as such a group: they
    may be in another class, or return.

    Args:
        partition: all groups of the device, with the images that are awaited.
        present: the class's images that are not held out.
        new: the images to group, without outliers.
        batch_size: images in a prototype, B.
        min_images: of the task, at most `batch_size`.
        rng: deals the new images.
    """
    groups = partition.touching(present)
    whole = {number: group for number, group in groups.items() if group.images <= present}
    broken = {number: group for number, group in groups.items() if number not in whole}
    items = [_left(group, present) for group in broken.values()]
    items += [Group(frozenset({new[at]}), 1) for at in rng.permutation(len(new))]
    formed: list[Group] = []
    weight = _weight(items)
    is_released = _is_released(partition, present, min_images)
    if weight >= batch_size or (weight >= min_images and not is_released):
        formed = [_union(dealt) for dealt in _deal(items, size=batch_size)]
        lost = [
            replace(group, images=group.images - present, weight=0, is_unmixed=False)
            for group in broken.values()
        ]
        partition = _with(_without(partition, broken), lost)
    return _merge_small(partition, whole, formed, min_images=min_images)


def more_needed(
    partition: Partition, present: frozenset[Key], new: Collection[Key], *, batch_size: int, min_images: int
) -> int:
    """Return how many more new images a class needs for its next group; the arguments are those of `regroup`."""
    groups = partition.touching(present).values()
    weight = sum(key not in partition.number_of for key in new)
    weight += _weight(_left(group, present) for group in groups if not group.images <= present)
    is_released = _is_released(partition, present, min_images)
    return max(0, (batch_size if is_released else min_images) - weight)


def pack(groups: Iterable[frozenset[Key]], *, batch_size: int) -> list[frozenset[Key]]:
    """Return prototypes of whole groups with at least `batch_size` images each; one of fewer if there are no more."""
    packed: list[frozenset[Key]] = []
    for group in groups:
        if packed and len(packed[-1]) < batch_size:
            packed[-1] |= group
        else:
            packed.append(group)
    if len(packed) > 1 and len(packed[-1]) < batch_size:
        last = packed.pop()
        packed[-1] |= last
    return packed


def _is_released(partition: Partition, present: frozenset[Key], min_images: int) -> bool:
    """Return whether something of a class is released or in a block, or will be when the missing images are back."""
    awaiting = any(group.weight >= min_images for group in partition.awaiting(present))
    is_in_block = any(
        partition.groups[partition.number_of[key]].block for key in present & partition.number_of.keys()
    )
    return awaiting or is_in_block or bool(partition.released(present, min_images=min_images))


def _merge_small(
    partition: Partition, whole: Mapping[int, Group], formed: list[Group], *, min_images: int
) -> Partition:
    """Return the partition with formed groups, and merge whole ones that are too small for the task."""
    small = {number: group for number, group in whole.items() if group.weight < min_images}
    merged: list[Group] = []
    for least in sorted({group.largest_min_images for group in small.values()}, reverse=True):
        # Each of these groups might be used by every task that an image of any of them was released to.
        equal = {n: group for n, group in small.items() if group.largest_min_images <= least <= group.weight}
        if _weight(equal.values()) >= min_images:
            dealt = _deal(list(equal.values()), size=min_images)
            merged += [replace(_union(groups), is_unmixed=False) for groups in dealt]
            small = {number: group for number, group in small.items() if number not in equal}
            partition = _without(partition, equal)
    if formed and small:
        formed = [_joined(group, list(small.values())[at :: len(formed)]) for at, group in enumerate(formed)]
        partition = _without(partition, small)
    return _with(partition, [*merged, *formed])


def _joined(formed: Group, small: Sequence[Group]) -> Group:
    """Return a group that is being formed together with groups that are too small for the task."""
    if not small:
        return formed
    weight = _weight(group for group in small if group.largest_min_images <= formed.weight)
    return replace(_union([formed, *small]), weight=formed.weight + weight, is_unmixed=False)


def _left(group: Group, present: frozenset[Key]) -> Group:
    """Return what is left of a group, with the weight that it adds to another one."""
    left = group.images & present
    weight = min(len(left), len(group.images - present)) if group.is_unmixed else 0
    return replace(group, images=left, weight=weight, is_unmixed=False)


def _deal(items: Sequence[Group], *, size: int) -> list[list[Group]]:
    """Cut items into runs with weights of at least `size`; a remainder joins the last one."""
    dealt: list[list[Group]] = [[]]
    filled, rest = 0, _weight(items)
    for item in items:
        if filled >= size and rest >= size:
            dealt.append([])
            filled = 0
        dealt[-1].append(item)
        filled += item.weight
        rest -= item.weight
    return dealt


def _union(groups: Sequence[Group]) -> Group:
    return Group(
        frozenset().union(*(group.images for group in groups)),
        _weight(groups),
        all(group.is_unmixed for group in groups),
        max(group.largest_min_images for group in groups),
        name=max(group.name for group in groups),
    )


def _weight(groups: Iterable[Group]) -> int:
    return sum(group.weight for group in groups)


def _with(partition: Partition, groups: Sequence[Group]) -> Partition:
    if not groups:
        return partition
    numbers = count(max(partition.groups, default=0) + 1)
    return replace(partition, groups={**partition.groups, **dict(zip(numbers, groups, strict=False))})


def _without(partition: Partition, numbers: Collection[int]) -> Partition:
    if not numbers:
        return partition
    kept = {number: group for number, group in partition.groups.items() if number not in numbers}
    return replace(partition, groups=kept)
