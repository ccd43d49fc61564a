"""Traces an algorithm's torch functions into ONNX files, whose inputs and outputs are named as its tensors.

Large tensors are processed tile by tile, so that each tile stays in the processor's cache. An optimizer's step is a
dozen operations on tensors of megabytes, each limited by memory bandwidth. A state tensor of three axes is a stack of
tiles; all operations on stacks of its shape become the body of one `Scan`, which copies neither its inputs nor its
outputs.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper
from onnxscript.optimizer import remove_unused_nodes
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aggregator.algorithms.algorithm import Function, Functions, RoundAlgorithm
from aggregator.graphs.head_export import OPSET
from protocol.errors import ProtofleetError
from protocol.log import warnings_suppressed
from protocol.models.onnx_metadata import GraphMetadata, delete_notes, to_properties

Examples = Mapping[str, Tensor]


def to_torch(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Return a round's tensors in the graphs' dtypes: uint32 indices as int64, all others as float32."""
    return {
        name: torch.from_numpy(array.astype(np.int64 if array.dtype == np.uint32 else np.float32))
        for name, array in arrays.items()
    }


def examples(
    algorithm: RoundAlgorithm, functions: Functions, *, feature_size: int, num_classes: int, seed: int
) -> Examples:
    """Return an example tensor for every input of a function.

    All dynamic axes have different lengths, and none that of a fixed axis: the tracer would treat them as equal.
    """
    first = algorithm.first_tensors(feature_size=feature_size, num_classes=num_classes, seed=seed)
    tensors = {
        "feature": torch.zeros(2, feature_size),
        "labels": torch.zeros(2, dtype=torch.int64),
        "local_prototypes": torch.zeros(num_classes, algorithm.prototype_size(feature_size)),
        "local_counts": torch.zeros(num_classes),
        **to_torch(first),
    }
    tensors |= functions.init.apply(tensors)
    dimensions = functions.dimensions
    fixed = {
        size
        for name, tensor in tensors.items()
        for axis, size in enumerate(tensor.shape)
        if name not in dimensions or dimensions[name][axis] is None
    }
    lengths = (size for size in itertools.count(num_classes + 2) if size not in fixed)
    length = {axis: next(lengths) for axes in dimensions.values() for axis in axes if axis is not None}
    for name, axes in dimensions.items():
        if name in tensors:
            shape = [
                size if axis is None else length[axis]
                for axis, size in zip(axes, tensors[name].shape, strict=True)
            ]
            tensors[name] = tensors[name].new_zeros(shape)
    return tensors


def to_onnx(
    function: Function,
    tensors: Examples,
    dimensions: Mapping[str, tuple[str | None, ...]],
    *,
    metadata: GraphMetadata,
) -> bytes:
    """Trace a function with tensors from `examples` into an ONNX file.

    `make_fx` comes first, since `torch.onnx.export` alone does not support `torch.func`.
    """
    names: list[str] = []

    def positional(*values: Tensor) -> tuple[Tensor, ...]:
        outputs = function.apply(dict(zip(function.inputs, values, strict=True)))
        names[:] = outputs
        return tuple(outputs.values())

    inputs = tuple(tensors[name] for name in function.inputs)
    with warnings_suppressed():
        traced = make_fx(positional, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
        program: Any = torch.onnx.export(
            traced,
            inputs,
            dynamic_shapes=tuple(
                {
                    axis: torch.export.Dim(size)
                    for axis, size in enumerate(dimensions.get(name, ()))
                    if size is not None
                }
                for name in function.inputs
            ),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    model: onnx.ModelProto = program.model_proto
    delete_notes(model)
    _rename(model.graph, inputs=function.inputs, outputs=names)
    _fold_transposes(model.graph)
    tile(model)
    remove_unused_nodes(model)
    model.graph.name = metadata.role
    model.ir_version = onnx.helper.find_min_ir_version_for(model.opset_import)
    onnx.helper.set_model_props(model, to_properties(metadata))
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def _rename(graph: onnx.GraphProto, *, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name a graph's inputs and outputs, and number all other values, whose names could collide with them."""
    ends = [*zip(graph.input, inputs, strict=True), *zip(graph.output, outputs, strict=True)]
    names = {value.name: name for value, name in ends} | {"": ""}
    if len(names) <= len(ends):
        raise ProtofleetError("a graph must compute each of its outputs, and none of them may be an input")

    def renamed(name: str) -> str:
        return names.setdefault(name, f"value_{len(names)}")

    for number, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{number}"
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = renamed(value.name)


def _fold_transposes(graph: onnx.GraphProto) -> None:
    """Fold transposes into `Gemm`, which ONNX Runtime does not do after a `Reshape`."""
    turned = {node.output[0]: node for node in graph.node if node.op_type == "Transpose"}
    for node in graph.node:
        if node.op_type == "Gemm":
            for place, name in enumerate(("transA", "transB")):
                source = turned.get(node.input[place])
                if source is not None:
                    node.input[place] = source.input[0]
                    flags = {entry.name: entry for entry in node.attribute}
                    flag = flags.get(name) or node.attribute.add(name=name, type=onnx.AttributeProto.INT)
                    flag.i = 1 - flag.i


_Shape = tuple[int | str, ...]


def tile(model: ModelProto) -> None:
    """Move all operations on stacks of tiles into a `Scan` over the tiles, in place.

    The graph's inputs of three fixed axes define the shapes of stacks. The operations must be elementwise, or products
    of a stack of matrices with one common matrix. The caller verifies the result.
    """
    shapes = _shapes(model)
    inputs = [shapes[value.name] for value in model.graph.input]
    stacks = {shape for shape in inputs if len(shape) == 3 and all(isinstance(edge, int) for edge in shape)}
    for number, stack in enumerate(sorted(stacks, key=str)):
        nodes = [node for node in model.graph.node if all(shapes.get(name) == stack for name in node.output)]
        if nodes:
            _scan(model.graph, nodes, shapes, number)


def _shapes(model: ModelProto) -> dict[str, _Shape]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    return {
        value.name: tuple(edge.dim_param or edge.dim_value for edge in value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.output, *graph.value_info)
    }


def _scan(graph: GraphProto, nodes: Sequence[NodeProto], shapes: dict[str, _Shape], number: int) -> None:
    stack = shapes[nodes[0].output[0]]
    made = [name for node in nodes for name in node.output]
    repeated = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Expand"}
    for node in nodes:
        node.input[:] = [repeated.get(name, name) for name in node.input]
    others = [node for node in graph.node if node not in nodes]
    asked = {name for node in others for name in node.input} | {value.name for value in graph.output}
    taken = dict.fromkeys(
        name
        for node in nodes
        for name in node.input
        if name not in made and len(shapes.get(name, ())) == 3 and shapes[name][:2] == stack[:2]
    )
    given = [name for name in made if name in asked]
    body = _body(nodes, list(taken), given, shapes)
    scan = helper.make_node(
        "Scan", list(taken), given, name=f"Scan_{number}", body=body, num_scan_inputs=len(taken)
    )
    place = next((at for at, node in enumerate(others) if set(node.input) & set(given)), len(others))
    others.insert(place, scan)
    del graph.node[:]
    graph.node.extend(others)
    kept = [value for value in graph.value_info if value.name not in made and value.name not in repeated]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def _body(
    nodes: Sequence[NodeProto], taken: Sequence[str], given: Sequence[str], shapes: dict[str, _Shape]
) -> GraphProto:
    """Return the operations on a tile; inputs and outputs are prefixed, other outer values are used as they are."""
    inside = {name: f"tile_{name}" for name in (*taken, *given)}
    copies = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [inside.get(name, name) for name in node.input]
        copy.output[:] = [inside.get(name, name) for name in node.output]
        copies.append(copy)
    inputs, outputs = (
        [helper.make_tensor_value_info(inside[name], TensorProto.FLOAT, shapes[name][1:]) for name in names]
        for names in (taken, given)
    )
    return helper.make_graph(copies, "tile", inputs, outputs)
