"""ONNX files: those that `check_graph` accepts refer to no other file, and only to ONNX's own operators."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from edge_client.graphs.program_graph import Role
from protocol.errors import BackboneMismatch, GraphRefused
from protocol.models.onnx_metadata import (
    BackboneMetadata,
    GraphMetadata,
    HeadMetadata,
    ModelMetadata,
    read_metadata,
)
from protocol.models.onnx_validation import check_graph
from tests.fuzz.mutations import of_protobuf
from tests.fuzz.target import Target
from tests.support.graphs.step_graphs import file, model

OWN = {"", "ai.onnx"}
ROLES: tuple[Role, ...] = ("init", "step", "project", "head")


def check(data: bytes) -> None:
    """Check an accepted file with the `onnx` package."""
    try:
        properties = check_graph(data)
    except GraphRefused:
        return
    for kind in (GraphMetadata, HeadMetadata, BackboneMetadata, ModelMetadata):
        with contextlib.suppress(BackboneMismatch):
            read_metadata(properties, kind)
    try:
        made = onnx.load_model_from_string(data)
    except (DecodeError, ValueError):
        return
    for message in _messages(made):
        if isinstance(message, onnx.NodeProto | onnx.FunctionProto | onnx.OperatorSetIdProto):
            assert message.domain in OWN, message.domain
        if isinstance(message, TensorProto):
            assert message.data_location != TensorProto.EXTERNAL
            assert not message.external_data


def _messages(message: Any) -> Iterator[Any]:
    """Yield a protobuf message and all messages in its fields."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(inner)


def _seeds() -> Iterable[bytes]:
    yield from map(file, ROLES)
    outside = numpy_helper.from_array(np.zeros(3, np.float32), "outside")
    foreign = helper.make_node("Custom", [], ["y"], domain="com.microsoft")
    for external in (True, False):
        made = model("project")
        if external:
            outside.data_location = TensorProto.EXTERNAL
        made.graph.initializer.append(outside)
        made.graph.sparse_initializer.add().values.CopyFrom(outside)
        inner = helper.make_graph([] if external else [foreign], "inner", [], [], [outside])
        made.graph.node[0].attribute.append(AttributeProto(name="held", type=AttributeProto.GRAPH, g=inner))
        made.functions.append(helper.make_function("", "Own", [], ["y"], [], [helper.make_opsetid("", 17)]))
        made.training_info.add().algorithm.CopyFrom(inner)
        yield bytes(made.SerializeToString())


GRAPHS = Target("graphs", check, _seeds, of_protobuf, bytes_per_byte=256, share=2.5)
