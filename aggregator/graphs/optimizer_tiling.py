"""Rewrites a graph to process large tensors tile by tile, so that each tile stays in the processor's cache.

An optimizer's step is a dozen operations on tensors of megabytes, each limited by memory bandwidth. A state tensor of
three axes is a stack of tiles; all operations on stacks of its shape become the body of one `Scan`, which copies
neither its inputs nor its outputs.
"""

from collections.abc import Sequence

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

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
