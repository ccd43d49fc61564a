"""Messages, tensors and numbers as bytes: round trips, ranges, refusals and overhead."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
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

from protocol.errors import MalformedMessage, VersionMismatch
from protocol.wire.arrays import to_array, to_tensor, to_unsigned
from protocol.wire.canary_rank import canary_rank
from protocol.wire.codec import decode, encode, message_kind
from protocol.wire.messages import (
    BlobRef,
    BlobRequest,
    Block,
    Confused,
    DifferentialPrivacy,
    Evaluation,
    Figure,
    Frame,
    HeadManifest,
    HeadRef,
    KeyCertificate,
    MaskedSubmission,
    Message,
    Perturbation,
    Presence,
    Privacy,
    Program,
    Receipt,
    Released,
    SealedMask,
    SecondOperator,
    Signed,
    Statistics,
    Submission,
    TaskManifest,
    Tensor,
)
from protocol.wire.quantization import STEPS, coarse_range, dequantize, exact_range, quantize
from tests.support.messages.every_type import MESSAGES, SAMPLES, WIRE_TYPES

MAX_BYTES = 2**20

each_message = pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)

each_map = pytest.mark.parametrize("message", [each for each in SAMPLES if not isinstance(each, Frame)])


def as_map(message: Message) -> dict[str, Any]:
    """A message's envelope, open to be spoilt."""
    envelope: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    return envelope


def refused(envelope: Any, message_type: type[Message | Frame]) -> str:
    """The text with which an envelope, or raw bytes, are refused."""
    data = envelope if isinstance(envelope, bytes) else msgspec.msgpack.encode(envelope)
    with pytest.raises(MalformedMessage) as caught:
        decode(data, message_type, max_bytes=MAX_BYTES)
    return str(caught.value)


def test_every_wire_type_has_a_sample() -> None:
    inner = {BlobRef, HeadRef, KeyCertificate, Program, Statistics, Perturbation, DifferentialPrivacy}
    inner |= {Block, Confused, Privacy, Released, Tensor, SealedMask, SecondOperator, MaskedSubmission}
    assert {type(sample) for sample in SAMPLES} | inner == set(WIRE_TYPES)


@given(MESSAGES)
def test_encoded_message_is_decoded(message: Message | Frame) -> None:
    data = encode(message)
    assert decode(data, type(message), max_bytes=MAX_BYTES) == message
    if not isinstance(message, Frame):
        assert message_kind(data) == type(message).__struct_config__.tag


@each_message
def test_every_prefix_is_refused(message: Message | Frame) -> None:
    data = encode(message)
    for size in range(len(data)):
        refused(data[:size], type(message))
    refused(data + b"\xc0", type(message))


@each_message
def test_other_version_is_named(message: Message | Frame) -> None:
    data = encode(msgspec.structs.replace(message, v=2))
    with pytest.raises(VersionMismatch, match="expected protocol version 1, got 2"):
        decode(data, type(message), max_bytes=MAX_BYTES)
    future: Any = ["frame", 2, "?"] if isinstance(message, Frame) else {"type": "?", "v": 2, "new": 1}
    with pytest.raises(VersionMismatch):
        decode(msgspec.msgpack.encode(future), type(message), max_bytes=MAX_BYTES)


@each_message
def test_oversized_message_is_refused_before_decoding(message: Message | Frame) -> None:
    data = encode(message)
    assert decode(data, type(message), max_bytes=len(data)) == message
    with pytest.raises(MalformedMessage, match=f"expected at most {len(data) - 1} bytes, got {len(data)}"):
        decode(data, type(message), max_bytes=len(data) - 1)


@each_message
def test_other_message_type_is_refused(message: Message | Frame) -> None:
    for other in SAMPLES:
        if type(other) is not type(message):
            refused(encode(message), type(other))


@each_map
def test_unknown_keys_are_ignored(message: Message) -> None:
    envelope = {**as_map(message), "hint": [{"deep": b"x"}, None, 1.5]}
    assert decode(msgspec.msgpack.encode(envelope), type(message), max_bytes=MAX_BYTES) == message


@each_map
def test_required_fields_are_required(message: Message) -> None:
    for field in msgspec.structs.fields(message):
        if field.required:
            rest = {key: value for key, value in as_map(message).items() if key != field.encode_name}
            assert field.encode_name in refused(rest, type(message))
        wrong = {**as_map(message), field.encode_name: {"not": ["this"]}}
        refused(wrong, type(message))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
def test_deep_nesting_is_refused(opening: bytes) -> None:
    deep = opening * 100_000
    refused(b"\x83\xa4type\xa8presence\xa1v\x01\xa1z" + deep, Presence)
    refused(deep, Presence)
    refused(deep, Frame)


_BLOB = {"digest": bytes(32), "size_bytes": 1, "name": "head.onnx"}
_HEAD = {"version": 1, "head": _BLOB, "devices": 1, "prototypes": 1}


OUT_OF_BOUNDS: list[tuple[type[Message], dict[str, Any]]] = [
    *[(TaskManifest, {"alpha": alpha}) for alpha in (0.0, -0.5, 1.01, float("nan"), float("inf"))],
    *[(TaskManifest, {"fleet": name}) for name in ("", "a/b", "a b", "+", "#", "x" * 65, "break\n")],
    *[(TaskManifest, {"classes": names}) for names in ([], [""], ["x" * 129], ["x"] * 4097)],
    (TaskManifest, {"backbones": []}),
    *[(TaskManifest, {"batch_size": size}) for size in (0, 65536, 5.5)],
    (TaskManifest, {"min_images": 0}),
    (TaskManifest, {"algorithm": "a b"}),
    *[(TaskManifest, {"statistics": {"map": _BLOB, "size": size}}) for size in (0, 4097, 1.5)],
    (Signed, {"release": 0}),
    (Signed, {"key": bytes(31)}),
    (Signed, {"signature": bytes(65)}),
    (HeadManifest, {"canary_rank_limit": 2**32 + 1}),
    (HeadManifest, {"current": {**_HEAD, "version": 0}}),
    (HeadManifest, {"candidate": {**_HEAD, "metrics": {str(n): 0.0 for n in range(33)}}}),
    *[(HeadManifest, {"task": digest}) for digest in (bytes(31), bytes(33), "0" * 32)],
    *[(Presence, {"epoch": epoch}) for epoch in (-1, 2**63)],
    (Presence, {"state": "asleep"}),
    *[(Evaluation, {"correct": counts}) for counts in ([-1], [0] * 4097)],
    *[(Submission, {"labels": [dtype, [1], bytes(8)]}) for dtype in ("f8", "|O")],
    *[(Submission, {"labels": ["u1", shape, b""]}) for shape in ([-1], [2**31], [1] * 5)],
    (Submission, {"labels": ["u1", [1], [0]]}),
    *[(Receipt, {"missing": ranges}) for ranges in ([[0, 1]] * 65, [[0]], [[-1, 2**40]])],
    (Receipt, {"reason": "bored"}),
    (Receipt, {"detail": "x" * 257}),
    *[(BlobRequest, {"length": length}) for length in (0, 16 * 60 * 1024 + 1)],
    (BlobRequest, {"offset": 2**31 + 1}),
]


@pytest.mark.parametrize(("message_type", "change"), OUT_OF_BOUNDS)
def test_every_bound_is_enforced(message_type: type[Message], change: dict[str, Any]) -> None:
    sample = next(sample for sample in SAMPLES if type(sample) is message_type)
    assert isinstance(sample, Message)
    assert f"$.{next(iter(change))}" in refused({**as_map(sample), **change}, message_type)


def test_frame_holds_at_most_one_chunk() -> None:
    digest = bytes(32)
    largest = encode(Frame(v=1, digest=digest, size_bytes=61_440, offset=0, data=bytes(61_440)))
    decode(largest, Frame, max_bytes=MAX_BYTES)
    refused(["frame", 1, digest, 70_000, 0, bytes(61_441)], Frame)
    refused(["frame", 1, digest, 2**31 + 1, 0, b""], Frame)
    refused(["frame", 1, digest, 10, -1, b""], Frame)


@given(
    hnp.arrays(
        st.sampled_from(["<f2", "<f4", ">f4", "u1", "<u2", ">u2", "<u4", ">u4", "i1", "<i4", ">i4"]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    )
)
def test_array_round_trip(array: NDArray[Any]) -> None:
    back = to_array(to_tensor(array))
    assert back.shape == array.shape
    assert back.dtype == array.dtype.newbyteorder("<")
    np.testing.assert_array_equal(back, array)


def test_any_memory_order_is_sent_row_major() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (array.T, array[::2, ::-1], np.asfortranarray(array)):
        assert to_tensor(view) == to_tensor(np.ascontiguousarray(view))
        np.testing.assert_array_equal(to_array(to_tensor(view)), view)


@pytest.mark.parametrize("dtype", [float, np.int16, np.uint64, bool, "U4", object])
def test_unsupported_array_is_refused(dtype: Any) -> None:
    with pytest.raises(MalformedMessage, match="cannot send"):
        to_tensor(np.zeros(2, dtype=dtype))
    with pytest.raises(MalformedMessage, match="cannot send"):
        to_tensor(np.zeros((1, 1, 1, 1, 1), dtype=np.float32))


def test_shape_that_contradicts_bytes_or_overflows_is_refused() -> None:
    edge = 2**31 - 1
    for shape in ((2, 3), (7,), (), (0,), (edge,) * 4):
        with pytest.raises(MalformedMessage, match=r"expected \d+ bytes for f2"):
            to_array(Tensor("f2", shape, bytes(10)))
    for shape in ((0, edge, edge, edge), (edge, 0, edge, edge)):
        with pytest.raises(MalformedMessage, match="no array can have shape"):
            to_array(Tensor("f4", shape, b""))


@pytest.mark.parametrize(
    ("values", "dtype"), [([], "u1"), ([0, 255], "u1"), ([256, 65535], "u2"), ([65536, 2**32 - 1], "u4")]
)
def test_integers_use_the_smallest_dtype(values: list[int], dtype: str) -> None:
    tensor = to_unsigned(np.array(values, dtype=np.int64))
    assert tensor.dtype == dtype
    assert to_array(tensor).tolist() == values
    with pytest.raises(MalformedMessage):
        to_unsigned(np.array([2**32], dtype=np.int64))


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
def test_coarse_ranges_contain_the_exact_ones(values: NDArray[np.float16]) -> None:
    """They are longer by two steps of all values at most, up to the rounding of float32."""
    _, limits = quantize(values)
    found = exact_range(*coarse_range(limits)).astype(np.float64)
    low, high = limits.astype(np.float64)
    rounding = 1e-6 * np.abs(limits.astype(np.float64)).max()
    longer = 2 * (high.max() - low.min()) / STEPS
    assert (found[0] <= low + rounding).all()
    assert (found[1] >= high - rounding).all()
    assert (found[1] - found[0] <= high - low + longer + 4 * rounding).all()


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


def test_rank_as_documented() -> None:
    assert canary_rank("door-cam", 3) == 0xD1A40130


def test_ranks_are_uniform_and_differ_by_version() -> None:
    first, second = ({n for n in range(10_000) if canary_rank(f"d{n}", v) < RANKS // 10} for v in (1, 2))
    assert 900 < len(first) < 1100
    assert len(first & second) < 200
