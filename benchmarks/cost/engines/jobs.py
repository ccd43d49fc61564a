"""Jobs of simulated fleets: a few different submissions, which the devices share."""

from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.config.schema import Training
from aggregator.graphs.head_export import map_to_onnx
from aggregator.ingest.validation import Prototypes
from aggregator.training.jobs import HeadJob, StatisticsJob
from benchmarks.cost.sums import CLASSES, DIFFERENT, manifest_of_sums, payloads_of_sums
from protocol.storage.blobstore import BlobStore
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef
from protocol.wire.quantization import prototype_fields
from protofleet.simulation.fedtc import submission_of, task_manifest

DEVICE_PROTOTYPES = 100
"""Prototypes of a device, a tenth in each class."""

BATCH_SIZE = 5
"""Images in a prototype."""


def statistics_job(folder: Path, devices: int, features: int) -> StatisticsJob:
    """Write the submissions, and return the job that adds those of all devices."""
    feature_map, blobs = FeatureMap(features, 0, seed=0), BlobStore(folder / "blobs")
    graph = map_to_onnx(feature_map, num_classes=CLASSES)
    reference = BlobRef(digest=digest_of(graph), size_bytes=len(graph), name="map.onnx")
    manifest = manifest_of_sums(features, batch_size=1, reference=reference)
    task = blobs.put(encode(manifest))
    return StatisticsJob(
        version=1,
        task=task.hex(),
        members=_members(blobs, payloads_of_sums(manifest, features, task=task), devices),
        blobs=str(blobs.folder),
        feature_size=features,
        folder=str(folder),
    )


def head_job(folder: Path, prototypes: int, features: int, *, epochs: int) -> HeadJob:
    """Write the submissions, and return the job of FedTC that trains on those of all devices."""
    blobs = BlobStore(folder / "blobs")
    manifest = task_manifest("fedtc", CLASSES, alpha=0.99, batch_size=BATCH_SIZE, min_images=2, seed=0)
    task = blobs.put(encode(manifest))
    return HeadJob(
        version=1,
        task=task.hex(),
        members=_members(blobs, _prototypes(features, task), prototypes // DEVICE_PROTOTYPES),
        blobs=str(blobs.folder),
        feature_size=features,
        folder=str(folder),
        training=Training(epochs=epochs, device="cpu"),
    )


def _members(blobs: BlobStore, payloads: Iterable[bytes], devices: int) -> dict[str, str]:
    digests = [blobs.put(each).hex() for each in payloads]
    return {str(device): digest for device, digest in enumerate(islice(cycle(digests), devices))}


def _prototypes(features: int, task: bytes) -> Iterator[bytes]:
    """Yield DIFFERENT submissions of classes that are two opposite clusters each: no linear head separates them."""
    centers = np.random.default_rng(99).normal(size=(CLASSES, features)) / np.sqrt(BATCH_SIZE)
    for seed in range(DIFFERENT):
        rng = np.random.default_rng(seed)
        labels = np.arange(DEVICE_PROTOTYPES) % CLASSES
        signs = rng.choice([-1, 1], (DEVICE_PROTOTYPES, 1))
        noise = rng.normal(size=(DEVICE_PROTOTYPES, features)) / np.sqrt(BATCH_SIZE)
        values = signs * centers[labels] + noise
        counts = np.full(DEVICE_PROTOTYPES, BATCH_SIZE)
        part = Prototypes(values.astype(np.float32), labels, counts)
        fields = prototype_fields(values.astype(np.float16))
        yield encode(submission_of(part, task=task, images=int(counts.sum()), **fields))
