"""The job that trains a head.

It runs as a process of its own: the aggregator meanwhile accepts submissions, never imports torch, and gets the memory
back. The job imports torch only to train an adapter.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.arrays import Arrays
from aggregator.algorithms.fedtc.head import Dense, require_layers
from aggregator.algorithms.novelty import ClassDirections, directions_of
from aggregator.algorithms.statistics.feature_map import FeatureMap, selected
from aggregator.algorithms.statistics.noisy_ridge import Shortening
from aggregator.coordination.minimums import FEW_IMAGES, FEW_PROTOTYPES
from aggregator.graphs.head_export import head_to_onnx, max_difference
from aggregator.intake.validation import Expectation, Prototypes, check_submission
from aggregator.storage.heads import ADAPTER_MISSING
from aggregator.training.jobs import (
    CollectionJob,
    HeadJob,
    Result,
    Workspace,
    checked_parts,
    write_head,
)
from aggregator.training.robust.training_set import judged_set
from aggregator.training.robust.weights import stated_images
from protocol.errors import ProtofleetError
from protocol.wire.messages import Submission, TaskManifest

MAX_ONNX_DIFFERENCE = 1e-4


def run(job: HeadJob, workspace: Workspace) -> Result:
    """Train a head, verify its ONNX file, and write it. The same submissions make the same bytes.

    Raises:
        ProtofleetError: the data cannot be trained on, or ONNX Runtime computes something else.
    """
    manifest = job.manifest(workspace.blobs)
    columns = selected(manifest.columns, job.feature_size)
    expectation = Expectation(bytes.fromhex(job.task), manifest, len(columns))
    arrays = Arrays(workspace.folder)

    def check(submission: Submission) -> Prototypes:
        part = check_submission(submission, expectation)
        block = part.block
        if block is not None:
            means, rows, diagonal = map(arrays.keep, (block.means, block.rows, block.diagonal))
            block = dataclasses.replace(block, means=means, rows=rows, diagonal=diagonal)
        return dataclasses.replace(part, values=arrays.keep(part.values), block=block)

    parts, invalid = checked_parts(job.submissions(workspace.blobs), check)
    data, judgment, counting = judged_set(
        parts,
        classes=manifest.classes,
        widths=job.widths,
        robust=job.robust,
        released=job.released,
        version=job.version,
        arrays=arrays,
    )
    used = [part for device, part in parts.items() if device not in judgment.quarantined]
    numbers = np.bincount(data.labels)
    if manifest.accepts_blocks:
        numbers = stated_images(used).sum(axis=0).astype(np.int64)
    workspace.report({"prototypes": int(numbers.sum())})
    started_s = time.perf_counter()
    trained = job.method.train(data, job.training, report=workspace.report)
    require_layers(trained.layers, features=data.values.shape[1], classes=data.num_classes)
    seconds = time.perf_counter() - started_s
    figures = {
        "loss": trained.loss,
        "accuracy": trained.accuracy,
        "epochs": float(trained.epochs),
        "temperature": trained.temperature,
    }
    if trained.adapter_missing:
        figures[ADAPTER_MISSING] = 1.0
    features = np.zeros((len(data.values[:256]), job.feature_size), np.float32)
    features[:, columns] = data.values[:256]
    directions = directions_of(data) if job.has_novelty else None
    metrics = write_checked(
        job, workspace, manifest, trained.layers, figures, features=features, directions=directions
    )
    return Result(
        prototypes=int(numbers.sum()),
        metrics={**metrics, "seconds": seconds},
        quarantined={**invalid, **judgment.quarantined},
        warning=judgment.warning,
        few_prototypes=few_prototypes(numbers, manifest),
        counting=counting,
    )


def write_checked(
    job: CollectionJob,
    workspace: Workspace,
    manifest: TaskManifest,
    layers: Sequence[Dense],
    figures: dict[str, float],
    *,
    features: NDArray[np.float32] | None = None,
    directions: ClassDirections | None = None,
    feature_map: FeatureMap | Shortening | None = None,
) -> dict[str, float]:
    """Write a head's files, and return its figures with the greatest difference from its layers on features.

    Without any, these are random.

    Raises:
        ProtofleetError: ONNX Runtime computes something else.
    """
    columns = selected(manifest.columns, job.feature_size)
    metadata = job.metadata(manifest, figures)
    head = head_to_onnx(
        layers, metadata=metadata, feature_map=feature_map, columns=columns, directions=directions
    )
    if features is None:
        features = random_features(job.feature_size)
    difference = max_difference(layers, head, features, feature_map, columns=columns, directions=directions)
    if not difference <= MAX_ONNX_DIFFERENCE:
        raise ProtofleetError(
            f"the head in ONNX Runtime differs by {difference:.3g}, more than {MAX_ONNX_DIFFERENCE}: not published"
        )
    write_head(head, manifest, workspace)
    return {**figures, "onnx_max_difference": difference}


def random_features(size: int) -> NDArray[np.float32]:
    """Return features (256, size) to compare a head's file on, the same each time, positive as from a backbone."""
    return np.random.default_rng(0).exponential(size=(256, size)).astype(np.float32)


def few_prototypes(numbers: NDArray[np.integer], manifest: TaskManifest) -> dict[str, int]:
    named = zip(manifest.classes, numbers.tolist(), strict=False)
    few = FEW_IMAGES if manifest.accepts_blocks else FEW_PROTOTYPES
    return {name: number for name, number in named if 0 < number < few}
