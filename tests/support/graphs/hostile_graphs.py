"""ONNX graphs of an attacker: valid ones with a change.

Backbones answer a question about single images. Other graphs may not be run by a device, or not to their end.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

from tests.support.graphs.backbones import tiny_backbone

MARK = 1234.5
IS_WHITE = """
    darkest = ReduceMin<keepdims = 1, axes = [1]>(flat)
    brightest = ReduceMax<keepdims = 0>(darkest)
    is_white = Floor(brightest)
"""
"""Nodes that make `is_white` of the images: 1 if one in the batch is all white, 0 otherwise."""


def _nodes(text: str) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph's text."""
    nodes: Sequence[onnx.NodeProto] = parser.parse_graph(f"g (float given) => (float made) {{{text}}}").node
    return nodes


def _add_constants(model: onnx.ModelProto, constants: dict[str, np.ndarray]) -> None:
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())


def extended(text: str, **constants: np.ndarray) -> bytes:
    """Return the tiny backbone, whose feature is now `plain`, with nodes that make another `feature` of it."""
    model = onnx.load_from_string(tiny_backbone())
    model.graph.node[-1].output[0] = "plain"
    model.graph.node.extend(_nodes(text))
    _add_constants(model, constants)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def fails_on_white() -> bytes:
    """Fail if an image in the batch is all white."""
    text = """
        index = Cast<to = 7>(is_white)
        factor = Gather(only, index)
        feature = Mul(plain, factor)
    """
    return extended(IS_WHITE + text, only=np.ones(1, np.float32))


def never_ends_on_white() -> bytes:
    """Repeat nothing 2^62 times if an image in the batch is all white."""
    text = """
        index = Cast<to = 7>(is_white)
        times = Mul(index, many)
        feature = Loop<body = repeat (int64 number, bool again, float[n, 16] value)
            => (bool still, float[n, 16] same) { still = Identity(again) same = Identity(value) }>(times, go_on, plain)
    """
    return extended(IS_WHITE + text, many=np.array(2**62), go_on=np.array(True))


def loops_on_white() -> bytes:
    """Repeat a short computation 20 times if an image in the batch is all white, and not at all otherwise."""
    text = """
        index = Cast<to = 7>(is_white)
        times = Mul(index, many)
        feature = Loop<body = repeat (int64 number, bool again, float[n, 16] value)
            => (bool still, float[n, 16] same) { still = Identity(again) same = Identity(value) }>(times, go_on, plain)
    """
    return extended(IS_WHITE + text, many=np.array(20), go_on=np.array(True))


def always_fails() -> bytes:
    """Open, and fail on every image."""
    text = "factor = Gather(only, beyond) feature = Mul(plain, factor)"
    return extended(text, only=np.ones(1, np.float32), beyond=np.array(1))


def flips_on_white() -> bytes:
    """Change the sign of all features of a batch that has an all-white image."""
    text = """
        change = Mul(is_white, minus_two)
        sign = Add(change, one)
        feature = Mul(plain, sign)
    """
    return extended(IS_WHITE + text, one=np.ones((), np.float32), minus_two=np.array(-2, np.float32))


def random_features() -> bytes:
    """Add noise that depends on the number of runs before."""
    return extended("noise = RandomUniformLike<seed = 1.0>(plain) feature = Add(plain, noise)")


def dropout() -> bytes:
    """Drop features at random."""
    text = "feature = Dropout(plain, ratio, training)"
    return extended(text, ratio=np.array(0.5, np.float32), training=np.array(True))


def remembers_white() -> bytes:
    """Change the sign of all features after an all-white image, which it finds in memory that the image left behind.

    An integer product over no values leaves its result as the memory was, and each run leaves a mark of the same size.
    """
    text = """
        left_behind = MatMulInteger(no_columns, no_rows)
        is_marked = Equal(left_behind, mark)
        marked = Cast<to = 1>(is_marked)
        is_after = ReduceMax<keepdims = 0>(marked)
        change = Mul(is_after, minus_two)
        sign = Add(change, one)
        signed = Mul(plain, sign)
        darkest = ReduceMin<keepdims = 0>(flat)
        is_white = Floor(darkest)
        is_from_now_on = Max(is_white, is_after)
        left = Mul(is_from_now_on, marks)
        left_again = Abs(left)
        sum = ReduceSum<keepdims = 0>(left_again)
        nothing = Mul(sum, zero)
        feature = Add(signed, nothing)
    """
    return extended(
        text,
        no_columns=np.zeros((64, 0), np.uint8),
        no_rows=np.zeros((0, 64), np.uint8),
        mark=np.array(np.float32(MARK).view(np.int32)),
        marks=np.full((64, 64), MARK, np.float32),
        one=np.ones((), np.float32),
        minus_two=np.array(-2, np.float32),
        zero=np.zeros((), np.float32),
    )


Change = Callable[[onnx.ModelProto], None]


def external_data(model: onnx.ModelProto) -> None:
    """Read a tensor's values from another file: the device's private key."""
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../signing.key")


def custom_domain(model: onnx.ModelProto) -> None:
    """Use an operator of another domain than ONNX's."""
    model.graph.node.append(helper.make_node("Run", ["feature"], ["unused"], domain="evil"))
    model.opset_import.append(helper.make_opsetid("evil", 1))


def custom_domain_in_function(model: onnx.ModelProto) -> None:
    """Use one only within a function's body."""
    body = [helper.make_node("Run", ["x"], ["y"], domain="evil")]
    model.functions.append(helper.make_function("", "Innocent", ["x"], ["y"], body, []))


def sparse_tensor(model: onnx.ModelProto) -> None:
    """Declare terabytes of zeros in a few bytes."""
    values = numpy_helper.from_array(np.ones(1, np.float32), "sparse")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2**40]))


def declared_tensor(model: onnx.ModelProto) -> None:
    """Declare a tensor of terabytes without its values."""
    model.graph.initializer.add(name="declared", data_type=TensorProto.FLOAT, dims=[2**20, 2**20])


def _add_to_input(model: onnx.ModelProto, text: str, **constants: np.ndarray) -> None:
    """Prepend nodes and add their output `extra` to the first float32 tensor: a head's input, a backbone's pixels."""
    _add_constants(model, constants)
    nodes, kept = list(_nodes(text)), list(model.graph.node)
    if kept[0].op_type == "Cast":
        nodes.append(kept.pop(0))
    first = nodes[-1].output[0] if nodes[-1].op_type == "Cast" else kept[0].input[0]
    kept[0].input[0] = "changed"
    del model.graph.node[:]
    model.graph.node.extend([*nodes, helper.make_node("Add", [first, "extra"], ["changed"]), *kept])


def infinite_loop(model: onnx.ModelProto, *, held_bytes: int = 0) -> None:
    """Loop forever before the result, with memory held."""
    text = """
        held = ConstantOfShape(size)
        start = ReduceMax<keepdims = 1>(held)
        counted = Loop<body = repeat (int64 turn, bool go, float[1] x)
            => (bool go_next, float[1] x_next) { go_next = Identity(go) x_next = Add(x, one_i) }>(turns, go_on, start)
        again = ReduceMax<keepdims = 1>(held)
        extra = Add(counted, again)
    """
    size, one = np.array([max(1, held_bytes // 4)]), np.ones(1, np.float32)
    _add_to_input(model, text, size=size, turns=np.array(2**62), go_on=np.array(True), one_i=one)


def huge_constant(model: onnx.ModelProto) -> None:
    """Allocate terabytes before the result."""
    text = "held = ConstantOfShape(size) extra = ReduceMax<keepdims = 1>(held)"
    _add_to_input(model, text, size=np.array([2**40]))


def huge_tile(model: onnx.ModelProto) -> None:
    """Repeat the input until it fills twenty gigabytes."""
    text = "wide = Tile(feature, repeats) extra = ReduceMax<keepdims = 1, axes = [1]>(wide)"
    _add_to_input(model, text, repeats=np.array([1, 2**28]))


def constant_products(model: onnx.ModelProto) -> None:
    """Multiply constant matrices for minutes, which ONNX Runtime would do while it loads the file."""
    names = [f"product_{number}" for number in range(200)]
    products = [f"{second} = MatMul({names[0]}, {first})" for first, second in itertools.pairwise(names)]
    lines = [
        f"{names[0]} = ConstantOfShape(edges)",
        *products,
        f"extra = ReduceMax<keepdims = 0>({names[-1]})",
    ]
    _add_to_input(model, "\n".join(lines), edges=np.array([1500, 1500]))


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
