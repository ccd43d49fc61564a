"""A device with made-up features, and the coefficients on its images of everything that it has released."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.core.events import BuildSubmission
from edge_client.images.image_scanner import Scan
from edge_client.images.images import LabeledImage, normal
from edge_client.kinds.image_features import FoundImages, prototype_columns
from edge_client.kinds.image_grouping import Grouping
from edge_client.kinds.prepared_submission import NoPrototype, PreparedSubmission, make_prototypes
from edge_client.store.device_state import DeviceState
from edge_client.store.image_group_record import Partition
from edge_client.store.stored_values import Secret
from protocol.wire.codec import digest_of
from protocol.wire.messages import BlobRef, TaskManifest
from tests.support.devices.device_factory import group_and_leave, make_manifest, make_workspace
from tests.support.devices.job_states import commit, job_state
from tests.support.graphs.backbones import tiny_backbone
from tests.support.simulation.clocks import FakeClock

SIZES = (60, 36)
"""Values of the features of each backbone."""

FILES = tuple(tiny_backbone(feature_size=size, seed=size) for size in SIZES)
BACKBONES = tuple(
    BlobRef(digest=digest_of(file), size_bytes=len(file), name=str(size))
    for file, size in zip(FILES, SIZES, strict=True)
)
DAY_S = 24 * 3600.0


@dataclass
class BlockDevice:
    """A device of at most `most` images, which lie in the folders that `places` has."""

    folder: Path
    most: int = 300
    places: dict[int, set[str]] = field(default_factory=dict)
    released: list[tuple[int, NDArray[np.float64]]] = field(default_factory=list)
    """For each released vector, the larger of `batch_size` and `min_images` of its task, and its coefficients."""
    elapsed_s: float = 0.0
    awaits_block: bool = False
    """True if the last upload was without a block that awaits an image."""
    unusable: set[int] = field(default_factory=set)
    """Images of which the task's backbones give no features."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        strong = rng.standard_t(2, (self.most, 8))  # some images are outliers
        self.features = [
            (strong @ rng.normal(size=(8, size)) + 0.3 * rng.normal(size=(self.most, size))).astype(
                np.float32
            )
            for size in SIZES
        ]
        self.open()

    def open(self) -> None:
        """Start the program, or start it again."""
        self.workspace, self.state = make_workspace(self.folder), DeviceState(self.folder / "state")
        self.state.clock = self.clock = FakeClock(self.elapsed_s)
        self.state.set(Secret(bytes(32)))
        for file in FILES:
            self.state.blobs.put(file)

    def close(self) -> None:
        self.workspace.cache.close()
        self.state.close()

    def back_up(self, folder: Path) -> None:
        """Copy the state folder, while no program uses it."""
        self.close()
        shutil.copytree(self.folder, folder)
        self.open()

    def restore(self, folder: Path) -> None:
        """Replace the state folder by a copy."""
        self.close()
        shutil.rmtree(self.folder)
        shutil.copytree(folder, self.folder)
        self.open()

    def put(self, numbers: Iterable[int], *names: str) -> None:
        """Let images lie in these folders only; in none, they are deleted."""
        for number in numbers:
            self.places[number] = set(names)

    @property
    def partition(self) -> Partition:
        return self.state.image_groups.read()

    def images_of(self, keys: Iterable[bytes]) -> set[int]:
        return {int.from_bytes(key, "big") for key in keys}

    def wait(self, seconds: float = 25 * 3600) -> None:
        self.elapsed_s += seconds
        self.clock.elapsed_s = self.elapsed_s

    def begin(self) -> None:
        """Begin a job."""
        self.workspace.store = job_state(self.state)

    def found(self, manifest: TaskManifest) -> FoundImages:
        """Return the images of the task's classes, with features and digests."""
        images, digests = [], {}
        for number, names in sorted(self.places.items()):
            for name in sorted(names & set(manifest.classes)):
                label = manifest.classes.index(name)
                image = LabeledImage(Path(), f"{name}/{number:04}", label, size_bytes=1, mtime_ns=1)
                images.append(image)
                digests[image.identity] = number
        for features, blob in zip(self.features, BACKBONES, strict=True):
            self.workspace.cache.put(
                blob.digest.hex(), [(name, features[at]) for name, at in digests.items()], []
            )
        self.workspace.cache.put_contents({name: at.to_bytes(4, "big") for name, at in digests.items()})
        names = {name for each in self.places.values() for name in each} - set(manifest.classes)
        scan = Scan(tuple(images), unknown_names=frozenset(map(normal, names)))
        usable = tuple(each for each in images if digests[each.identity] not in self.unusable)
        return FoundImages(usable, (), scan=scan)

    def upload(self, **task: Any) -> PreparedSubmission | None:
        """Release what a task gets, if it can be uploaded to, and note its coefficients."""
        manifest = make_manifest(**{"backbones": BACKBONES[:1], "prototypes": "auto", **task})
        found = self.found(manifest)
        self.begin()
        grouping = group_and_leave(self.workspace, manifest, found)
        commit(self.state, self.workspace.store)
        self.awaits_block = grouping.awaits_block
        try:
            prepared = make_prototypes(self.workspace, BuildSubmission(bytes(32), manifest), found, grouping)
        except NoPrototype:
            return None
        self._note(manifest, prepared, grouping)
        return prepared

    def _note(self, manifest: TaskManifest, prepared: PreparedSubmission, grouping: Grouping) -> None:
        features = [self.features[BACKBONES.index(blob)] for blob in manifest.backbones]
        values = np.concatenate(features, axis=1).astype(np.float64)
        values = values[:, prototype_columns(manifest, values.shape[1])]
        vectors = [
            _indicator(self.most, _numbers(each.images)[np.array(each.prototypes) == number])
            for each in grouping.classes
            for number in range(max(each.prototypes, default=-1) + 1)
        ]
        sums = prepared.prototypes.astype(np.float64) * prepared.counts[:, None]
        np.testing.assert_allclose(
            np.array(vectors).reshape(-1, self.most) @ values, sums, rtol=2e-3, atol=0.3
        )
        means, rows = [], []
        for block in grouping.blocks:
            numbers = _numbers(block.images)
            centered = block.coefficients.astype(np.float64)
            for label in np.unique(block.labels):
                mine = block.labels == label
                means.append(_indicator(self.most, numbers[mine]))
                centered[:, mine] -= centered[:, mine].mean(axis=1, keepdims=True)
            for row in centered:
                rows.append(np.zeros(self.most))
                rows[-1][numbers] = row
        if prepared.block is not None:
            block_sums = prepared.block.means * prepared.block.counts[:, None]
            np.testing.assert_allclose(np.array(means) @ values, block_sums, rtol=1e-3, atol=1e-2)
            of_rows = np.array(rows).reshape(-1, self.most) @ values
            np.testing.assert_allclose(of_rows, prepared.block.rows, rtol=1e-3, atol=1e-2)
        level = max(manifest.batch_size, manifest.min_images)
        self.released += [(level, vector) for vector in (*vectors, *means, *rows)]

    def shares(self, level: int = 0) -> NDArray[np.float64]:
        """Return the largest squared share of each image in any combination of what tasks of a level or more got."""
        vectors = np.array([vector for each, vector in self.released if each >= level]).reshape(-1, self.most)
        if not len(vectors):
            return np.zeros(self.most)
        vectors = np.unique(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), axis=0)
        squares, axes = np.linalg.eigh(vectors.T @ vectors)
        return np.asarray((axes[:, squares > 1e-9] ** 2).sum(axis=1))


def _numbers(images: Iterable[LabeledImage]) -> NDArray[np.intp]:
    return np.array([int(image.relative[-4:]) for image in images], np.intp)


def _indicator(size: int, numbers: NDArray[np.intp]) -> NDArray[np.float64]:
    vector = np.zeros(size)
    vector[numbers] = 1
    return vector
