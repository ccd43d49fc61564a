"""The graphs of a program: built with torch once per task; a head's inputs are bound without it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from aggregator.algorithms.algorithm import RoundAlgorithm
from protocol.errors import ProtofleetError
from protocol.models.cpu_session import cpu_session
from protocol.models.onnx_metadata import GraphMetadata, HeadMetadata, to_properties

LOCAL = ("local_prototypes", "local_counts")
"""Inputs of a head that only a device has."""

_NO_LIMIT = 2**40


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """The four ONNX files of a `protocol.wire.messages.Program`."""

    init: bytes
    step: bytes
    project: bytes
    head: bytes


def build(algorithm: RoundAlgorithm, *, feature_size: int, num_classes: int, seed: int) -> Graphs:
    """Trace an algorithm's functions into ONNX files, and verify each against eager PyTorch.

    The same arguments give the same bytes. `feature_size` is that of all backbones together.

    Raises:
        ProtofleetError: a graph differs from PyTorch.
    """
    from aggregator.graphs.head_export import OPSET, RUNTIME_MIN
    from aggregator.graphs.parity import check
    from aggregator.graphs.tracing import examples, to_onnx

    functions = algorithm.functions(feature_size=feature_size, num_classes=num_classes, seed=seed)
    sizes = {"feature_size": feature_size, "num_classes": num_classes, "seed": seed}
    tensors = examples(algorithm, functions, **sizes)
    files = {}
    for role in ("init", "step", "project", "head"):
        metadata = GraphMetadata(
            role=role,
            algorithm=algorithm.name,
            classes=num_classes,
            feature_size=feature_size,
            projection_size=algorithm.prototype_size(feature_size),
            opset=OPSET,
            runtime_min=RUNTIME_MIN,
        )
        files[role] = to_onnx(getattr(functions, role), tensors, functions.dimensions, metadata=metadata)
    check(files, algorithm, functions, feature_size=feature_size, num_classes=num_classes)
    return Graphs(**files)


def untrained(init: bytes, *, feature_size: int) -> dict[str, NDArray[Any]]:
    """Return the state of a device without images, by name, for a head that is not bound to a device."""
    session = cpu_session(init)
    none = {"feature": np.zeros((0, feature_size), dtype=np.float32), "labels": np.zeros(0, dtype=np.int64)}
    values = session.run(None, {value.name: none[value.name] for value in session.get_inputs()})
    return {output.name: value for output, value in zip(session.get_outputs(), values, strict=True)}


def bind(head: bytes, tensors: Mapping[str, NDArray[Any]], *, metadata: HeadMetadata) -> bytes:
    """Return a program's head with its inputs bound to constants, to be used as any other head.

    The tensors are a state, such as that of `untrained`, and those of a round, converted to the graph's dtypes; a
    device's own prototypes are zeros if missing. The file takes `feature` float32 (n, L) to `logits` and
    `probabilities` float32 (n, C).

    Raises:
        ProtofleetError: a tensor is missing or of another shape.
    """
    from onnxscript import optimizer

    model = onnx.load_model_from_string(head)
    feature, *bound = model.graph.input
    for value in bound:
        kind = value.type.tensor_type
        array = _fitting(value.name, [edge.dim_value or None for edge in kind.shape.dim], tensors)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        model.graph.initializer.append(
            numpy_helper.from_array(np.asarray(array, dtype, order="C"), value.name)
        )
    del model.graph.input[:]
    model.graph.input.append(feature)
    # Fold what depends on constants only: of FedPCL's prototypes few rows remain.
    format_version = model.ir_version
    model = optimizer.optimize(model, input_size_limit=_NO_LIMIT, output_size_limit=_NO_LIMIT)
    model.ir_version = format_version
    model.ClearField("metadata_props")
    onnx.helper.set_model_props(model, to_properties(metadata))
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def _fitting(name: str, shape: list[int | None], tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the tensor of that name if it has that shape, in which None is any length."""
    array = tensors.get(name)
    if array is None and name in LOCAL:
        return np.zeros([edge or 0 for edge in shape], dtype=np.float32)
    if array is None or [wanted and edge for wanted, edge in zip(shape, array.shape, strict=False)] != shape:
        wanted = tuple("any" if edge is None else edge for edge in shape)
        raise ProtofleetError(
            f"the head takes {name} of shape {wanted}, got {'none' if array is None else array.shape}"
        )
    return array
