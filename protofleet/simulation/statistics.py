"""Statistics in process: the devices' sums and messages, and the aggregator's job, without a network."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.config.schema import Robust
from aggregator.graphs.head_export import map_to_onnx, mapped
from aggregator.intake.validation import Expectation
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.jobs import StatisticsJob, Workspace
from aggregator.training.robust.weights import Counting
from aggregator.training.statistics_job import Solved, run, solve_sums
from edge_client.prototypes.statistics import group_rows, to_rows
from protocol.errors import ConfigError
from protocol.models.cpu_session import cpu_session
from protocol.statistics import second_moment
from protocol.statistics.row_sums import RowSums
from protocol.wire.arrays import to_tensor
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, Statistics, Submission, TaskManifest
from protofleet.simulation.engine import LOCAL, Engine
from protofleet.simulation.fleet import Features
from protofleet.submissions import submission_of, task_manifest

ROWS_PER_RUN = 4096

WEIGHTS_ONLY = Robust(detect_outliers=False)


@dataclass(frozen=True)
class MappedFeatures:
    """A data set and the rows of its training images, int8 (n, D), by a map."""

    features: Features
    feature_map: FeatureMap
    rows: NDArray[np.int8]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One fleet's head."""

    accuracy: float
    devices: int
    """Clients that had something to send."""
    rows: int
    """That count: groups, or images where these are not grouped."""
    bytes_up: int
    """Bytes of all submissions, as encoded for the wire."""
    bytes_down: int
    """Bytes of the map's graph, and of the head's file, which has the map too."""
    logits: NDArray[np.float32]
    """Of the test images, (m, C)."""
    solve_seconds: float
    quarantined: Sequence[str]
    counting: Counting


def map_features(features: Features, *, random_features: int, seed: int) -> MappedFeatures:
    """Map a data set's training features by the graph that a task with these settings has.

    Raises ConfigError if there are too many.
    """
    size, normalized = features.train.shape[1], features.normalized
    feature_map = FeatureMap(size, random_features, seed, normalized=normalized)
    feature_map.check_size()
    rows = [to_rows(mapped(feature_map, part)) for part in _parts(features.train)]
    return MappedFeatures(features, feature_map, np.concatenate(rows))


def _parts(rows: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    return (rows[start : start + ROWS_PER_RUN] for start in range(0, len(rows), ROWS_PER_RUN))


def run_fleet(
    data: MappedFeatures,
    owners: NDArray[np.int64],
    *,
    batch_size: int,
    seed: int,
    robust: Robust = WEIGHTS_ONLY,
    engine: Engine = LOCAL,
) -> Result:
    """Encode every client's submission, make the head of them as the aggregator does, and evaluate its ONNX file.

    Args:
        data: the features of all clients.
        owners: the client of each training image, (n,).
        batch_size: images in a group; 1 for sums of single images.
        seed: of the groups.
        robust: protection; by default outliers are not detected.
        engine: where devices compute.
    """
    collected = _collected(data, owners, batch_size=batch_size, seed=seed, robust=robust, engine=engine)
    with collected as (job, workspace):
        sizes = [len(workspace.blobs.read(bytes.fromhex(digest))) for digest in job.members.values()]
        solved = run(job, workspace)
        head = (workspace.folder / "head.onnx").read_bytes()
    logits, truth = _logits(head, data.features.test), data.features.test_labels
    return Result(
        accuracy=float((logits.argmax(axis=1) == truth).mean()),
        devices=len(job.members),
        rows=solved.prototypes,
        bytes_up=sum(sizes),
        bytes_down=len(_graph(data)) + len(head),
        logits=logits,
        solve_seconds=solved.metrics["seconds"],
        quarantined=sorted(solved.quarantined),
        counting=solved.counting,
    )


def solve_fleet(
    data: MappedFeatures, owners: NDArray[np.int64], *, batch_size: int, seed: int, robust: Robust
) -> Solved:
    """Encode every client's submission, and solve for the head of them as the aggregator does.

    The arguments are those of `run_fleet`.

    Raises:
        ProtofleetError: the submissions give no head.
    """
    collected = _collected(data, owners, batch_size=batch_size, seed=seed, robust=robust, engine=LOCAL)
    with collected as (job, workspace):
        if not job.members:
            raise ConfigError("expected a device with several images of a class, got none: add images")
        manifest = job.manifest(workspace.blobs)
        expectation = Expectation(bytes.fromhex(job.task), manifest, data.feature_map.size)
        return solve_sums(job, workspace, expectation)


@contextmanager
def _collected(
    data: MappedFeatures,
    owners: NDArray[np.int64],
    *,
    batch_size: int,
    seed: int,
    robust: Robust,
    engine: Engine,
) -> Iterator[tuple[StatisticsJob, Workspace]]:
    """Encode every client's submission; gives the aggregator's job for them, and where it runs."""
    manifest = _manifest(data, batch_size=batch_size)
    task = digest_of(encode(manifest))
    with tempfile.TemporaryDirectory() as folder:
        blobs = FolderBlobs(Path(folder) / "blobs")
        made = _submissions(data, owners, manifest, task=task, seed=seed, engine=engine)
        members = {client: blobs.put(payload).hex() for client, payload in made}
        job = StatisticsJob(
            version=1,
            task=blobs.put(encode(manifest)).hex(),
            members=members,
            feature_size=data.feature_map.feature_size,
            random_features=data.feature_map.random_features,
            seed=data.feature_map.seed,
            normalized=data.feature_map.normalized,
            robust=robust,
        )
        yield job, Workspace(blobs, Path(folder), lambda _: None)


def _graph(data: MappedFeatures) -> bytes:
    return map_to_onnx(data.feature_map, num_classes=data.features.classes)


def _manifest(data: MappedFeatures, *, batch_size: int) -> TaskManifest:
    graph = _graph(data)
    reference = BlobRef(digest=digest_of(graph), size_bytes=len(graph), name="map.onnx")
    return task_manifest(
        "statistics",
        tuple(map(str, range(data.features.classes))),
        alpha=1.0,
        batch_size=batch_size,
        min_images=min(2, batch_size),
        seed=0,
        statistics=Statistics(map=reference, size=data.feature_map.size),
    )


def _submissions(
    data: MappedFeatures,
    owners: NDArray[np.int64],
    manifest: TaskManifest,
    *,
    task: bytes,
    seed: int,
    engine: Engine,
) -> Iterator[tuple[str, bytes]]:
    """Yield each client that has something to send, and its encoded submission."""
    numbers, labels = np.unique(owners).tolist(), data.features.train_labels
    items = ((number, data.rows[owners == number], labels[owners == number]) for number in numbers)
    made = engine.map(_encoded, (manifest, task, seed), items, count=len(numbers))
    return ((str(number), payload) for number, payload in zip(numbers, made, strict=True) if payload)


def _encoded(
    shared: tuple[TaskManifest, bytes, int], device: tuple[int, NDArray[np.int8], NDArray[np.int64]]
) -> bytes:
    """Return a client's encoded submission; empty if it has nothing to send."""
    (manifest, task, seed), (number, rows, labels) = shared, device
    of_class = {
        label: mine
        for label in range(len(manifest.classes))
        if len(mine := rows[labels == label]) >= manifest.min_images
    }
    if not of_class:
        return b""
    if manifest.batch_size == 1:
        return encode(sums_submission(of_class, task=task, images=len(labels)))
    rng, size = np.random.default_rng([seed, number]), manifest.batch_size
    return encode(group_submission(of_class, task=task, images=len(labels), batch_size=size, rng=rng))


def sums_submission(of_class: dict[int, NDArray[np.int8]], *, task: bytes, images: int) -> Submission:
    """Return the submission of a device that sends class sums of its rows, int8 (n, D) by class."""
    sums = RowSums(next(iter(of_class.values())).shape[1])
    for label, rows in of_class.items():
        sums.add(label, rows)
    labels, counts, class_sums, triangle = sums.result()
    return submission_of(
        labels,
        counts,
        task=task,
        images=images,
        prototypes=to_tensor(class_sums),
        tensors={"second_moment": second_moment.encode(triangle, counts, class_sums)},
    )


def group_submission(
    of_class: dict[int, NDArray[np.int8]],
    *,
    task: bytes,
    images: int,
    batch_size: int,
    rng: np.random.Generator,
) -> Submission:
    """Return the submission of a device that sends a row for each group of its images."""
    made = []
    for rows in of_class.values():
        groups = max(len(rows) // batch_size, 1)  # the remainder joins the last one
        numbers = rng.permutation(np.minimum(np.arange(len(rows)) // batch_size, groups - 1))
        made.append(group_rows([rows], numbers, size=rows.shape[1]))
    values, counts = (np.concatenate(each) for each in zip(*made, strict=True))
    labels = np.repeat(list(of_class), [len(counts) for _, counts in made])
    return submission_of(labels, counts, task=task, images=images, prototypes=to_tensor(values))


def _logits(head: bytes, features: NDArray[np.float32]) -> NDArray[np.float32]:
    session = cpu_session(head)
    return np.concatenate([session.run(["logits"], {"feature": part})[0] for part in _parts(features)])
