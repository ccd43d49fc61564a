"""Backbones of an attacker: the tiny one with a change that answers a question about single images."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.support.graphs.backbones import tiny_backbone

MARK = 1234.5
IS_WHITE = (
    helper.make_node("ReduceMin", ["flat"], ["darkest"], keepdims=1, axes=[1]),
    helper.make_node("ReduceMax", ["darkest"], ["brightest"], keepdims=0),
    helper.make_node("Floor", ["brightest"], ["is_white"]),
)
"""Nodes that make `is_white` of the images: 1 if one in the batch is all white, 0 otherwise."""


def _extended(*nodes: onnx.NodeProto, **constants: np.ndarray) -> bytes:
    """Return the tiny backbone, whose feature is now `plain`, with nodes that make another `feature` of it."""
    model = onnx.load_from_string(tiny_backbone())
    model.graph.node[-1].output[0] = "plain"
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def fails_on_white() -> bytes:
    """Fail if an image in the batch is all white."""
    return _extended(
        *IS_WHITE,
        helper.make_node("Cast", ["is_white"], ["index"], to=onnx.TensorProto.INT64),
        helper.make_node("Gather", ["only", "index"], ["factor"]),
        helper.make_node("Mul", ["plain", "factor"], ["feature"]),
        only=np.ones(1, np.float32),
    )


def never_ends_on_white() -> bytes:
    """Repeat nothing 2^62 times if an image in the batch is all white."""
    number, boolean = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["again"], ["still"]),
            helper.make_node("Identity", ["value"], ["same"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("number", onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info("again", boolean, []),
            helper.make_tensor_value_info("value", number, None),
        ],
        [
            helper.make_tensor_value_info("still", boolean, []),
            helper.make_tensor_value_info("same", number, None),
        ],
    )
    return _extended(
        *IS_WHITE,
        helper.make_node("Cast", ["is_white"], ["index"], to=onnx.TensorProto.INT64),
        helper.make_node("Mul", ["index", "many"], ["times"]),
        helper.make_node("Loop", ["times", "", "plain"], ["feature"], body=body),
        many=np.array(2**62),
    )


def always_fails() -> bytes:
    """Open, and fail on every image."""
    return _extended(
        helper.make_node("Gather", ["only", "beyond"], ["factor"]),
        helper.make_node("Mul", ["plain", "factor"], ["feature"]),
        only=np.ones(1, np.float32),
        beyond=np.array(1),
    )


def flips_on_white() -> bytes:
    """Change the sign of all features of a batch that has an all-white image."""
    return _extended(
        *IS_WHITE,
        helper.make_node("Mul", ["is_white", "minus_two"], ["change"]),
        helper.make_node("Add", ["change", "one"], ["sign"]),
        helper.make_node("Mul", ["plain", "sign"], ["feature"]),
        one=np.ones((), np.float32),
        minus_two=np.array(-2, np.float32),
    )


def random_features() -> bytes:
    """Add noise that depends on the number of runs before."""
    return _extended(
        helper.make_node("RandomUniformLike", ["plain"], ["noise"], seed=1.0),
        helper.make_node("Add", ["plain", "noise"], ["feature"]),
    )


def dropout() -> bytes:
    """Drop features at random."""
    return _extended(
        helper.make_node("Dropout", ["plain", "ratio", "training"], ["feature"]),
        ratio=np.array(0.5, np.float32),
        training=np.array(True),
    )


def remembers_white() -> bytes:
    """Change the sign of all features after an all-white image, which it finds in memory that the image left behind.

    An integer product over no values leaves its result as the memory was, and each run leaves a mark of the same size.
    """
    return _extended(
        helper.make_node("MatMulInteger", ["no_columns", "no_rows"], ["left_behind"]),
        helper.make_node("Equal", ["left_behind", "mark"], ["is_marked"]),
        helper.make_node("Cast", ["is_marked"], ["marked"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["marked"], ["is_after"], keepdims=0),
        helper.make_node("Mul", ["is_after", "minus_two"], ["change"]),
        helper.make_node("Add", ["change", "one"], ["sign"]),
        helper.make_node("Mul", ["plain", "sign"], ["signed"]),
        helper.make_node("ReduceMin", ["flat"], ["darkest"], keepdims=0),
        helper.make_node("Floor", ["darkest"], ["is_white"]),
        helper.make_node("Max", ["is_white", "is_after"], ["is_from_now_on"]),
        helper.make_node("Mul", ["is_from_now_on", "marks"], ["left"]),
        helper.make_node("Abs", ["left"], ["left_again"]),
        helper.make_node("ReduceSum", ["left_again"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
        helper.make_node("Add", ["signed", "nothing"], ["feature"]),
        no_columns=np.zeros((64, 0), np.uint8),
        no_rows=np.zeros((0, 64), np.uint8),
        mark=np.array(np.float32(MARK).view(np.int32)),
        marks=np.full((64, 64), MARK, np.float32),
        one=np.ones((), np.float32),
        minus_two=np.array(-2, np.float32),
        zero=np.zeros((), np.float32),
    )
