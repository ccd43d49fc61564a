"""Builds the manifests that are published to the fleet."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from aggregator.algorithms.algorithm import OneShot, RoundAlgorithm
from aggregator.algorithms.registry import find_algorithm
from aggregator.config.privacy import PrivacyBudget
from aggregator.config.schema import TaskFile
from aggregator.storage.heads import HeadRecord
from protocol.errors import ConfigError
from protocol.statistics.noisy_sums import MAX_DISCRETENESS, discreteness, released_values
from protocol.wire.codec import encode
from protocol.wire.messages import (
    MAX_MANIFEST_BYTES,
    MAX_RELEASED,
    BlobRef,
    DifferentialPrivacy,
    HeadRef,
    Program,
    RoundManifest,
    Statistics,
    TaskManifest,
)


def program_of(learning: RoundAlgorithm, graphs: Mapping[str, BlobRef]) -> Program:
    return Program(
        **graphs, persistent=learning.persistent, uploaded=learning.uploaded, batch_size=learning.batch_size
    )


def task_manifest(
    task: TaskFile,
    backbones: Sequence[BlobRef],
    *,
    program: Program | None = None,
    statistics: Statistics | None = None,
    columns: tuple[tuple[int, int], ...] = (),
) -> TaskManifest:
    """Return the manifest of a task file.

    Raises:
        ConfigError: it exceeds the maximum size of a manifest, or its noise cannot be made on a device.
    """
    budget, private = task.privacy.dp, None
    if budget is not None and statistics is not None:
        operator = statistics.second_operator
        honest = 1 if operator is UNSET else operator.honest
        private = _differential_privacy(
            budget, classes=len(task.classes), size=statistics.size, honest=honest
        )
    manifest = TaskManifest(
        fleet=task.fleet,
        algorithm=task.algorithm,
        classes=task.classes,
        backbones=tuple(backbones),
        alpha=task.client.alpha if task.privacy.dp is None and statistics is None else 1.0,
        batch_size=task.client.batch_size if task.privacy.dp is None else 1,
        min_images=task.client.min_images if task.privacy.dp is None else 1,
        seed=task.client.seed,
        program=program,
        statistics=statistics,
        perturbation=task.privacy.perturbation,
        columns=columns if columns and statistics is None else msgspec.UNSET,
        differential_privacy=private,
        prototypes="auto" if accepts_blocks(task) else UNSET,
    )
    size = len(encode(manifest))
    if size > MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"the task manifest has {size} bytes, more than {MAX_MANIFEST_BYTES}: use fewer or shorter class names"
        )
    return manifest


def accepts_blocks(task: TaskFile) -> bool:
    """Return whether devices upload principal prototypes: batches alone can be perturbed, or train the paper's head."""
    method = find_algorithm(task.algorithm)
    return (
        task.client.prototypes == "auto"
        and task.privacy.perturbation is None
        and task.training.recipe == "default"
        and issubclass(method, OneShot)
        and method.blocks
    )


def _differential_privacy(
    budget: PrivacyBudget, *, classes: int, size: int, honest: int
) -> DifferentialPrivacy:
    multiplier = budget.noise_multiplier
    if sum(released_values(classes=classes, size=size).values()) > MAX_RELEASED:
        raise ConfigError(f"`privacy.dp`: {classes} classes and {size} values are too many for a device")
    if discreteness(multiplier, classes=classes, size=size, honest=honest) > MAX_DISCRETENESS:
        raise ConfigError(
            f"`privacy.dp.epsilon`: {budget.epsilon:g} is too much for {classes} classes and {size} values: lower it"
        )
    return DifferentialPrivacy(
        noise_multiplier=multiplier,
        delta=budget.delta,
        max_epsilon=budget.max_epsilon,
        images_per_person=budget.images_per_person or UNSET,
        person_level=budget.person_level or UNSET,
    )


def round_manifest(task: bytes, number: int, *, learning: RoundAlgorithm, tensors: BlobRef) -> RoundManifest:
    """Return the manifest of a round; after the last round, its number equals `rounds`."""
    return RoundManifest(
        task=task,
        number=min(number, learning.rounds),
        rounds=learning.rounds,
        epochs=learning.epochs_of(number) if number < learning.rounds else 0,
        tensors=tensors,
    )


def head_ref(row: HeadRecord) -> HeadRef:
    in_rounds = row.tensors is not None
    return HeadRef(
        version=row.version,
        head=BlobRef(
            digest=row.digest,
            size_bytes=row.size_bytes,
            name="head.onnx" if in_rounds else f"head-{row.version}.onnx",
        ),
        devices=row.devices,
        prototypes=row.prototypes,
        metrics=dict(row.metrics),
        round=row.version - 1 if in_rounds else None,
        tensors=row.tensors,
    )
