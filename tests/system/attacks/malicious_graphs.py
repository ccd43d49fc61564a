"""ONNX graphs that no device may run, or not to their end: each is a valid one with a change."""

import functools
import itertools
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


def sparse_tensor(model: onnx.ModelProto) -> None:
    """Declare terabytes of zeros in a few bytes."""
    values, indices = (
        numpy_helper.from_array(array, name)
        for array, name in ((np.ones(1, np.float32), "sparse"), (np.zeros(1, np.int64), "places"))
    )
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2**40]))


def declared_tensor(model: onnx.ModelProto) -> None:
    """Declare a tensor of terabytes without its values."""
    model.graph.initializer.add(name="declared", data_type=TensorProto.FLOAT, dims=[2**20, 2**20])


def _add_to_input(model: onnx.ModelProto, nodes: list[onnx.NodeProto], **constants: object) -> None:
    """Prepend nodes and add their output `extra` to the first float32 tensor: a head's input, a backbone's pixels."""
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    kept = list(model.graph.node)
    if kept[0].op_type == "Cast":
        nodes = [*nodes, kept.pop(0)]
    first = nodes[-1].output[0] if nodes[-1].op_type == "Cast" else kept[0].input[0]
    kept[0].input[0] = "changed"
    del model.graph.node[:]
    model.graph.node.extend([*nodes, make_node("Add", [first, "extra"], ["changed"]), *kept])


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
    _add_to_input(model, nodes, size=size, turns=np.int64(2**62), go_on=np.True_, one_i=one)


def huge_constant(model: onnx.ModelProto) -> None:
    """Allocate terabytes before the result."""
    nodes = [
        make_node("ConstantOfShape", ["size"], ["held"]),
        make_node("ReduceMax", ["held"], ["extra"], keepdims=1),
    ]
    _add_to_input(model, nodes, size=np.array([2**40]))


def huge_tile(model: onnx.ModelProto) -> None:
    """Repeat the input until it fills twenty gigabytes."""
    nodes = [
        make_node("Tile", ["feature", "repeats"], ["wide"]),
        make_node("ReduceMax", ["wide"], ["extra"], keepdims=1, axes=[1]),
    ]
    _add_to_input(model, nodes, repeats=np.array([1, 2**28]))


def constant_products(model: onnx.ModelProto) -> None:
    """Multiply constant matrices for minutes, which ONNX Runtime would do while it loads the file."""
    names = [f"product_{number}" for number in range(200)]
    nodes = [make_node("ConstantOfShape", ["edges"], names[:1])]
    nodes += [make_node("MatMul", [names[0], first], [second]) for first, second in itertools.pairwise(names)]
    nodes.append(make_node("ReduceMax", names[-1:], ["extra"], keepdims=0))
    _add_to_input(model, nodes, edges=np.array([1500, 1500]))


REFUSED: dict[Change, str] = {
    external_data: "other files",
    custom_domain: "ONNX's own operators alone",
    custom_domain_in_function: "ONNX's own operators alone",
    sparse_tensor: "expected dense tensors",
    declared_tensor: "expected tensors of at most",
}
FAILING: tuple[Change, ...] = (huge_constant, huge_tile)
"""Changes that ask for more memory than there is."""

ENDLESS: tuple[Change, ...] = (infinite_loop, constant_products)
"""Changes that take longer than any limit."""
