"""Prototypes in one byte a value."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from protocol.wire.quantization import STEPS, dequantize, quantize

LARGEST = 65504.0
VALUES = npst.arrays(
    np.float16,
    npst.array_shapes(min_dims=2, max_dims=2, max_side=6),
    elements=st.floats(-LARGEST, LARGEST, width=16),
)


@given(VALUES)
def test_an_error_is_at_most_half_a_step(values: NDArray[np.float16]) -> None:
    """Of each feature by its own range, up to the rounding of float32."""
    integers, limits = quantize(values)
    assert (str(integers.dtype), str(limits.dtype), limits.shape) == (
        "uint8",
        "float16",
        (2, values.shape[1]),
    )
    error = np.abs(dequantize(integers, limits).astype(np.float64) - values)
    low, high = limits.astype(np.float64)
    assert (error <= 0.5 * (high - low) / STEPS + 1e-6 * np.maximum(abs(low), abs(high))).all()


@given(VALUES)
def test_equal_rows_give_equal_integers(values: NDArray[np.float16]) -> None:
    """More rows than are converted at a time give the same integers; equal values are exact."""
    many = np.tile(values, (300, 1))
    integers, limits = quantize(many)
    np.testing.assert_array_equal(integers, np.tile(quantize(values)[0], (300, 1)))
    same = dequantize(*quantize(values[:1]))
    np.testing.assert_array_equal(same, values[:1].astype(np.float32))
    assert np.abs(dequantize(integers, limits)).max() <= LARGEST * (1 + 1e-6)
