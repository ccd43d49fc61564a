"""Jobs of simulated fleets: a few different submissions, which the devices share."""

from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.graphs.head_export import map_to_onnx, mapped
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.jobs import StatisticsJob
from edge_client.data.statistics import to_rows
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, Statistics
from protofleet.simulation.fedtc import task_manifest
from protofleet.simulation.statistics import sums_submission

CLASSES, EACH = 10, 20
"""Classes, and images of a device in each."""
DIFFERENT = 50
"""Submissions that the simulated devices share."""


def statistics_job(folder: Path, devices: int, features: int) -> StatisticsJob:
    """Write the submissions, and return the job that adds those of all devices."""
    feature_map, blobs = FeatureMap(features, 0, seed=0), FolderBlobs(folder / "blobs")
    graph = map_to_onnx(feature_map, num_classes=CLASSES)
    reference = BlobRef(digest=digest_of(graph), size_bytes=len(graph), name="map.onnx")
    manifest = task_manifest(
        "statistics",
        CLASSES,
        alpha=1.0,
        batch_size=1,
        min_images=1,
        seed=0,
        statistics=Statistics(map=reference, size=features),
    )
    task = blobs.put(encode(manifest))
    return StatisticsJob(
        version=1,
        task=task.hex(),
        members=_members(blobs, _payloads(feature_map, features, task=task), devices),
        blobs=str(blobs.folder),
        feature_size=features,
        folder=str(folder),
    )


def _payloads(feature_map: FeatureMap, features: int, *, task: bytes) -> Iterator[bytes]:
    means = np.random.default_rng(99).exponential(size=(CLASSES, features))
    for seed in range(DIFFERENT):
        rng = np.random.default_rng(seed)
        values = np.maximum(means[:, None] + rng.normal(0, 0.2, (CLASSES, EACH, features)), 0)
        of_class = {
            label: to_rows(mapped(feature_map, each)) for label, each in enumerate(values.astype(np.float32))
        }
        yield encode(sums_submission(of_class, task=task, images=EACH * CLASSES))


def _members(blobs: FolderBlobs, payloads: Iterable[bytes], devices: int) -> dict[str, str]:
    digests = [blobs.put(each).hex() for each in payloads]
    return {str(device): digest for device, digest in enumerate(islice(cycle(digests), devices))}
