"""Every number from outside has a range."""

from collections.abc import Iterator

import msgspec
import pytest
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

from protocol.wire.messages import BlobRef, Figure
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
