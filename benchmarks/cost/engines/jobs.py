"""Jobs of simulated fleets: a few different submissions, which the devices share."""

from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.graphs.head_export import map_to_onnx
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.jobs import StatisticsJob
from benchmarks.cost.sums import CLASSES, manifest_of_sums, payloads_of_sums
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef


def statistics_job(folder: Path, devices: int, features: int) -> StatisticsJob:
    """Write the submissions, and return the job that adds those of all devices."""
    feature_map, blobs = FeatureMap(features, 0, seed=0), FolderBlobs(folder / "blobs")
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


def _members(blobs: FolderBlobs, payloads: Iterable[bytes], devices: int) -> dict[str, str]:
    digests = [blobs.put(each).hex() for each in payloads]
    return {str(device): digest for device, digest in enumerate(islice(cycle(digests), devices))}
