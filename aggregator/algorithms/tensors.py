"""Encodes the tensors of a round as a blob."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ProtofleetError
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.codec import decode, encode
from protocol.wire.messages import MAX_BLOB_BYTES, Tensors


def check_finite(tensors: Mapping[str, NDArray[Any]]) -> None:
    """Raise ProtofleetError if a tensor holds NaN or infinity."""
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise ProtofleetError(f"the round's {name} holds NaN or infinity: not published")


def pack_tensors(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """Encode arrays by name; `unpack_tensors(pack_tensors(t))` returns equal arrays.

    Raises:
        ProtofleetError: one holds NaN or infinity, or is of a dtype that cannot be sent.
    """
    check_finite(tensors)
    return encode(Tensors(values={name: to_tensor(values) for name, values in sorted(tensors.items())}))


def unpack_tensors(payload: bytes) -> dict[str, NDArray[Any]]:
    """Decode a blob into read-only arrays.

    Raises:
        MalformedMessage: the blob is malformed.
    """
    message = decode(payload, Tensors, max_bytes=MAX_BLOB_BYTES)
    return {name: to_array(tensor) for name, tensor in message.values.items()}
