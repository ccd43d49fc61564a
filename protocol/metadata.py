"""What an ONNX file says of itself: one metadata key, ``protofleet``, that holds JSON.

A device needs nothing beside the file. It reads ``session.get_modelmeta().custom_metadata_map``.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from protocol.errors import BackboneMismatch
from protocol.preprocessing import Preprocessing

PROPERTY = "protofleet"

_Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_Version = Annotated[str, Meta(pattern=r"^\d+(\.\d+){1,3}$")]
_Size = Annotated[int, Meta(gt=0, le=2**20)]  # of arrays that are made by it
_Metadata = TypeVar("_Metadata", "BackboneMetadata", "HeadMetadata", "GraphMetadata", "ModelMetadata")


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """How far ONNX Runtime behind our preprocessing was from torch behind timm's, in the worst image."""

    cosine: float
    """Smallest cosine similarity of the two features."""
    relative_error: float
    """Largest ``|onnx - torch| / |torch|``, Euclidean norms over the feature."""
    images: int


class BackboneMetadata(msgspec.Struct, frozen=True, kw_only=True, tag="backbone", tag_field="kind"):
    """A graph ``image`` uint8 (n, H, W, 3) RGB -> ``feature`` float32 (n, L), which normalizes inside."""

    model: str
    """The network's name, timm's where it is one of timm's."""
    feature_size: _Size
    """L."""
    preprocessing: Preprocessing
    mean: tuple[float, float, float]
    """Per channel, of pixels scaled to 0..1; already inside the graph."""
    std: tuple[float, float, float]
    weights_sha256: _Sha256
    """Of the file the weights came from; of the weights written as safetensors where there was none."""
    weights: str = ""
    """Where the weights came from: a file's name or a hub's."""
    parity: Parity | None = None


class HeadMetadata(msgspec.Struct, frozen=True, kw_only=True, tag="head", tag_field="kind"):
    """A graph ``feature`` float32 (n, L) -> ``logits`` and ``probabilities`` float32 (n, C)."""

    classes: Annotated[tuple[str, ...], Meta(min_length=1)]
    """The C class names, in the order of the outputs."""
    version: int
    task: _Sha256
    """Digest of the task the head was trained for."""
    backbones: Annotated[tuple[_Sha256, ...], Meta(min_length=1)]
    """Digests of the backbone files whose features it takes, one after the other."""
    feature_size: _Size
    """L, of all of them together."""
    training: dict[str, float]
    """Figures of the training, by name."""


class GraphMetadata(msgspec.Struct, frozen=True, kw_only=True, tag="graph", tag_field="kind"):
    """One of the graphs of a task that is learned in rounds; `protocol.wire.messages.Program` says what each is for."""

    role: Literal["init", "step", "project", "head"]
    algorithm: str
    classes: _Size
    """C."""
    feature_size: _Size
    """L, of all backbones together."""
    projection_size: _Size
    """D, of what is averaged into prototypes."""
    opset: _Size
    """ONNX operator set."""
    runtime_min: _Version
    """Oldest ONNX Runtime that has this operator set."""
    runtime_max: _Version
    """Newest ONNX Runtime that the graph was checked with; a newer one is expected to run it as well."""


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True, tag="model", tag_field="kind"):
    """Backbone and head in one graph: ``image`` in, ``logits`` and ``probabilities`` out."""

    backbone: BackboneMetadata
    head: HeadMetadata


def to_properties(
    metadata: BackboneMetadata | HeadMetadata | GraphMetadata | ModelMetadata,
) -> dict[str, str]:
    """Give the metadata properties to put into an ONNX file.

    Law: ``backbone_metadata(to_properties(m)) == m``, and so for the other kinds.
    """
    return {PROPERTY: msgspec.json.encode(metadata).decode()}


def backbone_metadata(properties: Mapping[str, str]) -> BackboneMetadata:
    """Read a backbone's metadata.

    Raises:
        BackboneMismatch: if the file is not a backbone that ``export-backbone`` wrote.
    """
    return _read(properties, BackboneMetadata, "backbone; make one with export-backbone")


def head_metadata(properties: Mapping[str, str]) -> HeadMetadata:
    """Read a head's metadata.

    Raises:
        BackboneMismatch: if the file is not a head that an aggregator wrote.
    """
    return _read(properties, HeadMetadata, "head; take the head.onnx that the aggregator wrote")


def graph_metadata(properties: Mapping[str, str]) -> GraphMetadata:
    """Read the metadata of a graph of a program.

    Raises:
        BackboneMismatch: if the file is not a graph that an aggregator wrote.
    """
    return _read(properties, GraphMetadata, "graph of a program")


def model_metadata(properties: Mapping[str, str]) -> ModelMetadata:
    """Read the metadata of a backbone and head in one graph.

    Raises:
        BackboneMismatch: if the file is not a model that an aggregator wrote.
    """
    return _read(properties, ModelMetadata, "model; take the model.onnx that the aggregator wrote")


def _read(properties: Mapping[str, str], kind: type[_Metadata], expected: str) -> _Metadata:
    text = properties.get(PROPERTY)
    if text is None:
        raise BackboneMismatch(f"no '{PROPERTY}' metadata in the ONNX file: expected a protofleet {expected}")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise BackboneMismatch(
            f"the ONNX file's '{PROPERTY}' metadata does not fit ({error}): expected a protofleet {expected}"
        ) from error
