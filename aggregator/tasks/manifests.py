"""Builds the manifests that are published to the fleet."""

from collections.abc import Mapping, Sequence

from aggregator.algorithms.program import Algorithm
from aggregator.config.schema import PrivacyBudget, TaskFile
from aggregator.storage.heads import HeadRecord
from aggregator.tasks.noise_calibration import noise_multiplier
from protocol.errors import ConfigError
from protocol.wire.codec import encode
from protocol.wire.messages import (
    MAX_MANIFEST_BYTES,
    BlobRef,
    DifferentialPrivacy,
    HeadManifest,
    HeadRef,
    Program,
    RoundManifest,
    TaskManifest,
)


def program_of(learning: Algorithm, graphs: Mapping[str, BlobRef]) -> Program:
    """Return the program of a task with rounds, from its graphs by role."""
    return Program(
        **graphs, persistent=learning.persistent, uploaded=learning.uploaded, batch_size=learning.batch_size
    )


def task_manifest(
    task: TaskFile, backbones: Sequence[BlobRef], *, program: Program | None = None
) -> TaskManifest:
    """Return the manifest of a task file.

    Raises:
        ConfigError: it exceeds the maximum size of a manifest.
        RuntimeMissing: the task is differentially private and dp-accounting is not installed.
    """
    manifest = TaskManifest(
        fleet=task.fleet,
        algorithm=task.algorithm,
        classes=task.classes,
        backbones=tuple(backbones),
        alpha=task.client.alpha if task.privacy.dp is None else 1.0,
        batch_size=task.client.batch_size,
        min_images=task.client.min_images,
        seed=task.client.seed,
        program=program,
        perturbation=task.privacy.perturbation,
        differential_privacy=None if task.privacy.dp is None else differential_privacy_of(task.privacy.dp),
    )
    size = len(encode(manifest))
    if size > MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"the task manifest has {size} bytes, more than {MAX_MANIFEST_BYTES}: use fewer or shorter class names"
        )
    return manifest


def differential_privacy_of(budget: PrivacyBudget) -> DifferentialPrivacy:
    """Return the wire form of `[privacy.dp]`, with the smallest noise multiplier that epsilon and delta allow.

    Raises:
        RuntimeMissing: dp-accounting is not installed.
    """
    return DifferentialPrivacy(
        clip_norm=budget.clip_norm,
        noise_multiplier=noise_multiplier(budget.epsilon, budget.delta),
        delta=budget.delta,
        max_epsilon=budget.max_epsilon,
    )


def round_manifest(task: bytes, number: int, *, learning: Algorithm, tensors: BlobRef) -> RoundManifest:
    """Return the manifest of a round; after the last round, its number equals `rounds`."""
    return RoundManifest(
        task=task,
        number=min(number, learning.rounds),
        rounds=learning.rounds,
        epochs=learning.epochs_of(number) if number < learning.rounds else 0,
        tensors=tensors,
    )


def head_manifest(
    task: bytes, current: HeadRecord, *, candidate: HeadRecord | None = None, canary_rank_limit: int = 0
) -> HeadManifest:
    """Return the manifest of the current head and of the candidate for canaries."""
    return HeadManifest(
        task=task,
        current=head_ref(current),
        candidate=None if candidate is None else head_ref(candidate),
        canary_rank_limit=canary_rank_limit,
    )


def head_ref(row: HeadRecord) -> HeadRef:
    """Return the reference to a head."""
    in_rounds = row.tensors is not None
    return HeadRef(
        version=row.version,
        head=BlobRef(
            digest=row.digest,
            size_bytes=row.size_bytes,
            name="head.onnx" if in_rounds else f"head-{row.version}.onnx",
        ),
        devices=len(row.members),
        prototypes=row.prototypes,
        metrics=dict(row.metrics),
        round=row.version - 1 if in_rounds else None,
        tensors=row.tensors,
    )
