"""Graphs of a least squares program for tests: projections of features are trained towards a target per class.

State: `weight`, `velocity`, `mean` and `steps`. Tensors of a round: `targets` and `rate`. For statistics, a map of
features to integers.
"""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, parser

from edge_client.graphs.program_graph import Graph, Role, open_graph
from protocol.models.onnx_metadata import GraphMetadata, to_properties

FEATURES, CLASSES, PROJECTION = 4, 3, 2
MOMENTUM = 0.5

_HEADER = '<ir_version: 8, opset_import: ["": 17]>'

_BODIES: dict[Role, str] = {
    "init": """
        init (float[n, 4] feature)
            => (float[4, 2] weight, float[4, 2] velocity, float[4] mean, int64 steps)
        <float[4, 2] first = {0.5, -0.5, 0.25, 1.0, -1.0, 0.5, 0.0, 0.75}, int64 nothing = {0}>
        {
            weight = Identity(first)
            velocity = Sub(first, first)
            shape = Shape<start = 0, end = 1>(feature)
            rows = Cast<to = 1>(shape)
            one = Constant<value_float = 1.0>()
            divisor = Max(rows, one)
            axis = Constant<value_ints = [0]>()
            sum = ReduceSum<keepdims = 0>(feature, axis)
            mean = Div(sum, divisor)
            steps = Identity(nothing)
        }""",
    "step": """
        step (float[n, 4] feature, int64[n] labels, float[4, 2] weight, float[4, 2] velocity, float[4] mean,
              int64 steps, float[3, 2] targets, float rate)
            => (float loss, float[4, 2] next_weight, float[4, 2] next_velocity, int64 next_steps)
        {
            centered = Sub(feature, mean)
            projection = MatMul(centered, weight)
            wanted = Gather(targets, labels)
            error = Sub(projection, wanted)
            square = Mul(error, error)
            loss = ReduceMean<keepdims = 0>(square)
            turned = Transpose(centered)
            slope = MatMul(turned, error)
            count = Size(error)
            size = Cast<to = 1>(count)
            gradient = Div(slope, size)
            half = Constant<value_float = 0.5>()
            slower = Mul(velocity, half)
            next_velocity = Add(slower, gradient)
            change = Mul(next_velocity, rate)
            next_weight = Sub(weight, change)
            one = Constant<value_int = 1>()
            next_steps = Add(steps, one)
        }""",
    "project": """
        project (float[n, 4] feature, float[4, 2] weight, float[4] mean) => (float[n, 2] projection)
        {
            centered = Sub(feature, mean)
            projection = MatMul(centered, weight)
        }""",
    "head": """
        head (float[n, 4] feature, float[4, 2] weight, float[3, 2] targets, float[3, 2] local_prototypes,
              float[3] local_counts)
            => (float[n, 3] logits, float[n, 3] probabilities)
        {
            projection = MatMul(feature, weight)
            zero = Constant<value_float = 0.0>()
            has = Greater(local_counts, zero)
            axis = Constant<value_ints = [1]>()
            rows = Unsqueeze(has, axis)
            centers = Where(rows, local_prototypes, targets)
            turned = Transpose(centers)
            logits = MatMul(projection, turned)
            probabilities = Softmax(logits)
        }""",
}


def model(role: Role, *, body: str = "", **facts: Any) -> onnx.ModelProto:
    """Return a graph of the program; `body` and the metadata's `facts` replace its own."""
    made = parser.parse_model(_HEADER + (body or _BODIES[role]))
    metadata = GraphMetadata(
        **{
            "role": role,
            "algorithm": "least-squares",
            "classes": CLASSES,
            "feature_size": FEATURES,
            "projection_size": PROJECTION,
            "opset": 17,
            "runtime_min": "1.14",
            **facts,
        }
    )
    helper.set_model_props(made, to_properties(metadata))
    return made


def file(role: Role, **options: Any) -> bytes:
    return bytes(model(role, **options).SerializeToString())


def opened(role: Role, **options: Any) -> Graph:
    return open_graph(file(role, **options), role=role)


def round_tensors(*, rate: float = 0.1) -> dict[str, NDArray[Any]]:
    """Return the tensors of a round, partly in float16 as on the wire."""
    targets = np.array([[1, 0], [0, 1], [-1, -1]], dtype=np.float16)
    return {"targets": targets, "rate": np.array(rate, dtype=np.float32)}


def data(images: int, *, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, images)
    feature = random.normal(size=(images, FEATURES)) + 0.5 * labels[:, None]
    return feature.astype(np.float32), labels


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
