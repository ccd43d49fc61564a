"""Validation of ONNX files before ONNX Runtime loads them, and their metadata. Pure."""

import itertools
from collections.abc import Iterator

from protocol.errors import GraphRefused
from protocol.models.onnx_metadata import PROPERTY

MAX_GRAPH_BYTES = 64 * 1024**2

MAX_FIELDS = 2**18
"""Fields of a file, which bounds the time of validation; all values of a tensor are one field."""

MAX_ENTRY_FIELDS = 16
"""Fields of a metadata property, which has two."""

MAX_DIMENSIONS_BYTES = 320
"""Bytes of a tensor's dimensions that are read: more than ONNX Runtime accepts."""

MAX_DEPTH = 100
"""Nested messages: the limit of protobuf, and so of ONNX Runtime."""

# The fields of ONNX's messages, by number, that lead to operators or tensors.
_DOMAIN, _EXTERNAL, _ENTRY, _SPARSE = "domain", "external", "entry", "sparse"
_TENSOR = "tensor"
RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators whose results depend on the runs before: ONNX Runtime keeps their generator's state."""

_OPERATOR, _INPUT = 4, 1
_TRAINING_MODE_INPUTS = 3
"""Inputs of a Dropout that may be in training mode, and random then."""

_NESTED: dict[str, dict[int, str]] = {
    "model": {7: "graph", 8: "opset", 14: _ENTRY, 20: "training", 25: "function"},
    "graph": {1: "node", 5: _TENSOR, 15: _SPARSE},
    "node": {5: "attribute", 7: _DOMAIN},
    "attribute": {5: _TENSOR, 6: "graph", 10: _TENSOR, 11: "graph", 22: _SPARSE, 23: _SPARSE},
    _TENSOR: {13: _EXTERNAL, 14: _EXTERNAL},
    "opset": {1: _DOMAIN},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 9: "opset", 10: _DOMAIN, 11: "attribute"},
}

_FORBIDDEN = {
    _EXTERNAL: "expected a graph in one file, got one that keeps tensors in other files",
    _SPARSE: "expected dense tensors, got a sparse one, which may take any memory",
}
_ITEM_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}
"""Bytes of a value by the number of its type in ONNX; of any other type 16."""


OLDEST_RUNTIME, MAX_OPSET, MAX_IR_VERSION = "1.20", 21, 10
"""The oldest supported ONNX Runtime, and the versions of the format that it reads."""


def check_versions(file: bytes | memoryview) -> None:
    """Raise GraphRefused if the oldest supported ONNX Runtime cannot read an ONNX file that `check_graph` accepts."""
    opset = ir_version = 0
    for number, value in message_fields(memoryview(file)):
        if number == 1 and isinstance(value, int):
            ir_version = value
        if number == 8 and isinstance(value, memoryview):
            opset = max(
                [
                    opset,
                    *(each for field, each in message_fields(value) if field == 2 and isinstance(each, int)),
                ]
            )
    for name, got, limit in (("opset", opset, MAX_OPSET), ("IR version", ir_version, MAX_IR_VERSION)):
        if got > limit:
            raise GraphRefused(
                f"it has {name} {got}, and the oldest ONNX Runtime that devices may have, {OLDEST_RUNTIME}, supports "
                f"{limit}: export it with opset {MAX_OPSET} or lower"
            )


def check_graph(
    file: bytes | memoryview, *, max_bytes: int = MAX_GRAPH_BYTES, deterministic: bool = False
) -> dict[str, str]:
    """Validate an ONNX file and return its `protofleet` metadata property, if there is one.

    It is parsed here, since devices do not have `onnx`. Every occurrence of a field counts, even if a reader would
    overwrite it with a later one, and encodings that readers could interpret in two ways are refused.

    Raises:
        GraphRefused: it is too large, broken, has operators other than ONNX's own, refers to other files, or has
            tensors that are sparse or larger than the file may be; or `deterministic` is set, and it has random
            operators.
    """
    if len(file) > max_bytes:
        raise GraphRefused(f"expected a graph of at most {max_bytes} bytes, got {len(file)}")
    properties: dict[str, str] = {}
    seen = tensor_bytes = 0
    open_messages = [("model", message_fields(memoryview(file)))]
    while open_messages:
        message, fields = open_messages[-1]
        for number, value in fields:
            seen += 1
            kind = _NESTED[message].get(number)
            if value and kind in _FORBIDDEN:
                raise GraphRefused(_FORBIDDEN[kind])
            if kind is None or isinstance(value, int):
                continue
            if kind == _DOMAIN:
                _check_domain(value)
            elif kind == _ENTRY:
                properties.update(_own_property(value))
            else:
                tensor_bytes += _checked_bytes(kind, value, deterministic=deterministic)
                open_messages.append((kind, message_fields(value)))
                break
        else:
            open_messages.pop()
        if tensor_bytes > max_bytes:
            raise GraphRefused(f"expected tensors of at most {max_bytes} bytes together, got {tensor_bytes}")
        if seen > MAX_FIELDS or len(open_messages) > MAX_DEPTH:
            raise GraphRefused(
                f"expected a graph of at most {MAX_FIELDS} fields, nested at most {MAX_DEPTH} deep"
            )
    return properties


def _checked_bytes(kind: str, message: memoryview, *, deterministic: bool) -> int:
    """Check a node, or return the bytes of a tensor."""
    if deterministic and kind == "node":
        _check_deterministic(message)
    return _tensor_bytes(message) if kind == _TENSOR else 0


def _tensor_bytes(tensor: memoryview) -> int:
    """Return the bytes that a tensor takes in memory, by its dimensions and type."""
    elements, item_bytes = 1, 16
    for number, value in itertools.islice(message_fields(tensor), MAX_FIELDS):
        if number == 1:
            for length in [value] if isinstance(value, int) else _varints(value):
                elements = min(elements * length, 2**63)
        elif number == 2 and isinstance(value, int):
            item_bytes = _ITEM_BYTES.get(value, 16)
    return elements * item_bytes


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < min(len(data), MAX_DIMENSIONS_BYTES):
        value, at = _varint(data, at)
        yield value


def message_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield each field's number and value, an integer or bytes, of a protobuf message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, encoding = tag >> 3, tag & 7
        if not 0 < tag < 2**32 or encoding not in (0, 1, 2, 5):
            raise GraphRefused("expected an ONNX file, got other bytes")
        if encoding == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        size, at = _varint(data, at) if encoding == 2 else ({1: 8, 5: 4}[encoding], at)
        if at + size > len(data):
            raise GraphRefused("expected an ONNX file, got a truncated one, or another file")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return an integer of seven bits per byte, and the offset after it."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise GraphRefused("expected an ONNX file, got a truncated one, or another file")


def _check_domain(value: memoryview) -> None:
    domain = text_of(value)
    if domain not in {"", "ai.onnx"}:
        raise GraphRefused(f"expected ONNX's own operators alone, got some of {domain[:100]!r}")


def _check_deterministic(node: memoryview) -> None:
    fields = [
        (number, value)
        for number, value in itertools.islice(message_fields(node), MAX_FIELDS)
        if number in (_OPERATOR, _INPUT)
    ]
    operators = {text_of(value) for number, value in fields if number == _OPERATOR}
    inputs = sum(number == _INPUT for number, _ in fields)
    random = operators & (RANDOM | ({"Dropout"} if inputs >= _TRAINING_MODE_INPUTS else set()))
    if random:
        raise GraphRefused(f"expected the same result at every run, got the random operator {min(random)}")


def _own_property(value: memoryview) -> dict[str, str]:
    """Return an entry's property if it is protofleet's."""
    fields = list(itertools.islice(message_fields(value), MAX_ENTRY_FIELDS + 1))
    if len(fields) > MAX_ENTRY_FIELDS:
        raise GraphRefused(f"expected properties of at most {MAX_ENTRY_FIELDS} fields, got one of more")
    entry = dict(fields)
    return {PROPERTY: text_of(entry.get(2))} if text_of(entry.get(1)) == PROPERTY else {}


def text_of(value: int | memoryview | None) -> str:
    return bytes(value).decode(errors="replace") if isinstance(value, memoryview) else ""
