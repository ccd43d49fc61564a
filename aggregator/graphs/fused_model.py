"""Fuses backbones and a head into one ONNX file, without torch."""

import hashlib
from collections.abc import Sequence

import onnx
from google.protobuf.message import Error as ProtobufError
from onnx import compose, helper, version_converter

from protocol.errors import BackboneMismatch
from protocol.models.onnx_metadata import (
    BackboneMetadata,
    GraphMetadata,
    HeadMetadata,
    ModelMetadata,
    read_metadata,
    to_properties,
)

OUTPUTS = ("probabilities", "logits", "novelty")
"""The outputs in their order: a reader that ignores the names takes the first one; the last one may be missing."""

_ERRORS = (
    onnx.checker.ValidationError,
    version_converter.ConvertError,
    ProtobufError,
    ValueError,
    RuntimeError,
)
"""Errors of onnx for graphs that it cannot convert, merge or serialize; a file has at most 2 GiB."""


def finished(model: onnx.ModelProto, metadata: GraphMetadata | HeadMetadata | ModelMetadata) -> bytes:
    """Return a checked graph as a file with metadata."""
    helper.set_model_props(model, to_properties(metadata))
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


def fuse(backbones: Sequence[bytes], head: bytes) -> bytes:
    """Return the head and its backbones as one ONNX file, images to OUTPUTS.

    The input of a single backbone is `image`; those of several are `backbone_1/image`, `backbone_2/image` and so on.

    Raises:
        BackboneMismatch: the head was trained on other backbones' features, or onnx cannot merge the graphs.
    """
    try:
        return _fused(backbones, head)
    except _ERRORS as error:
        raise BackboneMismatch(f"onnx cannot merge the backbones and the head: {error}") from error


def _fused(backbones: Sequence[bytes], head: bytes) -> bytes:
    models = [onnx.load_model_from_string(file) for file in (*backbones, head)]
    properties = [{each.key: each.value for each in model.metadata_props} for model in models]
    described = [read_metadata(each, BackboneMetadata) for each in properties[:-1]]
    head_metadata = read_metadata(properties[-1], HeadMetadata)
    digests = tuple(hashlib.sha256(file).hexdigest() for file in backbones)
    if head_metadata.backbones != digests:
        raise BackboneMismatch(
            f"the head needs features of backbone {', '.join(head_metadata.backbones)}, "
            f"got backbone {', '.join(digests)}"
        )
    size = sum(each.feature_size for each in described)
    if head_metadata.feature_size != size:
        raise BackboneMismatch(
            f"the head takes {head_metadata.feature_size} features, the backbones give {size}"
        )
    model = _merged(models)
    by_input = dict(zip((value.name for value in model.graph.input), described, strict=True))
    digest = hashlib.sha256(head).hexdigest()
    return finished(model, ModelMetadata(backbones=by_input, head=head_metadata, head_sha256=digest))


def _merged(models: Sequence[onnx.ModelProto]) -> onnx.ModelProto:
    """Return one graph of the backbones and the head, which is the last of the models."""
    opset, format_version = max(map(_opset, models)), max(model.ir_version for model in models)
    *backbones, head = (_converted(model, opset=opset, format_version=format_version) for model in models)
    several = len(backbones) > 1
    backbones = [
        compose.add_prefix(each, f"backbone_{number}/" if several else "backbone/", rename_inputs=several)
        for number, each in enumerate(backbones, start=1)
    ]
    head = compose.add_prefix(head, "head/", rename_inputs=False, rename_outputs=False)
    model = compose.merge_models(
        _concatenation([each.graph.output[0] for each in backbones], head),
        head,
        io_map=[("feature", "feature")],
    )
    for each in reversed(backbones):
        feature = each.graph.output[0].name
        model = compose.merge_models(each, model, io_map=[(feature, feature)])
    outputs = {value.name: value for value in model.graph.output}
    del model.graph.output[:]
    model.graph.output.extend(outputs[name] for name in OUTPUTS if name in outputs)
    return model


def _converted(model: onnx.ModelProto, *, opset: int, format_version: int) -> onnx.ModelProto:
    """Return a graph at that operator set and format, without metadata."""
    if _opset(model) != opset:
        model = version_converter.convert_version(model, opset)
    model.ir_version = format_version
    model.ClearField("metadata_props")
    return model


def _concatenation(features: Sequence[onnx.ValueInfoProto], head: onnx.ModelProto) -> onnx.ModelProto:
    node = helper.make_node("Concat", [value.name for value in features], ["feature"], axis=1)
    graph = helper.make_graph([node], "features", features, head.graph.input)
    return helper.make_model(graph, opset_imports=head.opset_import, ir_version=head.ir_version)


def _opset(model: onnx.ModelProto) -> int:
    return int(next(entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"}))
