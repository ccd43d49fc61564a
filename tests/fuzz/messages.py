"""Decoding of every message, of topics, of signed manifests and of second moments."""

import contextlib
import zlib
from collections.abc import Iterable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from protocol.errors import BadSignature, MalformedMessage
from protocol.statistics import second_moment
from protocol.statistics.integer_rows import triangle_size
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.codec import decode, encode, message_kind
from protocol.wire.messages import MAX_FRAME_BYTES, MAX_SIGNED_BYTES, Frame, Message, Tensor
from protocol.wire.signing import open_manifest
from protocol.wire.topics import device_topic, is_name, parse_device_topic
from tests.fuzz.mutations import of_message
from tests.fuzz.target import Target
from tests.support.messages.every_type import SAMPLES
from tests.support.messages.manifests import signed_manifest

TYPES: tuple[type[Message | Frame], ...] = tuple(type(sample) for sample in SAMPLES)
_TYPE_OF = {each.__struct_config__.tag: each for each in TYPES}
_HINTS: dict[type[Any], dict[str, Any]] = {}


def _bounds_hold(value: Any, hint: Any) -> bool:
    """Return whether all numbers in a value are within the bounds of their annotations, as msgspec should check."""
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        return all(_is_within(value, meta) for meta in metas) and _bounds_hold(value, inner)
    if isinstance(value, msgspec.Struct):
        hints = _HINTS.setdefault(type(value), get_type_hints(type(value), include_extras=True))
        return all(_bounds_hold(getattr(value, name), hints[name]) for name in value.__struct_fields__)
    arguments = get_args(hint)
    if isinstance(value, tuple) and arguments:
        each = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return all(map(_bounds_hold, value, each))
    if isinstance(value, dict) and arguments:
        return all(_bounds_hold(inner, arguments[1]) for inner in value.values())
    empty = (type(None), msgspec.UnsetType)
    inside = [] if isinstance(value, empty) else [choice for choice in arguments if choice not in empty]
    return _bounds_hold(value, inside[0]) if len(inside) == 1 else True


def _is_within(value: Any, meta: msgspec.Meta) -> bool:
    size = len(value) if isinstance(value, str | bytes | tuple | dict) else 0
    return (
        (meta.ge is None or value >= meta.ge)
        and (meta.gt is None or value > meta.gt)
        and (meta.le is None or value <= meta.le)
        and (meta.lt is None or value < meta.lt)
        and (meta.min_length is None or size >= meta.min_length)
        and (meta.max_length is None or size <= meta.max_length)
    )


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _tensors(getattr(value, name))
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)


def check_message(message: Message | Frame) -> None:
    """Check a message's bounds and its round trip; its tensors are arrays or refused."""
    assert _bounds_hold(message, type(message)), message
    again = encode(message)
    assert encode(decode(again, type(message), max_bytes=len(again))) == again
    for tensor in _tensors(message):
        with contextlib.suppress(MalformedMessage):
            assert to_array(tensor).shape == tensor.shape


def decode_any(data: bytes) -> None:
    """Decode a message of the type that the first byte selects, and of the type in its envelope."""
    if not data:
        return
    body, expected = data[1:], TYPES[data[0] % len(TYPES)]
    with contextlib.suppress(MalformedMessage):
        check_message(decode(body, expected, max_bytes=MAX_FRAME_BYTES))
    with contextlib.suppress(MalformedMessage):
        kind = message_kind(body)
        if kind in _TYPE_OF and _TYPE_OF[kind] is not expected:
            with contextlib.suppress(MalformedMessage):
                check_message(decode(body, _TYPE_OF[kind], max_bytes=MAX_FRAME_BYTES))


def parse_topic(data: bytes) -> None:
    """Parse a topic: it is refused, or `device_topic` makes it of its parts."""
    topic = data.decode(errors="replace")
    try:
        where = parse_device_topic(topic)
    except MalformedMessage:
        return
    assert is_name(where.fleet)
    assert is_name(where.device)
    channel: Any = where.channel
    made = device_topic(where.fleet, where.device, channel)
    assert topic[: made.rfind("/")] == made[: made.rfind("/")]
    assert channel == "up" or topic == made


KEY = bytes(range(32))
FLEET = "orchard"
SIGNED = {
    signed_manifest(body, key=KEY, fleet=FLEET, channel="head", release=release): (release, body)
    for release in (1, 2**40)
    for body in (b"", *(encode(sample) for sample in SAMPLES[1:4]))
}


def open_signed(data: bytes) -> None:
    """Open a manifest: with the known key, only what it has signed for this fleet and channel."""
    try:
        signed = open_manifest(data, fleet=FLEET, channel="head")
    except (BadSignature, MalformedMessage):
        return
    known = next(iter(SIGNED))
    if signed.key == decode(known, type(signed), max_bytes=MAX_SIGNED_BYTES).key:
        assert (signed.release, signed.body) in SIGNED.values()


COUNTS = np.array([5, 2], np.uint8)
SIZES = (1, 3, 30)
SUMS = {size: np.arange(2 * size, dtype=np.int32).reshape(2, size) for size in SIZES}
MOMENTS = {size: np.arange(triangle_size(size)) * 37 - 99 for size in SIZES}


def decode_moment(data: bytes) -> None:
    """Decode a second moment of the size that the first byte selects, from a stream and from what one expands to."""
    if not data:
        return
    sums = SUMS[SIZES[data[0] % len(SIZES)]]
    for stream in (data[1:], zlib.compress(data[1:], 1)):
        with contextlib.suppress(MalformedMessage):
            tensor = to_tensor(np.frombuffer(stream, np.uint8))
            triangle = second_moment.decode(tensor, COUNTS, sums)
            again = second_moment.decode(second_moment.encode(triangle, COUNTS, sums), COUNTS, sums)
            np.testing.assert_array_equal(triangle, again)


def _moments() -> Iterable[bytes]:
    for number, size in enumerate(SIZES):
        stream = second_moment.encode(MOMENTS[size], COUNTS, SUMS[size]).data
        yield from (bytes([number]) + stream, bytes([number]) + zlib.decompress(stream))


MESSAGES = Target(
    "messages",
    decode_any,
    lambda: (bytes([number]) + encode(sample) for number, sample in enumerate(SAMPLES)),
    of_message(prefix_bytes=1),
    share=20,
)
TOPICS = Target(
    "topics",
    parse_topic,
    lambda: (
        device_topic("default", "shed-1", channel).encode()
        for channel in ("state", "info", "up", "ack", "get", "blk")
    ),
    max_bytes=256,
    share=20,
)
SIGNATURES = Target("signatures", open_signed, lambda: SIGNED, of_message(), share=8)
SECOND_MOMENT = Target("second_moment", decode_moment, _moments, share=3)
