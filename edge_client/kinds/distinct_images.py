"""A device's training images by the digests of their pixels: images of the same pixels are one image."""

from dataclasses import replace

from edge_client.images.images import LabeledImage, normal
from edge_client.kinds.image_features import FoundImages, Workspace
from edge_client.privacy import image_blocks
from edge_client.store.image_group_record import Key, Partition
from protocol.wire.messages import TaskManifest

Images = dict[Key, LabeledImage]
"""The images of a class."""

NO_GROUPS = Partition()


class DistinctImages:
    """The training images that were found, by the digests of their pixels."""

    def __init__(self, workspace: Workspace, task: TaskManifest, found: FoundImages) -> None:
        self._task, self._unknown_names = task, found.scan.unknown_names
        self._label_of = {name: label for label, name in enumerate(task.classes)}
        keys = workspace.cache.contents()
        self._images: dict[Key, dict[str, LabeledImage]] = {}
        """The first image of each class with these pixels; classes in the order of the task's."""
        for name, label in self._label_of.items():
            for image in found.for_training(label):
                if image.identity in keys:
                    self._images.setdefault(keys[image.identity], {}).setdefault(name, image)
        usable = {image.relative for image in found.usable}
        self.replaced = {key for relative, key in workspace.cache.replaced().items() if relative in usable}
        self.places = {key: tuple(places) for key, places in self._images.items()}
        there = {keys[identity] for identity in found.scan.identities if identity in keys}
        self.unusable = there - self.places.keys()

    def seen(self, partition: Partition) -> set[str]:
        """Return the task's classes, and those of blocks that are no folder or label any more."""
        names = {group.name for group in partition.groups.values()} | {*partition.moved.values()}
        return {*self._task.classes, *(name for name in names if normal(name) not in self._unknown_names)}

    def image(self, key: Key, name: str) -> LabeledImage:
        """Return an image as one of a class, in which it may not lie."""
        places = self._images[key]
        image = places.get(name) or next(iter(places.values()))
        return replace(image, label=self._label_of[name])

    def by_label(self, partition: Partition = NO_GROUPS) -> list[Images]:
        """Return the images of each class, each in one of them: in that of its block's group, or else the first."""
        fixed = image_blocks.places_of_groups(partition, self.places)
        by_label: list[Images] = [{} for _ in self._task.classes]
        for key, places in self.places.items():
            name = fixed.get(key, places[0])
            by_label[self._label_of[name]][key] = self.image(key, name)
        return by_label
