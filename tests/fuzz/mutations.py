"""Mutations of msgpack and protobuf messages that keep lengths valid."""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

_EDGES: tuple[Any, ...] = (
    *(
        -(2**63),
        -1,
        0,
        1,
        127,
        128,
        255,
        256,
        2**16,
        2**31 - 1,
        2**31,
        2**32,
        2**53,
        2**63 - 1,
        2**63,
        2**64 - 1,
    ),
    *(0.0, -0.0, 5e-324, 1.0, 1e6, 1e308, float("inf"), float("-inf"), float("nan")),
    *(None, True, False, "", "a", "\x00", "\x1b[2J", "é\U0001f600", "A" * 300),
    *(b"", b"\x00" * 32, b"\xff" * 64),
    *([], {}, [[[[]]]], {"a": {"b": []}}, [0] * 70, {str(key): key for key in range(70)}),
)

_HEADERS = tuple(
    bytes.fromhex(text) for text in ("dcffff", "ddffffffff", "deffff", "dfffffffff", "c6ffffffff", "dbffffffff",
                                     "c9ffffffff00", "c5ffff", "91" * 40, "d9ff", "cfffffffffffffffff", "c1")
)  # fmt: skip
"""Headers of values that are longer than the message, nested, or of an invalid type."""


def of_message(prefix_bytes: int = 0) -> Callable[[bytes, Random], bytes]:
    """Return a mutation of a msgpack message after a prefix."""

    def mutate(data: bytes, random: Random) -> bytes:
        prefix, body = data[:prefix_bytes], data[prefix_bytes:]
        if prefix and not random.randrange(8):
            prefix = random.randbytes(len(prefix))
        return prefix + _message(body, random)

    return mutate


def _message(body: bytes, random: Random) -> bytes:
    if body and not random.randrange(10):
        at = random.randrange(len(body))
        return body[:at] + random.choice(_HEADERS) + body[at + random.randrange(2) :]
    try:
        value = msgspec.msgpack.decode(body)
        for _ in range(random.choice((1, 1, 2, 4))):
            value = _changed(value, random)
        return msgspec.msgpack.encode(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return body


def _changed(value: Any, random: Random) -> Any:
    """Return a value with a change somewhere in it."""
    if isinstance(value, dict) and value and random.randrange(8):
        key = random.choice(list(value))
        other = dict(value)
        match random.randrange(8):
            case 0:
                del other[key]
            case 1:
                other[key] = other[random.choice(list(other))]
            case 2:
                other[random.choice((str(key) + "x", "v", "type", ""))] = other.pop(key)
            case _:
                other[key] = _changed(value[key], random)
        return other
    if isinstance(value, list) and value and random.randrange(8):
        at = random.randrange(len(value))
        match random.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * random.randrange(2, 9) + value[at:]
            case _:
                return [*value[:at], _changed(value[at], random), *value[at + 1 :]]
    return _leaf(value, random)


def _leaf(value: Any, random: Random) -> Any:
    if random.randrange(2):
        match value:
            case bool():
                return not value
            case int():
                return value + random.choice((-1, 1, 256, -value, value))
            case float():
                return value * random.choice((-1.0, 0.5, 1e10))
            case bytes() if value:
                at = random.randrange(len(value))
                new = random.randbytes(random.randrange(3))
                return value[:at] + new + value[at + random.randrange(3) :]
            case str() if value:
                at = random.randrange(len(value))
                return value[:at] + chr(random.choice((0, 7, 27, 65, 155, 0x202E, 0xFFFF))) + value[at + 1 :]
    return random.choice(_EDGES)


_FIELDS = (
    *((14, 0, 1), (14, 2, b"\x01"), (13, 2, b"\x0a\x08location\x12\x01x"), (7, 2, b"x.y"), (1, 2, b"x.y")),
    *((10, 2, b"x.y"), (7, 2, b""), (5, 2, b""), (6, 2, b""), (14, 0, 2**64), (14, 0, 0)),
    (8, 2, b"\x0a\x03a.b"),
    *((1, 2, b"\x3a\x03a.b"), (5, 2, b"\x70\x01"), (20, 2, b""), (25, 2, b"\x52\x03a.b"), (15, 2, b"")),
)
"""Number, encoding and value of fields with which ONNX refers to other files and domains."""


def of_protobuf(data: bytes, random: Random) -> bytes:
    """Change a field of a protobuf message, or of one in it, and correct the lengths around it."""
    fields = _parsed(data)
    if not fields:
        return data + _encoded([random.choice(_FIELDS)])
    at = random.randrange(len(fields))
    number, encoding, value = fields[at]
    match random.randrange(8):
        case 0:
            del fields[at]
        case 1:
            fields.insert(at, random.choice(fields))
        case 2:
            fields.insert(at, random.choice(_FIELDS))
        case 3:
            fields[at] = (random.choice((number, number + 1, 5, 7, 13, 14, 25)), encoding, value)
        case _ if encoding == 2:
            fields[at] = (number, 2, of_protobuf(value, random))
        case _:
            fields[at] = (number, encoding, random.choice((0, 1, 2**32, 2**64)) if encoding == 0 else value)
    return _encoded(fields)


def _parsed(data: bytes) -> list[tuple[int, int, Any]]:
    """Return the fields of a message; none if it is not one."""
    found: list[tuple[int, int, Any]] = []
    at = 0
    while at < len(data):
        tag, at = _read(data, at)
        number, encoding = tag >> 3, tag & 7
        if encoding == 0:
            value, at = _read(data, at)
            found.append((number, 0, value))
            continue
        size, at = _read(data, at) if encoding == 2 else ({1: 8, 5: 4}.get(encoding, len(data) + 1), at)
        if not number or at + size > len(data):
            return []
        found.append((number, encoding, data[at : at + size]))
        at += size
    return found


def _read(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    return 0, len(data) + 1


def _encoded(fields: list[tuple[int, int, Any]]) -> bytes:
    parts = []
    for number, encoding, value in fields:
        parts.append(_varint(number << 3 | encoding))
        if encoding == 0:
            parts.append(_varint(value))
        else:
            parts.append((_varint(len(value)) if encoding == 2 else b"") + value)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])
