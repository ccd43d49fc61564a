"""Fuses a backbone and a head into one ONNX file, without torch."""

import hashlib

import onnx
from onnx import compose, version_converter

from protocol.errors import BackboneMismatch
from protocol.onnx_metadata import BackboneMetadata, HeadMetadata, ModelMetadata, read_metadata, to_properties


def finished(model: onnx.ModelProto, metadata: HeadMetadata | ModelMetadata) -> bytes:
    """Return a checked graph as a file with metadata."""
    onnx.helper.set_model_props(model, to_properties(metadata))
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


def fuse(backbone: bytes, head: bytes) -> bytes:
    """Return backbone and head as one ONNX file: input `image`, outputs `logits` and `probabilities`.

    Raises:
        BackboneMismatch: the head was trained on another backbone's features.
    """
    first, second = onnx.load_model_from_string(backbone), onnx.load_model_from_string(head)
    of_first, of_second = (
        {each.key: each.value for each in model.metadata_props} for model in (first, second)
    )
    facts = ModelMetadata(
        backbone=read_metadata(of_first, BackboneMetadata), head=read_metadata(of_second, HeadMetadata)
    )
    digest = hashlib.sha256(backbone).hexdigest()
    if facts.head.backbones != (digest,):
        raise BackboneMismatch(
            f"the head needs features of backbone {', '.join(facts.head.backbones)}, got backbone {digest}"
        )
    opset = max(_opset(first), _opset(second))
    first, second = _prepared(first, "backbone/", opset=opset), _prepared(second, "head/", opset=opset)
    first.ir_version = second.ir_version = max(first.ir_version, second.ir_version)
    return finished(compose.merge_models(first, second, io_map=[("feature", "feature")]), facts)


def _prepared(model: onnx.ModelProto, prefix: str, *, opset: int) -> onnx.ModelProto:
    """Return a graph at that operator set, without metadata, with prefixed inner names."""
    if _opset(model) != opset:
        model = version_converter.convert_version(model, opset)
    model.ClearField("metadata_props")
    return compose.add_prefix(model, prefix, rename_inputs=False, rename_outputs=False)


def _opset(model: onnx.ModelProto) -> int:
    return int(next(entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"}))
