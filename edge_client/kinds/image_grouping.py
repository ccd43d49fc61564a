"""The groups and blocks of images that submissions and rounds are made of."""

import hmac
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, repeat

import numpy as np
from numpy.typing import NDArray

from edge_client.core.submission_kinds import kind_of
from edge_client.images.images import LabeledImage
from edge_client.kinds.distinct_images import DistinctImages, Images
from edge_client.kinds.image_features import FoundImages, Workspace, training_feature_keys
from edge_client.privacy import image_blocks
from edge_client.privacy.image_blocks import Dissolved
from edge_client.privacy.image_groups import more_needed, pack, regroup
from edge_client.prototypes.outlier_filter import closest_features
from edge_client.prototypes.principal_prototypes import (
    MOST_FEATURE_VALUES,
    coefficients,
    most_rows,
    rows_within,
)
from edge_client.store.image_group_record import Block, Key, Partition
from protocol.errors import BlobLost
from protocol.wire.codec import digest_of
from protocol.wire.messages import TaskManifest
from protocol.wire.principal_prototypes import MAX_VALUES, MIN_BLOCK_IMAGES, MIN_GROUP_IMAGES


@dataclass(frozen=True)
class ReleasedImages:
    """The images of one class that are released outside of blocks: those of whole groups."""

    images: tuple[LabeledImage, ...]
    prototypes: tuple[int, ...]
    """The prototype that each of them is in."""
    waiting: int
    """Training images that wait until they are enough for a group; 0 if no image of the class was ever in one."""
    more_needed: int
    """New images that these need at least, beside the ones that there are; 0 if none waits for new images."""
    missing: int
    """Images that are awaited, because others of their groups or blocks are waiting."""
    in_blocks: int = 0
    """Images of blocks that are counted in the class."""
    unused: int = 0
    """Images of blocks that do not suit the task."""


@dataclass(frozen=True, eq=False)
class ReleasedBlock:
    """A block that is released: its images, the class that each is counted in, and the rows' coefficients (k, n)."""

    images: tuple[LabeledImage, ...]
    labels: NDArray[np.int64]
    coefficients: NDArray[np.float16]
    moved: int
    """Images that lie in another class than they are counted in."""


@dataclass(frozen=True)
class Grouping:
    """The images of a device that are released: of each class, and in blocks, which only tasks with blocks have.

    Nothing of them may leave the device before the groups are recorded: `partition`, and the files of new blocks.
    """

    classes: list[ReleasedImages]
    blocks: list[ReleasedBlock]
    partition: Partition
    files: list[bytes]
    """The coefficients of new blocks."""
    lost: list[Dissolved]
    """Blocks that are dissolved."""
    is_incomplete: bool
    """True if images are awaited: a later build may do without them."""
    awaits_block: bool
    """True if a block that suits the task is left out until an image of it is there again."""

    @property
    def dissolved(self) -> int:
        """The images in groups of dissolved blocks, and those that joined them since."""
        groups = self.partition.groups.values()
        return sum(len(group.images) for group in groups if group.name and not group.block)


def _block_size(workspace: Workspace, task: TaskManifest) -> int:
    """Return the values of a task's principal prototypes; 0 if its submissions have none."""
    if not task.accepts_blocks or not kind_of(task).has_blocks or task.perturbation is not None:
        return 0
    size = sum(_widths(workspace, task))
    size = sum(end - start for start, end in task.columns) if task.columns else size
    return size if size <= MAX_VALUES else 0


def group_images(workspace: Workspace, task: TaskManifest, found: FoundImages) -> Grouping:
    """Group the training images, and return the released images of each class, and blocks.

    Images of the same pixels are one image, in the first of its classes; one that is in a block stays in the class in
    which it was counted, and a group of a dissolved block is in the class of most of its images. To a task without
    blocks, a block's classes are prototypes.

    Raises:
        ProtofleetError: a feature is not finite.
        StateError: the disk fails.
    """
    scan = DistinctImages(workspace, task, found)
    before = workspace.store.partition
    partition, lost = image_blocks.after_scan(
        before,
        scan.places,
        seen=scan.seen(before),
        now_s=workspace.store.now_s(),
        replaced=scan.replaced,
        unusable=scan.unusable,
    )
    for each in lost:
        with suppress(BlobLost):
            rows = _rows(workspace.store.blobs.read(each.block.digest), each.members)
            partition = image_blocks.with_leftovers(partition, each, rows, scan.places.keys())
    partition, files, damaged = _with_files(workspace, partition)
    is_incomplete = bool(partition.awaited)
    by_label = scan.by_label(partition)
    new = [_closest_new(workspace, task, by_key, partition) for by_key in by_label]
    if _block_size(workspace, task):
        partition, made = _with_new_blocks(workspace, task, by_label, new, partition)
        files |= made
    for label, by_key in enumerate(by_label):
        partition = regroup(
            partition,
            frozenset(by_key),
            [key for key in new[label] if key not in partition.number_of],
            batch_size=max(task.batch_size, task.min_images),
            min_images=task.min_images,
            rng=_dealer(workspace, task, label),
        )
    classes, blocks, awaits_block, partition = _released(
        workspace, task, scan, by_label, new, partition, files
    )
    recorded = before.blocks
    return Grouping(
        classes=classes,
        blocks=blocks,
        partition=partition,
        files=[_packed(files[at]) for at, block in partition.blocks.items() if block != recorded.get(at)],
        lost=[*lost, *damaged],
        is_incomplete=is_incomplete,
        awaits_block=awaits_block,
    )


def _with_files(
    workspace: Workspace, partition: Partition
) -> tuple[Partition, dict[int, NDArray[np.float16]], list[Dissolved]]:
    """Return the coefficients of blocks by their numbers; a block whose file is lost is dissolved."""
    files: dict[int, NDArray[np.float16]] = {}
    damaged: list[Dissolved] = []
    for number, block in partition.blocks.items():
        members = partition.members(number)
        try:
            content = workspace.store.blobs.read(block.digest)
        except BlobLost as error:
            partition = image_blocks.dissolved(partition, number)
            damaged.append(Dissolved(block, members, str(error)))
        else:
            files[number] = _rows(content, members)
    return partition, files, damaged


def _rows(content: bytes, members: Collection[Key]) -> NDArray[np.float16]:
    return np.frombuffer(content, "<f2").reshape(-1, len(members))


def _packed(rows: NDArray[np.float16]) -> bytes:
    return rows.astype("<f2").tobytes()


def _closest_new(workspace: Workspace, task: TaskManifest, by_key: Images, partition: Partition) -> list[Key]:
    """Return the images of a class that were in no group before, and that the task's outlier filter keeps."""
    images = sorted(by_key.items(), key=lambda each: each[1].relative)
    new = [key for key, _ in images if key not in partition.number_of]
    if new and kind_of(task).filters_outliers:
        members = [image for _, image in images]
        closest = closest_features(lambda: workspace.training_features(task, members), alpha=task.alpha)
        is_new = set(new)
        new = [key for (key, _), is_close in zip(images, closest, strict=True) if is_close and key in is_new]
    return new


def _dealer(workspace: Workspace, task: TaskManifest, label: int) -> np.random.Generator:
    """Return what deals the images of a class.

    The groups are the same at every start until they are recorded. The shuffle depends on the secret: with known
    groups, several submissions could be solved for the sums of single ones.
    """
    secret = workspace.store.secret
    key = hmac.digest(secret, f"{task.seed}/{workspace.settings.device_id}/{label}".encode(), "sha256")
    return np.random.default_rng(list(key))


def _with_new_blocks(
    workspace: Workspace,
    task: TaskManifest,
    by_label: Sequence[Images],
    new: Sequence[Sequence[Key]],
    partition: Partition,
) -> tuple[Partition, dict[int, NDArray[np.float16]]]:
    """Return the partition with blocks of the new images, and their coefficients; as it was if there is none."""
    keys, widths = training_feature_keys(task), _widths(workspace, task)
    size, after = _least(task), partition
    if sum(widths) > MAX_VALUES or sum(map(len, new)) < MIN_BLOCK_IMAGES:
        return partition, {}
    names: dict[int, str] = {}
    for label, by_key in enumerate(by_label):
        after, taken = image_blocks.regroup_for_block(
            after,
            frozenset(by_key),
            new[label],
            size=size,
            min_images=task.min_images,
            rng=_dealer(workspace, task, label),
        )
        names |= dict.fromkeys(taken, task.classes[label])
    images = {key: image for by_key in by_label for key, image in by_key.items()}
    files: dict[int, NDArray[np.float16]] = {}
    for numbers in _parts(after, names, most=MOST_FEATURE_VALUES // sum(widths)):
        members = sorted((key, number) for number in numbers for key in after.groups[number].images)
        group_numbers = [number for _, number in members]
        found = coefficients(
            workspace.features([images[key] for key, _ in members], keys, sum(widths)),
            np.unique([names[number] for number in group_numbers], return_inverse=True)[1],
            np.unique(group_numbers, return_inverse=True)[1],
            batch_size=size,
            widths=widths,
        )
        if found is None:
            return partition, {}
        block = Block(size, digest_of(_packed(found)))
        part_names = {number: names[number] for number in numbers}
        after, number = image_blocks.with_block(after, part_names, block)
        files[number] = found
    return (after, files) if files else (partition, {})


def _released(
    workspace: Workspace,
    task: TaskManifest,
    scan: DistinctImages,
    by_label: Sequence[Images],
    new: Sequence[Sequence[Key]],
    partition: Partition,
    files: Mapping[int, NDArray[np.float16]],
) -> tuple[list[ReleasedImages], list[ReleasedBlock], bool, Partition]:
    """Return the released images of each class, the blocks, if one awaits an image, and the partition that notes it."""
    blocks: list[ReleasedBlock] = []
    awaits_block = False
    awaited, unused = Counter[str](), Counter[str]()
    least, block_size = _least(task), _block_size(workspace, task)
    for number in partition.blocks:
        members = partition.members(number)
        names = {key: partition.groups[group].name for key, group in members.items()}
        suits = image_blocks.suits(partition, number, task.classes, least=least)
        if not suits or not members.keys() <= scan.places.keys():
            unused.update(name for key, name in names.items() if key in scan.places)
            awaited.update(names[key] for key in partition.awaited & members.keys())
            awaits_block |= suits and not partition.awaited.isdisjoint(members)
            continue
        images = tuple(scan.image(key, name) for key, name in names.items())
        labels = np.array([image.label for image in images], np.int64)
        rows = most_rows(len(images), block_size) if block_size else 0
        rows = rows_within(files[number][:rows], labels, batch_size=least)
        moved = sum(key in partition.moved for key in members)
        blocks.append(ReleasedBlock(images, labels, files[number][:rows], moved))
        partition = image_blocks.after_release(partition, number, min_images=task.min_images)
    classes: list[ReleasedImages] = []
    for label, (name, by_key) in enumerate(zip(task.classes, by_label, strict=True)):
        each = _released_groups(task, by_key, new[label], partition)
        partition = partition.after_release(frozenset(by_key), min_images=task.min_images)
        in_class = [[image for image in block.images if image.label == label] for block in blocks]
        if block_size:
            each = replace(each, in_blocks=sum(map(len, in_class)))
        else:
            each = _with_classes_of_blocks(each, in_class, batch_size=task.batch_size)
        classes.append(replace(each, missing=each.missing + awaited[name], unused=unused[name]))
    return classes, blocks if block_size else [], awaits_block, partition


def _released_groups(
    task: TaskManifest, by_key: Images, new: Sequence[Key], partition: Partition
) -> ReleasedImages:
    """Return the images of one class's groups that are released."""
    present, size = frozenset(by_key), max(task.batch_size, task.min_images)
    groups = partition.released(present, min_images=task.min_images)
    prototype_of = {
        key: number for number, group in enumerate(pack(groups, batch_size=task.batch_size)) for key in group
    }
    members = [(image, prototype_of[key]) for key, image in by_key.items() if key in prototype_of]
    members.sort(key=lambda member: member[0].relative)
    grouped = {key for key in by_key if key in partition.number_of}
    waiting = len(grouped | set(new)) - sum(map(partition.is_apart, grouped)) - len(members)
    waiting = waiting if grouped else 0
    awaiting = partition.awaiting(by_key)
    lost = frozenset[Key]().union(*map(partition.lost_by, awaiting))
    held_back = present & frozenset[Key]().union(*(group.images for group in awaiting))
    more = more_needed(partition, present, new, batch_size=size, min_images=task.min_images)
    return ReleasedImages(
        tuple(image for image, _ in members),
        tuple(number for _, number in members),
        waiting,
        more if waiting > len(held_back) else 0,
        len(lost),
    )


def _with_classes_of_blocks(
    released: ReleasedImages, in_class: Sequence[Sequence[LabeledImage]], *, batch_size: int
) -> ReleasedImages:
    """Return the images with those of blocks, of each of which one class is one prototype.

    A prototype of fewer than `batch_size` images, which a class has alone, joins that of the first block.
    """
    is_small = 0 < len(released.images) < batch_size
    numbers = count(max(released.prototypes, default=-1) + (not is_small))
    members = [*zip(released.images, released.prototypes, strict=True)]
    for images in filter(None, in_class):
        members += zip(images, repeat(next(numbers)))
    members.sort(key=lambda member: member[0].relative)
    return replace(
        released,
        images=tuple(image for image, _ in members),
        prototypes=tuple(number for _, number in members),
    )


def _parts(partition: Partition, names: Mapping[int, str], *, most: int) -> list[list[int]]:
    """Return the groups of each block of about `most` images, class after class; `names` are the groups' classes."""
    groups = sorted(names, key=lambda number: (names[number], number))
    sizes = np.array([len(partition.groups[number].images) for number in groups])
    images = int(sizes.sum())
    if images < MIN_BLOCK_IMAGES:
        return []
    parts = -(-images // most)
    part_of = (np.cumsum(sizes) - sizes) * parts // images
    return [[groups[at] for at in np.flatnonzero(part_of == part)] for part in range(parts)]


def _least(task: TaskManifest) -> int:
    """Return the images that a group of a block, and a class in one, has at least."""
    return max(MIN_GROUP_IMAGES, task.batch_size, task.min_images)


def _widths(workspace: Workspace, task: TaskManifest) -> list[int]:
    """Return the number of values of each layer of the task's backbones."""
    widths: list[int] = []
    for backbone in workspace.backbones(task):
        facts = backbone.metadata
        widths += [block.width for block in facts.blocks or ()] or [facts.feature_size]
    return widths
