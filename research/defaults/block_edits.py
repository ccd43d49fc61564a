"""`python -m research block-edits`: blocks and batches where images come in portions, are deleted, or move."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from aggregator.intake.validation import Prototypes
from benchmarks.data.features import backbone_file, load_features, prepared
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.config import Settings
from edge_client.core.events import BuildSubmission
from edge_client.core.state import Mode
from edge_client.images.image_scanner import ImageScanner
from edge_client.images.images import LabeledImage
from edge_client.kinds.builder import leave_groups
from edge_client.kinds.image_features import FoundImages, Workspace
from edge_client.kinds.image_grouping import group_images
from edge_client.kinds.prepared_submission import NoPrototype, encode_submission, make_prototypes
from edge_client.store.device_state import DeviceState
from edge_client.store.feature_cache import FeatureCache
from edge_client.store.job_folder import Built, Result
from edge_client.store.job_state import JobState
from protocol.storage.elapsed_clock import ElapsedClock
from protocol.wire.codec import digest_of
from protocol.wire.messages import BlobRef, TaskManifest
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, share_out
from research.defaults.block_size import BACKBONE, DEVICES, IMAGE_SIZE, accuracy

COLUMNS = {
    "data": "<14", "images": ">7", "what happens": "<16", "blocks": ">7.1%", "MB": ">6.2f", "batches": ">8.1%",
    "MB of batches": ">13.2f",
}  # fmt: skip

EVENTS = {
    "one upload": (1, 0.0, 0.0), "three portions": (3, 0.0, 0.0), "ten portions": (10, 0.0, 0.0),
    "1 % deleted": (1, 0.01, 0.0), "5 % deleted": (1, 0.05, 0.0), "1 % moved": (1, 0.0, 0.01),
    "5 % moved": (1, 0.0, 0.05),
}  # fmt: skip
"""Portions of the images, and shares that are deleted, or that move to their class, after the first upload."""

DAYS_S = 2 * 24 * 3600.0
SECRET = bytes(32)


class _Clock(ElapsedClock):
    """Advances by DAYS_S at each upload."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def now_s(self) -> float:
        return self.elapsed_s

    def keep(self) -> None:
        return


class _Device:
    """The device program's submissions of images whose features are known."""

    def __init__(
        self, workspace: Workspace, state: DeviceState, task: TaskManifest, features: NDArray[np.float32]
    ) -> None:
        self._workspace, self._state, self._task, self._features = workspace, state, task, features
        state.clock = self._clock = _Clock()
        self.uploaded_bytes = 0

    def upload(self, there: NDArray[np.intp], labels: NDArray[np.int64]) -> Prototypes | None:
        """Return what is uploaded of the images that are there, by the classes in which they lie."""
        self._clock.elapsed_s += DAYS_S
        images = tuple(
            LabeledImage(Path(), f"{labels[at]}/{at:06}", int(labels[at]), size_bytes=1, mtime_ns=1)
            for at in there
        )
        names = [image.identity for image in images]
        key = self._task.backbones[0].digest.hex()
        self._workspace.cache.put(key, zip(names, self._features[there], strict=True), [])
        digests = {name: int(at).to_bytes(4, "big") for name, at in zip(names, there, strict=True)}
        self._workspace.cache.put_contents(digests)
        usable, build = FoundImages(images, ()), BuildSubmission(bytes(32), self._task)
        job = self._workspace.store = _job(self._state)
        grouping = group_images(self._workspace, self._task, usable)
        leave_groups(self._workspace, grouping)
        self._state.commit(job.own, Result(outcome=Built(item=None), changes=job.changes))
        try:
            found = make_prototypes(self._workspace, build, usable, grouping)
        except NoPrototype:
            return None
        self.uploaded_bytes += len(encode_submission(found, task=bytes(32), manifest=self._task, sequence=1))
        return Prototypes(
            found.prototypes.astype(np.float32),
            found.labels.astype(np.int64),
            found.counts.astype(np.int64),
            block=found.block,
        )


def _job(state: DeviceState) -> JobState:
    own = state.folder / "job"
    own.mkdir(exist_ok=True)
    return JobState(state.folder, own, state.snapshot(), secret=SECRET)


@click.command("block-edits")
@repeated("--data", "names", type=click.Choice(["fashion_mnist", "cifar10"]), default=("fashion_mnist", "cifar10"),
          help="May be repeated.")  # fmt: skip
@click.option("--images", type=int, default=6_000, show_default=True, help="Of the fleet.")
@repeated(
    "--event", "events", type=click.Choice(list(EVENTS)), default=tuple(EVENTS), help="May be repeated."
)
@repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="May be repeated.")
@json_option
def command(
    *,
    names: tuple[str, ...],
    images: int,
    events: tuple[str, ...],
    seeds: tuple[int, ...],
    json_file: Path | None,
) -> None:
    """Upload with the device program, with blocks and with batches alone; the closed form head of `blocks`.

    Ten devices, Dirichlet 0.1, tested on training images that are held out. MB are those of all uploads together.
    """
    table, runs = Table(COLUMNS, title="Blocks and batches"), []
    for name in names:
        loaded = load_features(name, backbone=BACKBONE, image_size=IMAGE_SIZE, at_most=20_000)
        features = prepared(loaded, root=False, validation=True)
        for each in events:
            rows = np.mean([_run(features, images, each, seed) for seed in seeds], axis=0)
            table.row(name, images, each, *rows)
            runs.append({"data": name, "images": images, "event": each, "figures": rows.tolist()})
    write_json(json_file, "block-edits", tables=[table], seeds=seeds, runs=runs)


def _run(features: Features, images: int, name: str, seed: int) -> list[float]:
    """Return the accuracy and the MB with blocks, and with batches."""
    figures: list[float] = []
    for prototypes in ("auto", UNSET):
        rng = np.random.default_rng(seed)
        chosen = rng.permutation(len(features.train))[:images]
        train, labels = features.train[chosen], features.train_labels[chosen]
        owners = share_out(labels, Partition("dirichlet", 0.1), clients=DEVICES, rng=rng)
        sent, size = [], 0
        for owner in np.unique(owners):
            mine = owners == owner
            with _device(train[mine], features.classes, prototypes) as device:
                last = _edited(device, labels[mine], name, rng, features.classes)
                size += device.uploaded_bytes
            sent += [last] if last else []
        figures += [accuracy(features, sent), size / 1e6]
    return figures


def _edited(
    device: _Device, labels: NDArray[np.int64], name: str, rng: np.random.Generator, classes: int
) -> Prototypes | None:
    """Return a device's last upload."""
    portions, deleted, moved = EVENTS[name]
    order, last = rng.permutation(len(labels)), None
    is_gone, is_wrong = rng.random(len(labels)) < deleted, rng.random(len(labels)) < moved
    wrong = np.where(is_wrong, (labels + rng.integers(1, classes, len(labels))) % classes, labels)
    for portion in range(1, portions + 1):
        last = device.upload(order[: len(order) * portion // portions], wrong) or last
    if deleted or moved:
        for _ in range(2):  # a missing image is awaited at the first upload without it
            last = device.upload(np.flatnonzero(~is_gone), labels) or last
    return last


@contextmanager
def _device(features: NDArray[np.float32], classes: int, prototypes: Any) -> Iterator[_Device]:
    file = backbone_file(BACKBONE, image_size=IMAGE_SIZE).read_bytes()
    task = TaskManifest(
        fleet="edits",
        algorithm="fedtc",
        classes=tuple(map(str, range(classes))),
        backbones=(BlobRef(digest=digest_of(file), size_bytes=len(file), name="backbone"),),
        seed=0,
        alpha=0.99,
        batch_size=5,
        min_images=2,
        prototypes=prototypes,
    )
    with tempfile.TemporaryDirectory() as folder:
        store = DeviceState(Path(folder) / "state")
        store.blobs.put(file)
        cache = FeatureCache(Path(folder) / "features.sqlite")
        settings = Settings(
            broker=None, fleet="edits", device_id="edits", mode=Mode.SERVICE, data=Path(folder), holdout=0.0,
            provider="cpu", threads=1, batch_size=1, backbones=(), rescan_s=1e9,
        )  # fmt: skip
        try:
            workspace = Workspace(settings, _job(store), cache, ImageScanner(settings.data).scan)
            yield _Device(workspace, store, task, features)
        finally:
            cache.close()
            store.close()
