"""Prototypes in one byte a value: 256 equal steps between the lowest and the highest value of each feature. Pure."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import MalformedMessage
from protocol.wire.arrays import to_array, to_tensor, to_unsigned
from protocol.wire.messages import Block, TaskManifest, Tensor
from protocol.wire.principal_prototypes import PrincipalPrototypes

STEPS = 255

ROWS = 256
"""Rows that are converted at a time."""

RANGE = "range"
"""The tensor of a submission that has the lowest and the highest values of each feature."""

LIMITS = "limits"
"""The tensor that has the lowest and the highest value of all, where RANGE has integers."""


def quantize(values: NDArray[np.float16]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Return values (m, L), m at least 1, as integers from 0 to 255 (m, L), and each feature's range (2, L).

    Law: `dequantize` returns the values with an error of at most half a step.
    """
    limits = _limits_of(values)
    return _integers(values, limits), limits


def _limits_of(values: NDArray[np.float16]) -> NDArray[np.float16]:
    return np.stack([values.min(axis=0), values.max(axis=0)])


def _integers(values: NDArray[np.float16], limits: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return values (m, L) as integers from 0 to 255, by ranges (2, L)."""
    low, step = _low_and_step(limits)
    divisor = np.where(step > 0, step, 1)
    integers = np.empty(values.shape, np.uint8)
    for start in range(0, len(values), ROWS):  # a device has little memory
        rows = slice(start, start + ROWS)
        integers[rows] = np.rint((values[rows] - low) / divisor)
    return integers


def coarse_range(limits: NDArray[np.float16]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Return ranges (2, L) as integers (2, L), and the lowest and the highest value of all (2,).

    Law: the ranges that `exact_range` makes of them contain these, and are longer by at most two steps of all values.
    """
    ends = np.array([limits[0].min(), limits[1].max()])
    low, step = _low_and_step(ends)
    steps = (limits.astype(np.float32) - low) / (step or np.float32(1))  # NumPy 1 would compute in float16
    return np.clip([np.floor(steps[0]), np.ceil(steps[1])], 0, STEPS).astype(np.uint8), ends


def exact_range(integers: NDArray[np.uint8], ends: NDArray[np.float16]) -> NDArray[np.float32]:
    """Return the ranges (2, L) of integers (2, L), and of the lowest and the highest value of all (2,)."""
    low, step = _low_and_step(ends)
    return integers.astype(np.float32) * step + low


def range_of(tensors: Mapping[str, Tensor]) -> NDArray[np.floating]:
    """Return the range (2, L) in a valid submission's tensors."""
    limits = to_array(tensors[RANGE])
    return exact_range(limits, to_array(tensors[LIMITS])) if LIMITS in tensors else limits


def dequantize(values: NDArray[np.uint8], limits: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return the values (m, L) of integers (m, L) and the range (2, L)."""
    low, step = _low_and_step(limits)
    restored = values * step
    restored += low
    return restored


def prototype_fields(values: NDArray[Any]) -> dict[str, Any]:
    """Return the fields `prototypes` and `tensors` of a submission of FedTC with these prototypes, float16 (m, L)."""
    integers, limits = quantize(values)
    return {"prototypes": to_tensor(integers), "tensors": {RANGE: to_tensor(limits)}}


def submission_fields(
    task: TaskManifest, values: NDArray[Any], block: PrincipalPrototypes | None
) -> dict[str, Any]:
    """Return the fields of a submission to a task without rounds and statistics, as `principal_fields`."""
    return principal_fields(values, block) if task.accepts_blocks else prototype_fields(values)


def principal_fields(values: NDArray[Any], block: PrincipalPrototypes | None) -> dict[str, Any]:
    """Return the fields `prototypes`, `tensors` and, if there is one, `block`, where a task accepts blocks.

    `values` are prototypes, float16 (m, L), m at least 1, or 0 beside a block.
    """
    means = values[:0] if block is None else block.means.astype(np.float16)
    every = np.concatenate([values, means])
    coarse, ends = coarse_range(_limits_of(every))
    integers = _integers(every, exact_range(coarse, ends))
    fields = {
        "prototypes": to_tensor(integers[: len(values)]),
        "tensors": {RANGE: to_tensor(coarse), LIMITS: to_tensor(ends)},
    }
    if block is None:
        return fields
    rows, scales = _in_steps(block.rows, 127)
    diagonal, scale = _in_steps(np.sqrt(block.diagonal)[None], STEPS)
    encoded = Block(
        means=to_tensor(integers[len(values) :]),
        labels=to_unsigned(block.labels),
        counts=to_unsigned(block.counts),
        rows=to_tensor(rows.astype(np.int8)),
        diagonal=to_tensor(diagonal[0].astype(np.uint8)),
        scales=to_tensor(np.concatenate([scales, scale])),
    )
    return {**fields, "block": encoded}


def dequantized_block(
    block: Block, limits: NDArray[np.floating], *, classes: int, least: int
) -> PrincipalPrototypes:
    """Return what a block says, with the range (2, L) of the submission's tensors.

    Raises:
        MalformedMessage: shapes or dtypes do not fit each other, a label is not below `classes`, a count is less than
            `least`, or a scale is negative or not finite.
    """
    means, labels, counts, rows, diagonal, scales = (
        _array(getattr(block, name), name, kind, ndim)
        for name, kind, ndim in (
            ("means", "u1", 2),
            ("labels", "u", 1),
            ("counts", "u", 1),
            ("rows", "i1", 2),
            ("diagonal", "u1", 1),
            ("scales", "f4", 1),
        )
    )
    size = limits.shape[1]
    shapes = (len(means), means.shape[1], len(counts), rows.shape[1], len(diagonal), len(scales))
    if not len(means) or shapes != (len(labels), size, len(labels), size, size, len(rows) + 1):
        raise MalformedMessage(f"expected a block of {size} values in tensors that fit each other")
    if int(labels.max()) >= classes or int(counts.min()) < least:
        raise MalformedMessage(f"expected labels below {classes} and counts of at least {least} in a block")
    if not np.isfinite(scales).all() or (scales < 0).any():
        raise MalformedMessage("expected finite scales that are not negative")
    with np.errstate(over="ignore"):  # the aggregator refuses what is not finite
        rows, diagonal = rows * scales[:-1, None], (diagonal * scales[-1]) ** 2
    return PrincipalPrototypes(
        dequantize(means, limits), labels.astype(np.int64), counts.astype(np.int64), rows, diagonal
    )


def _array(tensor: Tensor, name: str, kind: str, ndim: int) -> NDArray[Any]:
    if not tensor.dtype.startswith(kind) or len(tensor.shape) != ndim:
        raise MalformedMessage(f"expected {name} of kind {kind!r} and {ndim} dimensions in a block")
    return to_array(tensor)


def _in_steps(values: NDArray[np.float32], steps: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return values (n, L) as integers of at most `steps`, and the size of a row's step (n,)."""
    scales = (np.abs(values).max(axis=1, initial=0) / steps).astype(np.float32)
    return np.rint(values / np.where(scales > 0, scales, 1)[:, None]), scales


def _low_and_step(limits: NDArray[np.floating]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    low, high = limits.astype(np.float32)
    return low, (high - low) / STEPS
