"""The tensors of a round as a blob, and back."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ProtofleetError
from protocol.wire.codec import decode, encode, to_array, to_tensor
from protocol.wire.messages import MAX_BLOB_BYTES, Tensors


def pack_tensors(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays by name as a blob; `unpack_tensors(pack_tensors(t))` are the same arrays.

    Raises:
        ProtofleetError: one holds NaN or infinity, or is of a dtype that does not travel.
    """
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise ProtofleetError(f"the round's {name} holds NaN or infinity: not published")
    return encode(Tensors(values={name: to_tensor(values) for name, values in sorted(tensors.items())}))


def unpack_tensors(payload: bytes) -> dict[str, NDArray[Any]]:
    """The arrays in a blob, read-only.

    Raises:
        MalformedMessage: it is no such blob.
    """
    message = decode(payload, Tensors, max_bytes=MAX_BLOB_BYTES)
    return {name: to_array(tensor) for name, tensor in message.values.items()}
