"""Arrays as the tensors of messages."""

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.errors import MalformedMessage
from protocol.wire.messages import Tensor


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor; float16, float32, int8, int32, or unsigned integers of up to 32 bits.

    Raises:
        MalformedMessage: the array's dtype or number of dimensions is not supported.
    """
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    try:
        return msgspec.convert((little.dtype.str[1:], little.shape, little.tobytes()), Tensor)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"cannot send an array of {array.dtype} {array.shape}: {error}") from error


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as a read-only array, without a copy; raises MalformedMessage if bytes and shape disagree."""
    dtype = np.dtype("<" + tensor.dtype)
    expected = math.prod(tensor.shape) * dtype.itemsize
    if expected != len(tensor.data):
        raise MalformedMessage(
            f"expected {expected} bytes for {tensor.dtype} {tensor.shape}, got {len(tensor.data)}"
        )
    try:
        return np.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape)
    except ValueError as error:  # no values, but the product of the other edges overflows
        raise MalformedMessage(f"no array can have shape {tensor.shape}: {error}") from error


def to_unsigned(values: NDArray[Any]) -> Tensor:
    """Return non-negative integers as a tensor of the smallest unsigned dtype that holds them."""
    return to_tensor(values.astype(np.min_scalar_type(int(values.max(initial=0)))))
