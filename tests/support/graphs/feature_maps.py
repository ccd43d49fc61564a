"""Maps of features to integers, as ONNX graphs of a task with statistics."""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, parser

from protocol.models.onnx_metadata import GraphMetadata, to_properties

NEGATED = """
    eight = Constant<value_float = 8.0>()
    scaled = Mul(feature, eight)
    rounded = Round(scaled)
    low = Constant<value_float = -127.0>()
    high = Constant<value_float = 127.0>()
    clipped = Clip(rounded, low, high)
    negated = Neg(clipped)
    projection = Concat<axis = 1>(clipped, negated)
"""


def map_graph(
    body: str = NEGATED, *, feature_size: int = 16, size: int = 32, declared: tuple[int, int] | None = None
) -> bytes:
    """Return a map of L features to D values; `declared` L and D replace the graph's own in its metadata."""
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> project (float[n, {feature_size}] feature) '
        f"=> (float[n, {size}] projection) {{{body}}}"
    )
    features, values = declared or (feature_size, size)
    metadata = GraphMetadata(
        role="project", algorithm="statistics", classes=2, feature_size=features, projection_size=values,
        opset=17, runtime_min="1.14",
    )  # fmt: skip
    helper.set_model_props(model, to_properties(metadata))
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def mapped(feature: NDArray[Any]) -> NDArray[np.int64]:
    """Return the rows of `map_graph()` by numpy, int64 (n, 2 L)."""
    clipped = np.clip(np.rint(feature * np.float32(8)), -127, 127).astype(np.int64)
    return np.concatenate([clipped, -clipped], axis=1)
