"""ONNX graphs that no device may run, or not to their end: each is a valid one with a change."""

import functools
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node

Change = Callable[[onnx.ModelProto], None]


def external_data(model: onnx.ModelProto) -> None:
    """Read a tensor's values from another file: the device's private key."""
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../signing.key")


def custom_domain(model: onnx.ModelProto) -> None:
    """Use an operator of another domain than ONNX's."""
    model.graph.node.append(make_node("Run", ["feature"], ["unused"], domain="evil"))
    model.opset_import.append(helper.make_opsetid("evil", 1))


def custom_domain_in_function(model: onnx.ModelProto) -> None:
    """Use one only within a function's body."""
    body = [make_node("Run", ["x"], ["y"], domain="evil")]
    model.functions.append(helper.make_function("", "Innocent", ["x"], ["y"], body, []))


def _add_to_feature(model: onnx.ModelProto, nodes: list[onnx.NodeProto], **constants: object) -> None:
    """Prepend nodes and add their output `extra` to the input `feature`."""
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    kept = list(model.graph.node)
    kept[0].input[0] = "changed_feature"
    del model.graph.node[:]
    model.graph.node.extend([*nodes, make_node("Add", ["feature", "extra"], ["changed_feature"]), *kept])


def infinite_loop(model: onnx.ModelProto, *, held_bytes: int = 0) -> None:
    """Loop forever before the result, with memory held."""
    scalar = functools.partial(helper.make_tensor_value_info, shape=[])
    vector = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=[1])
    body = helper.make_graph(
        [make_node("Identity", ["go"], ["go_next"]), make_node("Add", ["x", "one_i"], ["x_next"])],
        "body",
        [scalar("turn", TensorProto.INT64), scalar("go", TensorProto.BOOL), vector("x")],
        [scalar("go_next", TensorProto.BOOL), vector("x_next")],
    )
    nodes = [
        make_node("ConstantOfShape", ["size"], ["held"]),
        make_node("ReduceMax", ["held"], ["start"], keepdims=1),
        make_node("Loop", ["turns", "go_on", "start"], ["counted"], body=body),
        make_node("ReduceMax", ["held"], ["again"], keepdims=1),
        make_node("Add", ["counted", "again"], ["extra"]),
    ]
    size, one = np.array([max(1, held_bytes // 4)]), np.ones(1, np.float32)
    _add_to_feature(model, nodes, size=size, turns=np.int64(2**62), go_on=np.True_, one_i=one)


def huge_constant(model: onnx.ModelProto) -> None:
    """Allocate terabytes before the result."""
    nodes = [
        make_node("ConstantOfShape", ["size"], ["held"]),
        make_node("ReduceMax", ["held"], ["extra"], keepdims=1),
    ]
    _add_to_feature(model, nodes, size=np.array([2**40]))


def huge_tile(model: onnx.ModelProto) -> None:
    """Repeat the input until it fills twenty gigabytes."""
    nodes = [
        make_node("Tile", ["feature", "repeats"], ["wide"]),
        make_node("ReduceMax", ["wide"], ["extra"], keepdims=1, axes=[1]),
    ]
    _add_to_feature(model, nodes, repeats=np.array([1, 2**28]))


REFUSED: dict[Change, str] = {
    external_data: "other files",
    custom_domain: "ONNX's own operators alone",
    custom_domain_in_function: "ONNX's own operators alone",
}
EXHAUSTING: dict[Change, str] = {
    huge_constant: "fails on its inputs",
    huge_tile: "fails on its inputs",
    infinite_loop: "exceeded the time limit of",
}
"""Changes, and words of the problem that the device reports."""


def changed(file: bytes, change: Change) -> bytes:
    model = onnx.load_model_from_string(file)
    change(model)
    return bytes(model.SerializeToString())
