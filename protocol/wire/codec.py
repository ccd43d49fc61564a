"""Messages to bytes and back: msgpack envelopes and raw tensors, every size checked before it is used."""

import functools
import hashlib
import math
from typing import Annotated, Any, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from protocol.errors import MalformedMessage, VersionMismatch
from protocol.wire.messages import MAX_CHUNK_BYTES, PROTOCOL_VERSION, Frame, Message, Tensor

M = TypeVar("M", bound=Message | Frame)


class _MapHeader(msgspec.Struct):
    type: str
    v: int


class _FrameHeader(msgspec.Struct, array_like=True):
    type: str
    v: int


class FrameView(Frame, frozen=True, array_like=True, tag="frame"):
    """A frame that came in, and keeps what it was read from: its bytes are not copied."""

    data: Annotated[memoryview, Meta(max_length=MAX_CHUNK_BYTES)]  # type: ignore[assignment]  # it does as bytes do


@functools.cache
def _decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(message_type)


def digest_of(data: bytes) -> bytes:
    """The 32 bytes of sha256 that name `data` everywhere."""
    return hashlib.sha256(data).digest()


def encode(message: Message | Frame) -> bytes:
    """A message as bytes; `decode(encode(m), type(m)) == m`."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, message_type: type[M], *, max_bytes: int) -> M:
    """The message of the expected type in `data`.

    Raises:
        VersionMismatch: the sender speaks another protocol version.
        MalformedMessage: anything else that is not exactly such a message.
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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
        name = message_type.__struct_config__.tag
        raise MalformedMessage(f"not a {name} message: {str(error)[:200]}") from error
    return message


def message_kind(data: bytes) -> str:
    """The type name written in a message's envelope, unchecked beyond that.

    Raises:
        MalformedMessage: there is no envelope.
    """
    try:
        kind: str = _decoder(_MapHeader).decode(data).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
        raise MalformedMessage(f"not a message: {str(error)[:200]}") from error
    return kind


def to_tensor(array: NDArray[Any]) -> Tensor:
    """An array as a tensor, little-endian and row-major; float16, float32 or unsigned up to 32 bits.

    Raises:
        MalformedMessage: the array's dtype or number of dimensions does not travel.
    """
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    try:
        return msgspec.convert((little.dtype.str[1:], little.shape, little.tobytes()), Tensor)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"cannot send an array of {array.dtype} {array.shape}: {error}") from error


def to_array(tensor: Tensor) -> NDArray[Any]:
    """A tensor as a read-only array of its dtype and shape, without a copy.

    Raises:
        MalformedMessage: shape and bytes contradict each other.
    """
    dtype = np.dtype("<" + tensor.dtype)
    expected = math.prod(tensor.shape) * dtype.itemsize
    if expected != len(tensor.data):
        raise MalformedMessage(
            f"expected {expected} bytes for {tensor.dtype} {tensor.shape}, got {len(tensor.data)}"
        )
    try:
        return np.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape)
    except ValueError as error:  # without values, but with edges that together are beyond what can be counted
        raise MalformedMessage(f"there is no array of shape {tensor.shape}: {error}") from error


def to_unsigned(values: NDArray[Any]) -> Tensor:
    """Non-negative integers as a tensor of the smallest unsigned dtype that holds them."""
    return to_tensor(values.astype(np.min_scalar_type(int(values.max(initial=0)))))
