"""Writes heads as ONNX files, and measures what ONNX Runtime computes differently."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from aggregator.algorithms.fedtc.head import MIN_LENGTH, Dense, logits_of
from aggregator.algorithms.novelty import ClassDirections
from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.algorithms.statistics.noisy_ridge import Shortening
from aggregator.graphs.fused_model import finished
from protocol.models.cpu_session import cpu_session
from protocol.models.onnx_metadata import GraphMetadata, HeadMetadata

OPSET = 18
"""ONNX operator set of all graphs."""

RUNTIME_MIN = "1.14"
"""Oldest ONNX Runtime with it."""

IR_VERSION = 8
"""ONNX file format that came with that operator set."""

BATCH_SIZES = (1, 7, 256)
"""Rows with which a file is compared with its layers."""


def head_to_onnx(
    layers: Sequence[Dense],
    *,
    metadata: HeadMetadata,
    feature_map: FeatureMap | Shortening | None = None,
    columns: NDArray[np.intp] | None = None,
    directions: ClassDirections | None = None,
) -> bytes:
    """Return a head as an ONNX file, of layers that take features, or some columns of these, or rows of a map.

    Its input is `feature`, float32 (n, L); its outputs are `logits` and `probabilities`, float32 (n, C), and with
    directions of the selected features, or of a map's rows without random features, `novelty`, float32 (n,).
    """
    *hidden, classifier = layers
    if feature_map is None:
        nodes, constants, value = _hidden_layers(hidden, columns, metadata.feature_size)
        row = "selected" if "columns" in constants else "feature"
    else:
        (nodes, constants), value = feature_map.nodes(), "projection"
        row = "identity_row" if feature_map.random_features else value
    nodes += [*_dense("logits", classifier, value, constants), "probabilities = Softmax<axis=1>(logits)"]
    rows = f"float[n, {len(metadata.classes)}]"
    outputs = f"{rows} logits, {rows} probabilities"
    if directions is not None:
        nodes += _novelty(directions, row, constants)
        outputs += ", float[n] novelty"
    model = _model(f"head (float[n, {metadata.feature_size}] feature) => ({outputs})", nodes, constants)
    return finished(model, metadata)


def _novelty(directions: ClassDirections, row: str, constants: dict[str, NDArray[np.generic]]) -> list[str]:
    """Add directions to the constants; return the nodes that compute the novelty of a row."""
    nodes = []
    if directions.factors is not None:
        constants["novelty_factors"] = directions.factors
        nodes, row = [f"novelty_row = Mul({row}, novelty_factors)"], "novelty_row"
    constants |= {
        "novelty_units": directions.units,
        "novelty_axes": np.array([1]),
        "novelty_min_length": np.array(MIN_LENGTH, np.float32),
        "novelty_whole": np.array(1, np.float32),
    }
    return [
        *nodes,
        f"novelty_products = Gemm<transB=1>({row}, novelty_units)",
        "novelty_nearest = ReduceMax<keepdims=0>(novelty_products, novelty_axes)",
        f"novelty_length = ReduceL2<keepdims=0>({row}, novelty_axes)",
        "novelty_divisor = Max(novelty_length, novelty_min_length)",
        "novelty_cosine = Div(novelty_nearest, novelty_divisor)",
        "novelty = Sub(novelty_whole, novelty_cosine)",
    ]


def _hidden_layers(
    layers: Sequence[Dense], columns: NDArray[np.intp] | None = None, feature_size: int = 0
) -> tuple[list[str], dict[str, NDArray[np.generic]], str]:
    """Return the nodes and constants of a head's layers before the last one, from `feature`, and their last value.

    They take some columns of `feature`, float32 (n, feature_size), or all of them.
    """
    nodes: list[str] = []
    constants: dict[str, NDArray[np.generic]] = {}
    value = "feature"
    if columns is not None and len(columns) < feature_size:
        constants["columns"] = columns
        nodes, value = ["selected = Gather<axis=1>(feature, columns)"], "selected"
    if layers:  # ONNX Runtime warns of constants that no node uses
        constants |= {"axes": np.array([1]), "min_length": np.array(MIN_LENGTH, dtype=np.float32)}
    for number, layer in enumerate(layers):
        nodes += _dense(f"dense_{number}", layer, value, constants)
        value = f"unit_{number}"
        nodes += [
            f"positive_{number} = Relu(dense_{number})",
            f"length_{number} = ReduceL2<keepdims=1>(positive_{number}, axes)",
            f"divisor_{number} = Max(length_{number}, min_length)",
            f"{value} = Div(positive_{number}, divisor_{number})",
        ]
    return nodes, constants, value


def map_to_onnx(feature_map: FeatureMap | Shortening, *, num_classes: int) -> bytes:
    """Return a map as an ONNX file: `feature`, float32 (n, L), to `projection`, float32 (n, D), integers.

    Devices open it as the `project` graph of a task with so many classes.
    """
    nodes, constants = feature_map.nodes()
    sizes = f"float[n, {feature_map.feature_size}] feature) => (float[n, {feature_map.size}] projection"
    metadata = GraphMetadata(
        role="project",
        algorithm="statistics",
        classes=num_classes,
        feature_size=feature_map.feature_size,
        projection_size=feature_map.size,
        opset=OPSET,
        runtime_min=RUNTIME_MIN,
    )
    return finished(_model(f"map ({sizes})", nodes, constants), metadata)


def mapped(feature_map: FeatureMap | Shortening, features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows (n, D), integers, that ONNX Runtime makes of features (n, L)."""
    file = map_to_onnx(feature_map, num_classes=1)
    session = cpu_session(file)
    return np.asarray(session.run(None, {"feature": features})[0])


def _model(
    signature: str, nodes: Sequence[str], constants: Mapping[str, NDArray[np.generic]]
) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]> {signature} {{ {" ".join(nodes)} }}'
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in constants.items()
    )
    return model


def _dense(name: str, layer: Dense, value: str, constants: dict[str, NDArray[np.generic]]) -> list[str]:
    """Add a layer to the constants; return the nodes that compute `name` from a value."""
    nodes = []
    if layer.projection is not None:
        nodes += _matrix(f"{name}_projection", layer.projection, constants)
        nodes.append(f"{name}_projected = Gemm<transB=1>({value}, {name}_projection)")
        value = f"{name}_projected"
    nodes += _matrix(f"{name}_weight", layer.weight, constants)
    constants[f"{name}_bias"] = layer.bias
    return [*nodes, f"{name} = Gemm<transB=1>({value}, {name}_weight, {name}_bias)"]


def _matrix(name: str, array: NDArray[np.floating], constants: dict[str, NDArray[np.generic]]) -> list[str]:
    """Add a matrix to the constants; return the nodes that make it float32."""
    if array.dtype == np.float32:
        constants[name] = array
        return []
    constants[f"{name}_float16"] = array
    return [f"{name} = Cast<to=1>({name}_float16)"]


def max_difference(
    layers: Sequence[Dense],
    file: bytes,
    features: NDArray[np.float32],
    feature_map: FeatureMap | Shortening | None = None,
    *,
    columns: NDArray[np.intp] | None = None,
    directions: ClassDirections | None = None,
) -> float:
    """Return the maximum difference of the file's outputs in ONNX Runtime from those of its layers and directions.

    `features` is float32 (m, L), m >= 1, repeated for batches larger than m.
    """
    session = cpu_session(file)
    worst = 0.0
    for size in BATCH_SIZES:
        batch = np.resize(features, (size, features.shape[1]))
        inputs = batch if columns is None else batch[:, columns]
        rows = inputs if feature_map is None else mapped(feature_map, batch)
        logits = logits_of(layers, rows)
        outputs = session.run(["logits", "probabilities"], {"feature": batch})
        worst = max(worst, difference_from(logits, outputs))
        if directions is not None:
            (novelty,) = session.run(["novelty"], {"feature": batch})
            expected = directions.novelty(rows[:, : directions.units.shape[1]])
            worst = max(worst, float(np.nan_to_num(np.abs(expected - novelty), nan=np.inf).max()))
    return worst


def difference_from(logits: NDArray[np.float32], outputs: Sequence[NDArray[np.float32]]) -> float:
    """Return the maximum difference of a head's outputs, logits and probabilities, from expected logits (n, C).

    Logits above 1 are compared relative to the largest of them. NaN counts as an infinite difference.
    """
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    worst = 0.0
    for theirs, ours in zip((logits, odds / odds.sum(axis=1, keepdims=True)), outputs, strict=True):
        difference = np.abs(theirs - ours) / max(1, np.abs(theirs).max())
        # max() would hide NaN.
        worst = float("inf") if np.isnan(difference).any() else max(worst, float(difference.max()))
    return worst
