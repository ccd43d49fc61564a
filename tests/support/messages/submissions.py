"""Tasks, and valid uploads of devices for them."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aggregator.coordination.round_state import Settings
from aggregator.intake.validation import Expectation
from aggregator.storage.stored_values import ServedTask
from protocol.wire.arrays import to_array, to_tensor, to_unsigned
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, DeviceInfo, Evaluation, Program, Submission, TaskManifest
from protocol.wire.principal_prototypes import PrincipalPrototypes
from protocol.wire.quantization import RANGE, dequantize, principal_fields, prototype_fields, range_of

FEATURE_SIZE = 16
MANIFEST = TaskManifest(
    fleet="f",
    algorithm="fedtc",
    classes=("cat", "dog", "fox"),
    backbones=(BlobRef(digest=bytes(32), size_bytes=1, name="tiny.onnx"),),
    alpha=0.99,
    batch_size=5,
    min_images=2,
    seed=0,
)
TASK = digest_of(encode(MANIFEST))
EXPECTATION = Expectation(TASK, MANIFEST, FEATURE_SIZE)

SERVED = ServedTask(*(TASK, 1, "f", "fedtc", MANIFEST.classes), settings=Settings(quorum=1, deadline_s=1.0))
"""The task as an aggregator stores it when it starts."""

_GRAPH = BlobRef(digest=bytes(32), size_bytes=1, name="graph.onnx")
IN_ROUNDS = msgspec.structs.replace(
    MANIFEST,
    algorithm="fpl",
    program=Program(
        init=_GRAPH,
        step=_GRAPH,
        project=_GRAPH,
        head=_GRAPH,
        persistent=(),
        uploaded=("weight", "bias"),
        batch_size=8,
    ),
)
ROUNDS_TASK = digest_of(encode(IN_ROUNDS))
PROJECTION_SIZE = 4
SHAPES = {"weight": (PROJECTION_SIZE, FEATURE_SIZE), "bias": (PROJECTION_SIZE,)}
ROUNDS_EXPECTATION = Expectation(ROUNDS_TASK, IN_ROUNDS, PROJECTION_SIZE, SHAPES)


BLOCKS = msgspec.structs.replace(MANIFEST, prototypes="auto")
BLOCKS_EXPECTATION = Expectation(digest_of(encode(BLOCKS)), BLOCKS, FEATURE_SIZE)
BLOCK = PrincipalPrototypes(
    means=np.arange(2 * FEATURE_SIZE, dtype=np.float32).reshape(2, FEATURE_SIZE),
    labels=np.array([0, 2]),
    counts=np.array([20, 40]),
    rows=np.eye(3, FEATURE_SIZE, dtype=np.float32) * 9,
    diagonal=np.ones(FEATURE_SIZE, np.float32),
)


def block_submission() -> Submission:
    """Return a valid submission of a block alone, BLOCK."""
    return Submission(
        task=BLOCKS_EXPECTATION.task,
        sequence=1,
        labels=to_unsigned(np.zeros(0, np.int64)),
        counts=to_unsigned(np.zeros(0, np.int64)),
        images=60,
        **principal_fields(np.zeros((0, FEATURE_SIZE), np.float16), BLOCK),
    )


def round_submission(
    *,
    task: bytes = ROUNDS_TASK,
    number: int = 0,
    sequence: int = 1,
    labels: tuple[int, ...] = (0, 2),
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    projection_size: int = PROJECTION_SIZE,
    seed: int = 0,
) -> Submission:
    """Return a valid submission for a round: a float16 prototype of five images per class, and tensor changes."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(len(labels), projection_size)).astype(np.float16)
    return msgspec.structs.replace(
        submission(task=task, sequence=sequence, labels=labels, feature_size=projection_size, seed=seed),
        round=number,
        prototypes=to_tensor(values),
        tensors={
            name: to_tensor(random.normal(size=shape).astype(np.float16)) for name, shape in shapes.items()
        },
        loss=0.5,
    )


def submission(
    *,
    task: bytes = TASK,
    sequence: int = 1,
    labels: tuple[int, ...] = (0, 0, 1, 2),
    feature_size: int = FEATURE_SIZE,
    seed: int = 0,
) -> Submission:
    """Return a valid submission: m prototypes of L values and five images each."""
    values = np.random.default_rng(seed).normal(size=(len(labels), feature_size)).astype(np.float16)
    return Submission(
        task=task,
        sequence=sequence,
        **prototype_fields(values),
        labels=to_unsigned(np.array(labels)),
        counts=to_unsigned(np.full(len(labels), 5)),
        images=5 * len(labels),
    )


def values_of(submission: Submission) -> NDArray[np.float32]:
    """Return the prototypes (m, L) of a submission of FedTC, or of a round."""
    values = to_array(submission.prototypes)
    if RANGE not in submission.tensors:
        return values.astype(np.float32)
    return dequantize(values, range_of(submission.tensors))


def evaluation(*, task: bytes = TASK, head_version: int = 1) -> Evaluation:
    """Return a valid evaluation: nine of ten held-out images correct."""
    return Evaluation(task=task, head_version=head_version, correct=(4, 5, 0), incorrect=(1, 0, 0))


def device_info(**fields: Any) -> DeviceInfo:
    empty = DeviceInfo(epoch=1, software="", runtime="", backbones=(), images={}, unusable_images=0)
    return msgspec.structs.replace(empty, **fields)
