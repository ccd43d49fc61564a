"""Builds the manifests that are published to the fleet."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import msgspec

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.config.schema import PrivacyBudget, TaskFile
from aggregator.storage.heads import HeadRecord
from protocol.errors import ConfigError, RuntimeMissing, pip_command
from protocol.wire.codec import encode
from protocol.wire.messages import (
    MAX_MANIFEST_BYTES,
    BlobRef,
    DifferentialPrivacy,
    HeadRef,
    Program,
    RoundManifest,
    Statistics,
    TaskManifest,
)

_STEPS = 1000
"""Noise multipliers are rounded up to 1/1000, so that the task's identity does not depend on the last bits."""


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
        ConfigError: it exceeds the maximum size of a manifest.
        RuntimeMissing: the task is differentially private and dp-accounting is not installed.
    """
    manifest = TaskManifest(
        fleet=task.fleet,
        algorithm=task.algorithm,
        classes=task.classes,
        backbones=tuple(backbones),
        alpha=task.client.alpha if task.privacy.dp is None and statistics is None else 1.0,
        batch_size=task.client.batch_size,
        min_images=task.client.min_images,
        seed=task.client.seed,
        program=program,
        statistics=statistics,
        perturbation=task.privacy.perturbation,
        columns=columns if columns and statistics is None else msgspec.UNSET,
        differential_privacy=None if task.privacy.dp is None else _differential_privacy(task.privacy.dp),
    )
    size = len(encode(manifest))
    if size > MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"the task manifest has {size} bytes, more than {MAX_MANIFEST_BYTES}: use fewer or shorter class names"
        )
    return manifest


def _differential_privacy(budget: PrivacyBudget) -> DifferentialPrivacy:
    return DifferentialPrivacy(
        clip_norm=budget.clip_norm,
        noise_multiplier=noise_multiplier(budget.epsilon, budget.delta),
        delta=budget.delta,
        max_epsilon=budget.max_epsilon,
    )


@functools.cache
def noise_multiplier(epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier of an (epsilon, delta) private Gaussian event, rounded up.

    The closed form (Balle and Wang 2018, Theorem 8) gives it; devices use an accountant that rounds up, and has to
    agree.
    """
    try:
        from dp_accounting import GaussianDpEvent
        from dp_accounting.pld import PLDAccountant
        from dp_accounting.pld.common import DifferentialPrivacyParameters
        from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
    except ImportError as error:
        raise RuntimeMissing(
            f"differential privacy needs dp-accounting: {pip_command('aggregator')}"
        ) from error
    guarantee = DifferentialPrivacyParameters(epsilon, delta)
    least = float(GaussianPrivacyLoss.from_privacy_guarantee(guarantee).standard_deviation)
    multipliers = (steps / _STEPS for steps in itertools.count(math.ceil(least * _STEPS)))
    return next(
        multiplier
        for multiplier in multipliers
        if PLDAccountant().compose(GaussianDpEvent(multiplier)).get_epsilon(delta) <= epsilon
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
