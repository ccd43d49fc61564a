"""Second moments of integer rows: exact sums of q q', and their encoding for the wire.

A row has D integers from -127 to 127. Sums of products are exact in floating point as long as they are small enough, so
that neither the order of the rows nor the machine changes a bit. Of the symmetric D x D matrix the upper triangle is
kept, row by row: D (D + 1) / 2 values.
"""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import MalformedMessage
from protocol.statistics.integer_rows import MAX_VALUE, triangle_size
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.messages import MAX_IMAGES, MAX_MAPPED_SIZE, Tensor

MAX_PLANES = 5
"""Bytes of a value in the encoding: 10,000,000 images of the largest values fit."""

_SCALE = 256.0
"""Class means are rounded to this fraction in the prediction."""

EXACT_ROWS = 2**24 // MAX_VALUE**2
"""Rows whose products add up to less than 2**24: float32 sums of them are exact."""

_BLOCK = 256
"""Rows of the matrix that are computed at once."""


def add_products(matrix: NDArray[np.int64], rows: NDArray[Any], weights: NDArray[Any] | None = None) -> None:
    """Add sum w q q' to the upper triangle of an int64 (D, D) matrix in place; below it, values are undefined.

    Laws: any order of the rows and any division into calls gives the same integers, and a row of weight w is w rows.

    Args:
        matrix: the sums so far.
        rows: (n, D), integers from -127 to 127 of any dtype.
        weights: (n,) integers, at least 1; None for ones. They add up to less than 2**39.
    """
    dtype: type[np.floating[Any]] = np.float32 if weights is None else np.float64
    for start in range(0, len(rows), EXACT_ROWS):
        block = rows[start : start + EXACT_ROWS].astype(dtype)
        weighted = block if weights is None else block * weights[start : start + EXACT_ROWS, None]
        for at in range(0, len(matrix), _BLOCK):
            products = weighted[:, at : at + _BLOCK].T @ block[:, at:]
            matrix[at : at + _BLOCK, at:] += products.astype(np.int64)


def to_triangle(matrix: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the upper triangle of a (D, D) matrix by rows, (D (D + 1) / 2,)."""
    return np.concatenate([row[at:] for at, row in enumerate(matrix)])


def from_triangle(triangle: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the symmetric (D, D) matrix of an upper triangle: the inverse of `to_triangle`."""
    matrix = np.empty((size, size), triangle.dtype)
    start = 0
    for at in range(size):
        row = triangle[start : start + size - at]
        matrix[at, at:], matrix[at:, at] = row, row
        start += size - at
    return matrix


def encode(triangle: NDArray[np.int64], counts: NDArray[Any], sums: NDArray[Any]) -> Tensor:
    """Return a triangle as a tensor of bytes; the receiver decodes it with the same counts and sums.

    What counts and sums predict is subtracted. The low bit of a difference is its sign, and its bytes are stored in
    planes, the low one first, as few as hold all differences, in one zlib stream.

    Args:
        triangle: int64 (D (D + 1) / 2,).
        counts: (p,), images of each class.
        sums: (p, D), sum of each class's rows.
    """
    difference = triangle - _predict(counts, sums)
    coded = ((difference << 1) ^ (difference >> 63)).astype("<u8")
    planes = max(1, -(-int(coded.max(initial=0)).bit_length() // 8))
    stream = coded.view(np.uint8).reshape(-1, 8)[:, :planes].T.tobytes()
    return to_tensor(np.frombuffer(zlib.compress(stream), np.uint8))


def decode(tensor: Tensor, counts: NDArray[Any], sums: NDArray[Any]) -> NDArray[np.int64]:
    """Return the triangle that `encode` was given, int64 (D (D + 1) / 2,).

    Memory is bounded by D, whatever the tensor holds.

    Raises:
        MalformedMessage: the tensor is no such encoding, or no rows can add up to the sums or the triangle.
    """
    images = counts.astype(np.int64)
    _check_sums(images, sums)
    values = triangle_size(sums.shape[1])
    stream = _decompress(tensor, most=MAX_PLANES * values)
    planes, rest = divmod(len(stream), values)
    if rest or not planes:
        raise MalformedMessage(f"expected 1 to {MAX_PLANES} bytes for each of {values}, got {len(stream)}")
    coded: NDArray[np.int64] = np.zeros(values, np.int64)
    for plane in reversed(range(planes)):
        coded <<= 8
        coded |= np.frombuffer(stream, np.uint8, values, plane * values)
    signs = -(coded & 1)
    coded >>= 1
    coded ^= signs
    coded += _predict(counts, sums)
    most = MAX_VALUE**2 * int(images.sum())
    if int(coded.max()) > most or int(coded.min()) < -most:
        raise MalformedMessage(f"a second moment is more than {MAX_VALUE}**2 times the images")
    return coded


def _check_sums(images: NDArray[np.int64], sums: NDArray[Any]) -> None:
    if sums.ndim != 2 or sums.shape[:1] != images.shape or not 1 <= sums.shape[1] <= MAX_MAPPED_SIZE:
        raise MalformedMessage(f"expected class sums for counts of shape {images.shape}, got {sums.shape}")
    if int(images.min(initial=1)) < 1 or int(images.sum()) > MAX_IMAGES:
        raise MalformedMessage(f"expected counts from 1 that add up to at most {MAX_IMAGES}")
    if (np.abs(sums.astype(np.int64)) > MAX_VALUE * images[:, None]).any():
        raise MalformedMessage(f"a class sum is more than {MAX_VALUE} times the images of its class")


def _decompress(tensor: Tensor, *, most: int) -> bytes:
    data = to_array(tensor)
    if tensor.dtype != "u1" or data.ndim != 1:
        raise MalformedMessage(f"expected a second moment as u1 (n,), got {tensor.dtype} {tensor.shape}")
    inflate = zlib.decompressobj()
    try:
        stream = inflate.decompress(tensor.data, most + 1)
    except zlib.error as error:
        raise MalformedMessage(f"a second moment is no zlib stream: {error}") from error
    if len(stream) > most or not inflate.eof or inflate.unused_data:
        raise MalformedMessage(f"expected a zlib stream of at most {most} bytes and nothing after it")
    return stream


def _predict(counts: NDArray[Any], sums: NDArray[Any]) -> NDArray[np.int64]:
    """Return the triangle of about sum_c s_c s_c' / n_c, in integers that any machine computes alike.

    The means s_c / n_c are rounded to 1/256: all sums of products are integers below 2**53, and exact in any order.
    """
    totals = sums.astype(np.float64)
    means = np.rint(_SCALE * totals / counts[:, None].astype(np.float64)).T
    size = totals.shape[1]
    triangle, start = np.empty(triangle_size(size), np.int64), 0
    for at in range(0, size, _BLOCK):
        block = np.rint(means[at : at + _BLOCK] @ totals[:, at:] / _SCALE)
        for offset, row in enumerate(block):
            stop = start + size - at - offset
            triangle[start:stop] = row[offset:]
            start = stop
    return triangle
