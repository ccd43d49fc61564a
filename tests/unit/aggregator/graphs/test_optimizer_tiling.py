"""Large tensors worked on by tiles: the same results, one `Scan`, and tiles that fit a cache."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from aggregator.algorithms.layers import TILE_ELEMENTS, tile_rows
from aggregator.graphs.tracing import tile

TILES, ROWS, COLUMNS = 3, 2, 5


def model() -> onnx.ModelProto:
    """A product of a stack with one matrix, added to a state that decays, beside a sum that is no stack."""
    stack = (TILES, ROWS, COLUMNS)
    nodes = [
        helper.make_node("Expand", ["matrix", "shape"], ["repeated"]),
        helper.make_node("MatMul", ["slopes", "repeated"], ["product"]),
        helper.make_node("Mul", ["state", "decay"], ["decayed"]),
        helper.make_node("Add", ["decayed", "product"], ["next_state"]),
        helper.make_node("Sqrt", ["next_state"], ["root"]),
        helper.make_node("ReduceSum", ["root"], ["total"], keepdims=0),
        helper.make_node("Add", ["total", "decay"], ["loss"]),
    ]
    ends: dict[str, tuple[int | str | None, ...]] = {
        "state": stack,
        "slopes": (TILES, ROWS, "n"),
        "matrix": ("n", COLUMNS),
        "shape": (3,),
        "decay": (),
        "next_state": stack,
        "loss": (),
    }
    values = [
        helper.make_tensor_value_info(
            name, TensorProto.INT64 if name == "shape" else TensorProto.FLOAT, shape
        )
        for name, shape in ends.items()
    ]
    graph = helper.make_graph(nodes, "step", values[:5], values[5:])
    graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, stack)
        for name in ("product", "decayed", "root")
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made, full_check=True)
    return made


def outputs(made: onnx.ModelProto, rows: int) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(rows)
    feeds = {
        "state": random.random((TILES, ROWS, COLUMNS)).astype(np.float32),
        "slopes": random.random((TILES, ROWS, rows)).astype(np.float32),
        "matrix": random.random((rows, COLUMNS)).astype(np.float32),
        "shape": np.array([TILES, rows, COLUMNS]),
        "decay": np.float32(0.5),
    }
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}
    found: list[NDArray[np.float32]] = session.run(
        None, {name: np.asarray(value) for name, value in feeds.items() if name in wanted}
    )
    return found


@pytest.mark.parametrize("rows", [1, 4])
def test_tiled_graph_equals_the_original(rows: int) -> None:
    """This holds for tiles that other nodes use too."""
    plain, tiled = model(), model()
    tile(tiled)
    onnx.checker.check_model(tiled, full_check=True)
    for whole, parts in zip(outputs(plain, rows), outputs(tiled, rows), strict=True):
        np.testing.assert_allclose(parts, whole, rtol=1e-6)


def test_every_operation_on_stacks_is_in_the_scan() -> None:
    """No matrix repeated for the tiles, and no stack remains outside."""
    tiled = model()
    tile(tiled)
    assert [node.op_type for node in tiled.graph.node] == ["Expand", "Scan", "ReduceSum", "Add"]
    assert not set(tiled.graph.node[0].output) & set(tiled.graph.node[1].input)
    (body,) = (entry.g for entry in tiled.graph.node[1].attribute if entry.name == "body")
    assert [node.op_type for node in body.node] == ["MatMul", "Mul", "Add", "Sqrt"]


@pytest.mark.parametrize("shape", [(4,), ("groups", ROWS, COLUMNS)])
def test_graph_without_stacks_is_unchanged(shape: tuple[int | str, ...]) -> None:
    """No input has three fixed axes."""
    vector = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "ab"]
    graph = helper.make_graph([helper.make_node("Sqrt", ["a"], ["b"])], "root", vector[:1], vector[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    before = made.SerializeToString(deterministic=True)
    tile(made)
    assert made.SerializeToString(deterministic=True) == before


@given(st.integers(1, 512), st.integers(1, 100_000))
def test_tiles_divide_the_rows_and_fit_the_cache(rows: int, columns: int) -> None:
    """A tile is as high as possible; a single row may be too long."""
    height = tile_rows(rows, columns)
    assert rows % height == 0
    assert height == 1 or height * columns <= TILE_ELEMENTS
    assert all(rows % higher or higher * columns > TILE_ELEMENTS for higher in range(height + 1, rows + 1))
