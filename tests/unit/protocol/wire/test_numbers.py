"""Numbers on the wire: their ranges, prototypes in one byte a value, and ranks of canaries."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from msgspec.inspect import (
    CustomType,
    DictType,
    FloatType,
    IntType,
    StructType,
    TupleType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)
from numpy.typing import NDArray

from protocol.wire.canary_rank import canary_rank
from protocol.wire.messages import BlobRef, Figure
from protocol.wire.quantization import STEPS, dequantize, quantize
from tests.support.messages.every_type import WIRE_TYPES


def _numbers(kind: Type, path: str) -> Iterator[tuple[str, IntType | FloatType]]:
    """Yield the numbers of a type, with their places; the fields of other structs are tested with those."""
    match kind:
        case IntType() | FloatType():
            yield path, kind
        case UnionType(types=types) | TupleType(item_types=types):
            for each in types:
                yield from _numbers(each, path)
        case VarTupleType(item_type=item):
            yield from _numbers(item, f"{path}[]")
        case DictType(key_type=key, value_type=value):
            yield from _numbers(key, f"{path} keys")
            yield from _numbers(value, f"{path} values")
        case CustomType():
            pytest.fail(f"{path} is of a type without a range")


@pytest.mark.parametrize("wire_type", WIRE_TYPES, ids=lambda wire_type: wire_type.__name__)
def test_every_number_has_a_range(wire_type: type[msgspec.Struct]) -> None:
    """A least and a greatest value, also in lists and maps."""
    info = type_info(wire_type)
    assert isinstance(info, StructType)
    for field in info.fields:
        for path, number in _numbers(field.type, f"{wire_type.__name__}.{field.name}"):
            assert number.ge is not None or number.gt is not None, f"{path} has no least value"
            assert number.le is not None or number.lt is not None, f"{path} has no greatest value"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1.7e308])
def test_range_excludes_numbers_that_are_not_finite(number: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(number), type=Figure)


def test_range_excludes_blobs_without_bytes() -> None:
    """There is nothing to download, so no file to verify: a device's program would end at each start."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"digest": bytes(32), "size_bytes": 0, "name": "empty"}, BlobRef)


LARGEST = 65504.0
VALUES = npst.arrays(
    np.float16,
    npst.array_shapes(min_dims=2, max_dims=2, max_side=6),
    elements=st.floats(-LARGEST, LARGEST, width=16),
)


@given(VALUES)
def test_an_error_is_at_most_half_a_step(values: NDArray[np.float16]) -> None:
    """Of each feature by its own range, up to the rounding of float32."""
    integers, limits = quantize(values)
    assert (str(integers.dtype), str(limits.dtype), limits.shape) == (
        "uint8",
        "float16",
        (2, values.shape[1]),
    )
    error = np.abs(dequantize(integers, limits).astype(np.float64) - values)
    low, high = limits.astype(np.float64)
    assert (error <= 0.5 * (high - low) / STEPS + 1e-6 * np.maximum(abs(low), abs(high))).all()


@given(VALUES)
def test_equal_rows_give_equal_integers(values: NDArray[np.float16]) -> None:
    """More rows than are converted at a time give the same integers; equal values are exact."""
    many = np.tile(values, (300, 1))
    integers, limits = quantize(many)
    np.testing.assert_array_equal(integers, np.tile(quantize(values)[0], (300, 1)))
    same = dequantize(*quantize(values[:1]))
    np.testing.assert_array_equal(same, values[:1].astype(np.float32))
    assert np.abs(dequantize(integers, limits)).max() <= LARGEST * (1 + 1e-6)


RANKS = 2**32


@given(device=st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True), version=st.integers(1, 2**63 - 1))
def test_rank_is_stable_and_in_range(device: str, version: int) -> None:
    assert 0 <= canary_rank(device, version) == canary_rank(device, version) < RANKS


def test_rank_as_documented() -> None:
    assert canary_rank("door-cam", 3) == 0xD1A40130


def test_ranks_are_uniform_and_differ_by_version() -> None:
    first, second = ({n for n in range(10_000) if canary_rank(f"d{n}", v) < RANKS // 10} for v in (1, 2))
    assert 900 < len(first) < 1100
    assert len(first & second) < 200
