"""Graphs from the network: opened, refused, and bound to tensors."""

import contextlib
import itertools
import resource
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from edge_client.graphs.onnx_model import Tensors, fit, open_model
from edge_client.graphs.program_graph import Role, open_graph
from protocol.errors import GraphRefused
from protocol.models.onnx_validation import MAX_DEPTH, MAX_FIELDS, MAX_GRAPH_BYTES, check_graph
from protocol.models.slots import Slot
from tests.support.graphs.step_graphs import file, model, opened, round_tensors

ROLES: tuple[Role, ...] = ("init", "step", "project", "head")
WHOLE = file("step")


Change = Callable[[onnx.ModelProto], object]

OUTSIDE = numpy_helper.from_array(np.zeros(3, np.float32), "outside")
OUTSIDE.data_location = TensorProto.EXTERNAL


def in_attribute(kind: AttributeProto.AttributeType, field: str, value: object) -> AttributeProto:
    attribute = AttributeProto(name="held", type=kind)
    holder = getattr(attribute, field)
    holder.append(value) if hasattr(holder, "append") else holder.CopyFrom(value)
    return attribute


def in_node(kind: AttributeProto.AttributeType, field: str, value: object) -> Change:
    """Put a value into an attribute of the graph's first node."""
    return lambda made: made.graph.node[0].attribute.append(in_attribute(kind, field, value))


def in_function(domain: str, *, nodes: Sequence[onnx.NodeProto] = (), opset: str = "") -> Change:
    """Add a function to the model."""
    opsets = [helper.make_opsetid(opset, 17)]
    return lambda made: made.functions.append(
        helper.make_function(domain, "Own", [], ["y"], list(nodes), opsets)
    )


def subgraph(*, nodes: Sequence[onnx.NodeProto] = (), tensors: Sequence[TensorProto] = ()) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "inner", [], [], list(tensors))


def check_refused(change: Change, *, match: str) -> None:
    """Check that a graph is refused after a change."""
    made = model("step")
    change(made)
    with pytest.raises(GraphRefused, match=match):
        check_graph(made.SerializeToString())


FOREIGN = helper.make_node("Custom", [], ["y"], domain="com.microsoft")
DOMAINS: dict[str, Change] = {
    "opset": lambda made: made.opset_import.append(helper.make_opsetid("com.microsoft", 1)),
    "node": lambda made: made.graph.node.append(FOREIGN),
    "subgraph": in_node(AttributeProto.GRAPH, "g", subgraph(nodes=[FOREIGN])),
    "subgraphs": in_node(AttributeProto.GRAPHS, "graphs", subgraph(nodes=[FOREIGN])),
    "function's node": in_function("", nodes=[FOREIGN]),
    "function's opset": in_function("", opset="com.microsoft"),
    "function": in_function("my.own"),
    "training": lambda made: made.training_info.add().algorithm.node.append(FOREIGN),
    "machine learning": lambda made: made.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3)),
}


def test_step_of_an_earlier_version_takes_features_of_any_length() -> None:
    earlier = model("step")
    earlier.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "length"
    assert open_graph(earlier.SerializeToString(), role="step").model.inputs["feature"].shape == (None, None)


@pytest.mark.parametrize("place", DOMAINS)
def test_foreign_operators_are_refused_everywhere(place: str) -> None:
    check_refused(DOMAINS[place], match="ONNX's own operators")


def test_onnx_domain_by_name_is_accepted() -> None:
    made = model("step")
    made.opset_import[0].domain = "ai.onnx"
    check_graph(made.SerializeToString())


IN_TENSOR = in_attribute(AttributeProto.TENSOR, "t", OUTSIDE)
EXTERNAL: dict[str, Change] = {
    "initializer": lambda made: made.graph.initializer.append(OUTSIDE),
    "attribute": in_node(AttributeProto.TENSOR, "t", OUTSIDE),
    "attributes": in_node(AttributeProto.TENSORS, "tensors", OUTSIDE),
    "subgraph": in_node(AttributeProto.GRAPH, "g", subgraph(tensors=[OUTSIDE])),
    "function": lambda made: made.functions.add().node.add().attribute.append(IN_TENSOR),
    "function's default": lambda made: made.functions.add().attribute_proto.append(IN_TENSOR),
    "entries alone": lambda made: made.graph.initializer.add().external_data.add(key="location", value="x"),
}


@pytest.mark.parametrize("place", EXTERNAL)
def test_tensors_in_other_files_are_refused_everywhere(place: str) -> None:
    check_refused(EXTERNAL[place], match="one file")


SPARSE = onnx.SparseTensorProto(dims=[2**40])
LARGE = TensorProto(data_type=TensorProto.INT64, dims=[2**12, 2**12])
EXPANDING: dict[str, Change] = {
    "sparse initializer": lambda made: made.graph.sparse_initializer.append(SPARSE),
    "sparse attribute": in_node(AttributeProto.SPARSE_TENSOR, "sparse_tensor", SPARSE),
    "sparse attributes": in_node(AttributeProto.SPARSE_TENSORS, "sparse_tensors", SPARSE),
    "initializer": lambda made: made.graph.initializer.append(LARGE),
    "attribute": in_node(AttributeProto.TENSOR, "t", LARGE),
    "several": lambda made: made.graph.initializer.extend(
        TensorProto(data_type=TensorProto.FLOAT, dims=[2**11, 2**11]) for _ in range(5)
    ),
}


@pytest.mark.parametrize("place", EXPANDING)
def test_tensors_larger_than_a_file_may_be_are_refused_everywhere(place: str) -> None:
    """A few bytes of a file can declare any number of values: the memory of all tensors together is bounded."""
    check_refused(EXPANDING[place], match=r"expected (dense )?tensors")


def constants(graph: onnx.ModelProto, *, products: int) -> bytes:
    """Return a graph that multiplies constant matrices of 48 MB each, before it reads any input."""
    names = [f"held_{number}" for number in range(products + 1)]
    nodes = [helper.make_node("ConstantOfShape", ["edges"], names[:1])]
    nodes += [
        helper.make_node("MatMul", [first, names[0]], [second]) for first, second in itertools.pairwise(names)
    ]
    graph.graph.node.extend(nodes)
    graph.graph.output.append(helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, None))
    graph.graph.initializer.append(numpy_helper.from_array(np.array([3500, 3500]), "edges"))
    return bytes(graph.SerializeToString())


def test_no_operator_runs_while_a_graph_is_loaded() -> None:
    """ONNX Runtime would compute constants then, where the time limit of runs does not apply."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opened = open_model(constants(model("head"), products=40), name="head")
    assert "held_40" in opened.outputs
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000


def test_overwritten_field_counts() -> None:
    """Protobuf merges a field that comes twice; a foreign domain is found in either."""
    node = b"\x3a\x03bad\x3a\x00"  # domain "bad", then domain ""
    graph = b"\x0a" + bytes([len(node)]) + node
    with pytest.raises(GraphRefused, match="'bad'"):
        check_graph(WHOLE + b"\x3a" + bytes([len(graph)]) + graph)


def test_every_prefix_of_a_graph_is_refused() -> None:
    for length in range(len(WHOLE)):
        with pytest.raises(GraphRefused):
            open_graph(WHOLE[:length], role="step")


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_damaged_graph_is_opened_or_refused(place: int, byte: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[place] = byte
    with contextlib.suppress(GraphRefused):
        open_graph(bytes(damaged), role="step")


def test_name_that_is_not_utf8_is_refused() -> None:
    """ONNX Runtime loads such a graph, and fails only when asked for its names."""
    made = WHOLE.replace(b"\x12\x01n", b"\x12\x01\x80", 1)
    assert made != WHOLE
    with pytest.raises(GraphRefused, match="cannot load"):
        open_graph(made, role="step")


NO_FILE = "expected an ONNX file"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (WHOLE + b"\x3b\x00\x3c", NO_FILE),  # a group, which protobuf has given up
        (
            WHOLE + b"\xba\x80\x80\x80\x10\x00",
            NO_FILE,
        ),  # a number beyond 32 bits: readers keep the lower ones
        (WHOLE + b"\x08" + b"\xff" * 10 + b"\x01", NO_FILE),  # an integer without an end
        (WHOLE + b"\x00\x00", NO_FILE),  # field number 0
        (WHOLE + b"\x3a\xff\xff\xff\xff\x0f", NO_FILE),  # longer than everything
        (b"\x08\x00" * (MAX_FIELDS + 1), "at most 262144 fields"),
        (b"\x72\x22" + b"\x08\x00" * 17, "at most 16 fields"),
        (bytes(MAX_GRAPH_BYTES + 1), "at most 67108864 bytes, got 67108865"),
    ],
    ids=["group", "field number", "endless integer", "field 0", "length", "fields", "opset's fields", "size"],
)
def test_ambiguous_and_too_large_encodings_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(GraphRefused, match=reason):
        check_graph(data)


def test_validation_takes_less_memory_than_the_file() -> None:
    """The file has thousands of empty messages, side by side or nested."""
    inner = b""
    while len(inner) < 2**15:
        for tag in (0x32, 0x2A, 0x0A):
            inner = bytes([tag]) + _length(inner) + inner
        if len(inner) > 2**10:
            inner = b"\x3a" + _length(inner * 2) + inner * 2
    for data in (b"\x3a\x00" * 2**15, b"\x72\x00" * 2**15, inner):
        tracemalloc.start()
        try:
            with contextlib.suppress(GraphRefused):
                check_graph(data)
            assert tracemalloc.get_traced_memory()[1] < len(data)
        finally:
            tracemalloc.stop()


def test_nesting_is_limited_to_protobufs_depth() -> None:
    inner = b""
    for depth in range(1, MAX_DEPTH + 1):
        tag = (0x0A, 0x32, 0x2A)[depth % 3] if depth < MAX_DEPTH else 0x3A
        if depth == MAX_DEPTH - 1:
            check_graph(b"\x3a" + _length(inner) + inner)
        inner = bytes([tag]) + _length(inner) + inner
    with pytest.raises(GraphRefused, match="nested at most 100 deep"):
        check_graph(inner)


def _length(data: bytes) -> bytes:
    size, written = len(data), bytearray()
    while size > 0x7F:
        written.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*written, size])


def _absolute(output: str, *, of: str = "feature", more: str = "") -> str:
    return f"g (float[n, 4] feature{more}) => (float[n, 4] {output}) {{ {output} = Abs({of}) }}"


@pytest.mark.parametrize(
    ("role", "options", "reason"),
    [
        ("step", {"runtime_min": "99.1"}, r"needs ONNX Runtime 99\.1 or newer, here is"),
        (
            "step",
            {"feature_size": 5},
            r"must take feature float32 \(any, 5\), and takes feature float32 \(any, 4\)",
        ),
        ("head", {"body": _absolute("projection")}, "a head graph does not give projection"),
        ("project", {"body": _absolute("logits")}, "a project graph does not give logits"),
        ("step", {"body": _absolute("weight")}, "a step graph does not give"),
        ("init", {"body": _absolute("y", more=", string[n] name")}, "is of tensor"),
        ("init", {"body": _absolute("y", of="unheard_of")}, "cannot load"),
        ("init", {"body": _absolute("y" * 70_000)}, "names of at most 128 characters, got one of 70000"),
    ],
)
def test_unsuitable_graph_is_refused(role: Role, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(GraphRefused, match=reason):
        opened(role, **options)


def test_failing_graph_is_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime prints nothing by itself."""
    body = """p (float[n, 4] feature, float[m, 2] mean) => (float[n, 6] projection)
        { projection = Concat<axis = 1>(feature, mean) }"""
    graph = opened("project", body=body)
    with pytest.raises(GraphRefused, match="the project graph fails") as caught:
        graph.model.run({"feature": np.zeros((2, 4), np.float32), "mean": np.zeros((3, 2), np.float32)})
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_tensors_are_bound_by_name() -> None:
    """Arrays are cast only if necessary, and missing ones are named."""
    weight, mean = np.zeros((4, 2), np.float32), np.zeros(4, np.float16)
    steps = np.zeros((), np.int64)
    state: Tensors = {"weight": weight, "velocity": weight, "mean": mean, "steps": steps}
    bound = opened("project").bind({"weight": weight, "mean": mean, "more": np.zeros(1)})
    assert set(bound) == {"weight", "mean"}
    assert bound["weight"] is weight
    assert bound["mean"].dtype == np.float32
    with pytest.raises(GraphRefused, match="asks for mean; there are weight, rate"):
        opened("project").bind({"weight": weight, "rate": mean})
    with pytest.raises(GraphRefused, match=r"'targets' must be float32 \(3, 2\), and is float16 \(2, 2\)"):
        opened("step").bind({**round_tensors(), **state, "targets": np.zeros((2, 2), np.float16)})


@pytest.mark.parametrize(
    ("array", "slot", "fits"),
    [
        (np.ones(2, np.uint32), Slot(np.dtype(np.int64), (None,)), True),
        (np.ones(2, np.uint32), Slot(np.dtype(np.float32), (2,)), True),
        (np.ones(2, np.float16), Slot(np.dtype(np.int64), (2,)), False),
        (np.ones((2, 1), np.float32), Slot(np.dtype(np.float32), (2,)), False),
        (np.ones((2, 3), np.float32).T, Slot(np.dtype(np.float32), (None, 2)), True),
        (np.frombuffer(b"x" + bytes(8), np.uint8)[1:].view("<f4"), Slot(np.dtype(np.float32), (2,)), True),
    ],
)
def test_fit_casts_within_the_kind_and_aligns(
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], slot: Slot, *, fits: bool
) -> None:
    """Integers become floats, never the other way round."""
    if not fits:
        with pytest.raises(GraphRefused, match="'x' must be"):
            fit("x", array, slot)
        return
    fitted = fit("x", array, slot)
    np.testing.assert_array_equal(fitted, array)
    assert fitted.dtype == slot.dtype
    assert fitted.flags.c_contiguous
    assert fitted.flags.aligned
