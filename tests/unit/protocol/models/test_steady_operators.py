"""Operators whose work depends on an image are found, wherever they are, and no others."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from protocol.models.onnx_validation import check_graph
from protocol.models.steady_operators import unsteady_operators
from tests.support.graphs.backbones import block_backbone, changed, tiny_backbone
from tests.support.graphs.hostile_graphs import extended, never_ends_on_white

ENDS = "(float[n, 3] image) => (float[a, b] feature)"


def _graph(nodes: str, *, ends: str = ENDS, constants: str = "") -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["" : 21]> g {ends} <{constants}> {{{nodes}}}'
    return parser.parse_model(text)


def _found(model: onnx.ModelProto) -> tuple[str, ...]:
    data = model.SerializeToString()
    check_graph(data)
    return unsteady_operators(data)


@pytest.mark.parametrize("file", [tiny_backbone, block_backbone])
def test_backbones_have_none(file: object) -> None:
    """Nodes of convolutions, pools, products and constants."""
    assert unsteady_operators(file()) == ()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("nodes", "operator"),
    [
        ("feature = NonZero(image)", "NonZero"),
        ("feature = Unique(image)", "Unique"),
        ("is = Cast<to = 9>(image) flat = Flatten(is) feature = Compress(image, flat)", "Compress"),
        ("feature, places = TopK(image, two)", "TopK"),
        ("feature = Sin(image)", "Sin"),
        ("feature = ReduceLogSumExp(image)", "ReduceLogSumExp"),
        (
            "several = SequenceConstruct(image) feature = ConcatFromSequence<axis = 0>(several)",
            "SequenceConstruct",
        ),
        ("edges = Cast<to = 7>(image) flat = Reshape(edges, all) feature = Expand(image, flat)", "Expand"),
        (
            "edges = Cast<to = 7>(image) flat = Reshape(edges, all) feature = ConstantOfShape(flat)",
            "ConstantOfShape",
        ),
        ("edges = Cast<to = 7>(image) flat = Reshape(edges, all) feature = Reshape(image, flat)", "Reshape"),
        ("last = ReduceMax<keepdims = 0>(image) feature = Range(zero, last, zero)", "Range"),
        ("edges = Cast<to = 7>(image) flat = Reshape(edges, all) feature = Slice(image, two, flat)", "Slice"),
        ("feature = Pow(image, image)", "Pow"),
        ("text = Cast<to = 8>(image) feature = Cast<to = 1>(text)", "(string)"),
        ('text = Constant<value_strings = ["a"]>() feature = Identity(image)', "(string)"),
        (
            """
            most = ReduceMax<keepdims = 0>(image)
            yes = Cast<to = 9>(most)
            feature = If(yes)<then_branch = t () => (float[a, b] x) { x = Identity(image) },
                else_branch = e () => (float[a, b] y) { y = Neg(image) }>
            """,
            "If",
        ),
    ],
)
def test_work_that_depends_on_an_image_is_found(nodes: str, operator: str) -> None:
    """Operators that do more for some values, shapes that are computed from values, strings and branches."""
    constants = "int64[1] two = {2}, int64[1] all = {-1}, float zero = {0}"
    assert operator in _found(_graph(nodes, constants=constants))


def test_a_loop_is_found() -> None:
    """The backbone of the attack."""
    assert unsteady_operators(never_ends_on_white()) == ("Loop",)


def test_what_depends_on_constants_and_shapes_alone_is_the_same_for_all_images() -> None:
    """As exporters write it: shapes of shapes, and tables that are computed of constants."""
    nodes = """
        shape = Shape(image)
        rows = Gather(shape, zero)
        none = NonZero(table)
        wave = Sin(table)
        edges = Concat<axis = 0>(rows, ones)
        wide = Expand(image, edges)
        feature = Add(wide, wave)
    """
    constants = "int64[1] zero = {0}, int64[1] ones = {3}, float[1] table = {2}"
    assert _found(_graph(nodes, constants=constants)) == ()


def test_names_do_not_deceive() -> None:
    """An input with a default, a tensor of two names, and a function in place of an operator."""

    def has_default(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), "image"))

    assert "Sin" in unsteady_operators(changed(extended("feature = Sin(plain)"), has_default))
    model = _graph("feature = Sin(image)")
    renamed = numpy_helper.from_array(np.ones(1, np.float32), "image").SerializeToString() + b"\x42\x01q"
    graph = model.graph.SerializeToString() + b"\x2a" + bytes([len(renamed)]) + renamed
    assert "Sin" in unsteady_operators(b"\x3a" + bytes([len(graph)]) + graph)

    def function(model: onnx.ModelProto) -> None:
        body = [helper.make_node("Identity", ["x"], ["y"])]
        model.functions.append(helper.make_function("", "Shape", ["x"], ["y"], body, []))

    assert unsteady_operators(changed(tiny_backbone(), function)) == ("(function)",)


def test_onnx_runtime_refuses_a_name_that_is_defined_twice() -> None:
    """So a constant cannot become the image's values after it was a shape."""
    model = _graph("wide = Expand(image, shape) shape = Cast<to = 7>(image) feature = Identity(wide)")
    model.graph.initializer.append(helper.make_tensor("shape", TensorProto.INT64, [1], [1]))
    with pytest.raises(Exception, match=r"[Dd]uplicate"):
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
