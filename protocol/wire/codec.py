"""Encode and decode messages: msgpack envelopes, every size checked before it is used. Imports no numpy."""

import functools
import hashlib
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

from protocol.errors import MalformedMessage, VersionMismatch
from protocol.wire.messages import MAX_CHUNK_BYTES, PROTOCOL_VERSION, Frame, Message

M = TypeVar("M", bound=Message | Frame)


class _MapHeader(msgspec.Struct):
    type: str
    v: int


class _FrameHeader(msgspec.Struct, array_like=True):
    type: str
    v: int


class FrameView(Frame, frozen=True, array_like=True, tag="frame"):
    """A received frame whose data is a view of the packet, without a copy."""

    data: Annotated[memoryview, Meta(max_length=MAX_CHUNK_BYTES)]  # type: ignore[assignment]  # it behaves like bytes


_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError)


@functools.cache
def _decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(message_type)


def digest_of(data: bytes) -> bytes:
    """Return the sha256 of `data`, 32 bytes."""
    return hashlib.sha256(data).digest()


def encode(message: Message | Frame) -> bytes:
    """Return a message as bytes: `decode(encode(m), type(m)) == m`."""
    return msgspec.msgpack.encode(message)


def is_probe(payload: bytes) -> bool:
    """Return whether programs ignore a payload: an empty one, or one of `doctor`, which begins with a zero byte."""
    return payload[:1] in {b"", b"\0"}


def decode(data: bytes, message_type: type[M], *, max_bytes: int) -> M:
    """Decode a message of the expected type.

    Raises:
        VersionMismatch: the message has another protocol version.
        MalformedMessage: the data is not exactly one such message.
    """
    if len(data) > max_bytes:
        raise MalformedMessage(f"expected at most {max_bytes} bytes, got {len(data)}")
    try:
        header = _decoder(_FrameHeader if issubclass(message_type, Frame) else _MapHeader).decode(data)
        if header.v != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"expected protocol version {PROTOCOL_VERSION}, got {header.v}: "
                "install the same protofleet version on both sides"
            )
        message: M = _decoder(cast("Any", message_type)).decode(data)
    except _MALFORMED as error:
        name = message_type.__struct_config__.tag
        raise MalformedMessage(f"not a {name} message: {str(error)[:200]}") from error
    return message


def message_kind(data: bytes) -> str:
    """Return the type name in a message's envelope; raises MalformedMessage if there is no envelope."""
    try:
        kind: str = _decoder(_MapHeader).decode(data).type
    except _MALFORMED as error:
        raise MalformedMessage(f"not a message: {str(error)[:200]}") from error
    return kind
