"""Graphs from the network: which are opened, which are refused, and what is bound to them."""

import contextlib
import tracemalloc
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from edge_client.runtime.onnx_model import Slot, fit
from edge_client.runtime.onnx_validation import MAX_DEPTH, MAX_FIELDS, MAX_GRAPH_BYTES, check_graph
from edge_client.runtime.program_graph import Role, open_graph
from protocol.errors import GraphRefused
from tests.support.step_graphs import file, model, opened, round_tensors

ROLES: tuple[Role, ...] = ("init", "step", "project", "head")
WHOLE = file("step")


def outside() -> TensorProto:
    """A tensor that lies in another file."""
    tensor = numpy_helper.from_array(np.zeros(3, np.float32), "outside")
    tensor.data_location = TensorProto.EXTERNAL
    return tensor


def in_attribute(kind: AttributeProto.AttributeType, field: str, value: object) -> AttributeProto:
    """An attribute that holds something."""
    attribute = AttributeProto(name="held", type=kind)
    holder = getattr(attribute, field)
    holder.append(value) if hasattr(holder, "append") else holder.CopyFrom(value)
    return attribute


def subgraph(
    *, nodes: tuple[onnx.NodeProto, ...] = (), tensors: tuple[TensorProto, ...] = ()
) -> onnx.GraphProto:
    """A graph for an attribute."""
    return helper.make_graph(list(nodes), "inner", [], [], list(tensors))


def test_graphs_of_every_role_open() -> None:
    for role in ROLES:
        assert opened(role).metadata.role == role
    step = opened("step")
    assert step.model.inputs["feature"] == Slot(np.dtype(np.float32), (None, 4))
    assert step.model.inputs["labels"] == Slot(np.dtype(np.int64), (None,))
    assert step.model.inputs["steps"] == Slot(np.dtype(np.int64), ())
    assert list(step.model.outputs) == ["loss", "next_weight", "next_velocity", "next_steps"]


FOREIGN = helper.make_node("Custom", [], ["y"], domain="com.microsoft")
DOMAINS: dict[str, Callable[[onnx.ModelProto], object]] = {
    "opset": lambda made: made.opset_import.append(helper.make_opsetid("com.microsoft", 1)),
    "node": lambda made: made.graph.node.append(FOREIGN),
    "subgraph": lambda made: made.graph.node[0].attribute.append(
        in_attribute(AttributeProto.GRAPH, "g", subgraph(nodes=(FOREIGN,)))
    ),
    "subgraphs": lambda made: made.graph.node[0].attribute.append(
        in_attribute(AttributeProto.GRAPHS, "graphs", subgraph(nodes=(FOREIGN,)))
    ),
    "function's node": lambda made: made.functions.append(
        helper.make_function("", "Own", [], ["y"], [FOREIGN], [helper.make_opsetid("", 17)])
    ),
    "function's opset": lambda made: made.functions.append(
        helper.make_function("", "Own", [], ["y"], [], [helper.make_opsetid("com.microsoft", 1)])
    ),
    "function": lambda made: made.functions.append(
        helper.make_function("my.own", "Own", [], ["y"], [], [helper.make_opsetid("", 17)])
    ),
    "training": lambda made: made.training_info.add().algorithm.node.append(FOREIGN),
    "machine learning": lambda made: made.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3)),
}


@pytest.mark.parametrize("place", DOMAINS)
def test_foreign_operators_are_refused_everywhere(place: str) -> None:
    made = model("step")
    DOMAINS[place](made)
    with pytest.raises(GraphRefused, match="ONNX's own operators"):
        check_graph(made.SerializeToString())


def test_onnx_domain_by_name_is_accepted() -> None:
    made = model("step")
    made.opset_import[0].domain = "ai.onnx"
    check_graph(made.SerializeToString())


EXTERNAL: dict[str, Callable[[onnx.ModelProto], object]] = {
    "initializer": lambda made: made.graph.initializer.append(outside()),
    "attribute": lambda made: made.graph.node[0].attribute.append(
        in_attribute(AttributeProto.TENSOR, "t", outside())
    ),
    "attributes": lambda made: made.graph.node[0].attribute.append(
        in_attribute(AttributeProto.TENSORS, "tensors", outside())
    ),
    "sparse values": lambda made: made.graph.sparse_initializer.add().values.CopyFrom(outside()),
    "sparse indices": lambda made: made.graph.sparse_initializer.add().indices.CopyFrom(outside()),
    "sparse attribute": lambda made: made.graph.node[0].attribute.append(
        in_attribute(AttributeProto.SPARSE_TENSOR, "sparse_tensor", onnx.SparseTensorProto(values=outside()))
    ),
    "sparse attributes": lambda made: made.graph.node[0].attribute.append(
        in_attribute(
            AttributeProto.SPARSE_TENSORS, "sparse_tensors", onnx.SparseTensorProto(values=outside())
        )
    ),
    "subgraph": lambda made: made.graph.node[0].attribute.append(
        in_attribute(AttributeProto.GRAPH, "g", subgraph(tensors=(outside(),)))
    ),
    "function": lambda made: (
        made.functions.add().node.add().attribute.append(in_attribute(AttributeProto.TENSOR, "t", outside()))
    ),
    "function's default": lambda made: made.functions.add().attribute_proto.append(
        in_attribute(AttributeProto.TENSOR, "t", outside())
    ),
    "entries alone": lambda made: made.graph.initializer.add().external_data.add(key="location", value="x"),
}


@pytest.mark.parametrize("place", EXTERNAL)
def test_tensors_in_other_files_are_refused_everywhere(place: str) -> None:
    made = model("step")
    EXTERNAL[place](made)
    with pytest.raises(GraphRefused, match="one file"):
        check_graph(made.SerializeToString())


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


@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(GraphRefused):
        open_graph(data, role="step")


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


@pytest.mark.parametrize(
    "data",
    [
        b"\x3b\x00\x3c",  # a group, which protobuf has given up
        b"\xba\x80\x80\x80\x10\x00",  # a field number beyond 32 bits, of which readers keep the lower ones
        b"\x08" + b"\xff" * 10 + b"\x01",  # an integer without an end
        b"\x00\x00",  # field number 0
        b"\x3a\xff\xff\xff\xff\x0f",  # longer than everything
    ],
)
def test_ambiguous_encodings_are_refused(data: bytes) -> None:
    with pytest.raises(GraphRefused, match="expected an ONNX file"):
        check_graph(WHOLE + data)


def test_deeply_nested_graph_is_refused() -> None:
    inner = b""
    for _ in range(10_000):
        for tag in (0x32, 0x2A, 0x0A):  # an attribute's graph, a node's attribute, a graph's node
            inner = bytes([tag]) + _length(inner) + inner
    with pytest.raises(GraphRefused):
        open_graph(WHOLE + b"\x3a" + _length(inner) + inner, role="step")


def test_validation_takes_less_memory_than_the_file() -> None:
    """For thousands of empty messages, side by side or nested."""
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


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x08\x00" * (MAX_FIELDS + 1), "at most 262144 fields"),
        (b"\x72\x22" + b"\x08\x00" * 17, "at most 16 fields"),
    ],
)
def test_graph_of_too_many_fields_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(GraphRefused, match=reason):
        check_graph(data)


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


def test_graph_that_is_too_large_is_refused() -> None:
    with pytest.raises(GraphRefused, match="at most 67108864 bytes, got 67108865"):
        check_graph(bytes(MAX_GRAPH_BYTES + 1))


def test_unsuitable_graph_is_refused() -> None:
    """Another role, a newer runtime, no metadata, other inputs and outputs."""
    with pytest.raises(GraphRefused, match="for step, got the one for head"):
        open_graph(file("head"), role="step")
    with pytest.raises(GraphRefused, match=r"needs ONNX Runtime 99\.1 or newer, here is"):
        opened("step", runtime_min="99.1")
    bare = model("step")
    del bare.metadata_props[:]
    with pytest.raises(GraphRefused, match="no 'protofleet' metadata"):
        open_graph(bare.SerializeToString(), role="step")
    with pytest.raises(
        GraphRefused, match=r"must take feature float32 \(any, 5\), and takes feature float32 \(any, 4\)"
    ):
        opened("step", feature_size=5)
    with pytest.raises(GraphRefused, match="a head graph does not give projection"):
        opened(
            "head", body="h (float[n, 4] feature) => (float[n, 4] projection) { projection = Abs(feature) }"
        )
    with pytest.raises(GraphRefused, match="a project graph does not give logits"):
        opened("project", body="p (float[n, 4] feature) => (float[n, 4] logits) { logits = Abs(feature) }")
    with pytest.raises(GraphRefused, match="a step graph does not give"):
        opened("step", body="s (float[n, 4] feature) => (float loss, float[n, 4] weight) "
               "{ loss = ReduceMean<keepdims = 0>(feature) weight = Abs(feature) }")  # fmt: skip
    with pytest.raises(GraphRefused, match="is of tensor"):
        opened("init", body="i (float[n, 4] feature, string[n] name) => (float[n, 4] y) { y = Abs(feature) }")
    with pytest.raises(GraphRefused, match="cannot load"):
        opened("init", body="i (float[n, 4] feature) => (float[n, 4] y) { y = Abs(unheard_of) }")


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
    bound = opened("project").bind({"weight": weight, "mean": mean, "more": np.zeros(1)})
    assert set(bound) == {"weight", "mean"}
    assert bound["weight"] is weight
    assert bound["mean"].dtype == np.float32
    with pytest.raises(GraphRefused, match="asks for mean; there are weight, rate"):
        opened("project").bind({"weight": weight, "rate": mean})
    with pytest.raises(GraphRefused, match=r"'targets' must be float32 \(3, 2\), and is float16 \(2, 2\)"):
        opened("step").bind({**dict.fromkeys(("weight", "velocity"), weight), "mean": mean,
             "steps": np.zeros((), np.int64), **round_tensors(), "targets": np.zeros((2, 2), np.float16)})  # fmt: skip


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
