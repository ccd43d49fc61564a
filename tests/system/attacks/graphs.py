"""ONNX graphs that no device may run, or not to their end: each a good one with a change."""

import functools
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Spoil = Callable[[onnx.ModelProto], None]


def external_data(model: onnx.ModelProto) -> None:
    """Keep a tensor's values in another file: the device's private key."""
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../signing.key")


def own_domain(model: onnx.ModelProto) -> None:
    """Use an operator of another domain than ONNX's."""
    model.graph.node.append(helper.make_node("Run", ["feature"], ["unused"], domain="evil"))
    model.opset_import.append(helper.make_opsetid("evil", 1))


def hidden_domain(model: onnx.ModelProto) -> None:
    """Use one within a function's body alone."""
    body = [helper.make_node("Run", ["x"], ["y"], domain="evil")]
    model.functions.append(helper.make_function("", "Innocent", ["x"], ["y"], body, []))


def endless(model: onnx.ModelProto, *, held_bytes: int = 0) -> None:
    """Loop for ever before the result, with much memory held."""
    scalar = functools.partial(helper.make_tensor_value_info, shape=[])
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["x", "one_i"], ["x_next"])],
        "turn",
        [
            scalar("turn", TensorProto.INT64),
            scalar("go", TensorProto.BOOL),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]),
        ],
        [scalar("on", TensorProto.BOOL), helper.make_tensor_value_info("x_next", TensorProto.FLOAT, [1])],
    )
    first = np.array([max(1, held_bytes // 4)], dtype=np.int64)
    before = [
        helper.make_node("ConstantOfShape", ["size"], ["held"]),
        helper.make_node("ReduceMax", ["held"], ["start"], keepdims=1),
        helper.make_node("Loop", ["turns", "go_on", "start"], ["counted"], body=body),
        helper.make_node("ReduceMax", ["held"], ["again"], keepdims=1),
        helper.make_node("Add", ["counted", "again"], ["late"]),
        helper.make_node("Add", ["feature", "late"], ["feature_late"]),
    ]
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(first, "size"),
            helper.make_tensor("turns", TensorProto.INT64, [], [2**62]),
            helper.make_tensor("go_on", TensorProto.BOOL, [], [True]),
            numpy_helper.from_array(np.ones(1, np.float32), "one_i"),
        ]
    )
    model.graph.node[0].input[0] = "feature_late"
    kept = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*before, *kept])


def huge(model: onnx.ModelProto) -> None:
    """Allocate terabytes before the result."""
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**40], dtype=np.int64), "size"))
    kept = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(
        [
            helper.make_node("ConstantOfShape", ["size"], ["held"]),
            helper.make_node("ReduceMax", ["held"], ["most"], keepdims=1),
            helper.make_node("Add", ["feature", "most"], ["feature_late"]),
            *kept,
        ]
    )
    kept[0].input[0] = "feature_late"


def tiled(model: onnx.ModelProto) -> None:
    """Repeat the input until it fills twenty gigabytes."""
    repeats = np.array([1, 2**28], dtype=np.int64)
    model.graph.initializer.append(numpy_helper.from_array(repeats, "repeats"))
    kept = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(
        [
            helper.make_node("Tile", ["feature", "repeats"], ["wide"]),
            helper.make_node("ReduceMax", ["wide"], ["most"], keepdims=1, axes=[1]),
            helper.make_node("Add", ["feature", "most"], ["feature_late"]),
            *kept,
        ]
    )
    kept[0].input[0] = "feature_late"


REFUSED: dict[Spoil, str] = {
    external_data: "other files",
    own_domain: "ONNX's own operators alone",
    hidden_domain: "ONNX's own operators alone",
}
EXHAUSTING: dict[Spoil, str] = {
    huge: "fails on its inputs",
    tiled: "fails on its inputs",
    endless: "exceeded the time limit of",
}


def spoilt(file: bytes, spoil: Spoil) -> bytes:
    """Return an ONNX file with a change."""
    model = onnx.load_model_from_string(file)
    spoil(model)
    return bytes(model.SerializeToString())
