"""The groups of images that submissions and rounds are made of."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_client.data.images import LabeledImage
from edge_client.data.outlier_filter import closest_features
from edge_client.privacy.image_groups import more_needed, pack, regroup
from edge_client.storage.image_group_record import Key, Partition
from edge_client.submission.image_features import FoundImages, Workspace
from protocol.wire.messages import TaskManifest


@dataclass(frozen=True)
class ReleasedImages:
    """The images of one class that are released: those of whole groups."""

    images: tuple[LabeledImage, ...]
    prototypes: tuple[int, ...]
    """The prototype that each of them is in."""
    waiting: int
    """Training images that wait until they are enough for a group; 0 if no image of the class was ever in one."""
    more_needed: int
    """New images that these need at least, beside the ones that there are; 0 if none waits for new images."""
    missing: int
    """Images that are awaited, because others of their groups are waiting."""


def group_images(workspace: Workspace, task: TaskManifest, found: FoundImages) -> list[ReleasedImages]:
    """Group the training images, record the groups, and return the released images of each class.

    Images of the same pixels are one image, in the first of its classes. A dry run records nothing.

    Raises:
        ProtofleetError: a feature is not finite.
        StateError: the disk fails.
    """
    by_label = distinct_images(workspace, task, found)
    before, clock = workspace.store.image_groups.read(), workspace.store.clock
    usable = {image.relative for image in found.usable}
    replaced = {key for relative, key in workspace.replaced.items() if relative in usable}
    partition = before.after_scan(frozenset().union(*by_label), now_s=clock.now_s(), replaced=replaced)
    workspace.is_incomplete |= bool(partition.awaited)
    released: list[ReleasedImages] = []
    for label, by_key in enumerate(by_label):
        partition, new, more = _regroup(workspace, task, label, by_key, partition)
        groups = partition.released(frozenset(by_key), min_images=task.min_images)
        partition = partition.after_release(frozenset(by_key), min_images=task.min_images)
        packed = pack(groups, batch_size=task.batch_size)
        prototype_of = {key: number for number, group in enumerate(packed) for key in group}
        members = [(image, prototype_of[key]) for key, image in by_key.items() if key in prototype_of]
        members.sort(key=lambda member: member[0].relative)
        was_grouped = any(key in partition.number_of for key in by_key)
        waiting = sum(key in new or key in partition.number_of for key in by_key) - len(members)
        waiting = waiting if was_grouped else 0
        awaiting = frozenset[Key]().union(*(group.images for group in partition.awaiting(by_key)))
        released.append(
            ReleasedImages(
                tuple(image for image, _ in members),
                tuple(number for _, number in members),
                waiting,
                more if waiting > len(awaiting & by_key.keys()) else 0,
                len(awaiting & partition.awaited),
            )
        )
    if not workspace.dry_run:
        workspace.store.image_groups.write(before, partition)
        clock.keep()
    return released


def distinct_images(
    workspace: Workspace, task: TaskManifest, found: FoundImages
) -> list[dict[Key, LabeledImage]]:
    """Return the training images of each class by the digests of their pixels; each is in the first of its classes."""
    keys = workspace.cache.contents()
    by_label: list[dict[Key, LabeledImage]] = []
    taken: set[Key] = set()
    for label in range(len(task.classes)):
        training = found.for_training(label)
        by_key = {keys[image.identity]: image for image in reversed(training) if image.identity in keys}
        by_label.append({key: image for key, image in by_key.items() if key not in taken})
        taken |= by_key.keys()
    return by_label


def _regroup(
    workspace: Workspace,
    task: TaskManifest,
    label: int,
    by_key: dict[Key, LabeledImage],
    partition: Partition,
) -> tuple[Partition, set[Key], int]:
    """Return the partition after a class has changed, its images that were in no group before, and `more_needed`."""
    images = sorted(by_key.items(), key=lambda each: each[1].relative)
    new = [key for key, _ in images if key not in partition.number_of]
    if new and task.program is None:
        closest = _closest(workspace, task, [image for _, image in images])
        is_new = set(new)
        new = [key for (key, _), is_close in zip(images, closest, strict=True) if is_close and key in is_new]
    # The groups are the same at every start until they are recorded. The shuffle depends on the secret: with known
    # groups, several submissions could be solved for the sums of single ones.
    secret = workspace.secret(task)
    key = hmac.digest(secret, f"{task.seed}/{workspace.settings.device_id}/{label}".encode(), "sha256")
    present, size = frozenset(by_key), max(task.batch_size, task.min_images)
    rng = np.random.default_rng(list(key))
    partition = regroup(partition, present, new, batch_size=size, min_images=task.min_images, rng=rng)
    more = more_needed(partition, present, new, batch_size=size, min_images=task.min_images)
    return partition, set(new), more


def _closest(workspace: Workspace, task: TaskManifest, images: Sequence[LabeledImage]) -> Sequence[bool]:
    """Mark the images that the task's outlier filter keeps."""
    return list(closest_features(lambda: workspace.training_features(task, images), alpha=task.alpha))
