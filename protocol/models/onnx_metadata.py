"""Metadata inside ONNX files: the property ``protofleet``, which holds JSON.

ONNX Runtime returns it in ``session.get_modelmeta().custom_metadata_map``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from protocol.errors import BackboneMismatch
from protocol.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    import onnx

PROPERTY = "protofleet"

_Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_Version = Annotated[str, Meta(pattern=r"^\d+(\.\d+){1,3}$")]
_Size = Annotated[int, Meta(gt=0, le=2**20)]  # arrays are allocated by it
_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_Metadata = TypeVar("_Metadata", bound=msgspec.Struct)


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """Difference in the worst image between the backbone and its source, such as PyTorch with timm's preprocessing."""

    cosine: float
    """Smallest cosine similarity of the two features."""
    relative_error: float
    """Largest ``|onnx - torch| / |torch|``, Euclidean norms over the feature."""
    images: int


class Block(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The values of one block of the network in the feature."""

    name: _Name
    """A module's path in the network, ``cN``, or ``last`` for the network's own pooled feature."""
    width: _Size
    residual: bool = False
    """True if `export-backbone --layers residual` takes it."""
    depthwise: bool = False
    """True if `export-backbone --layers depthwise` takes it; absent from files of earlier versions."""


class BackboneMetadata(msgspec.Struct, frozen=True, kw_only=True, tag="backbone", tag_field="kind"):
    """A graph from ``image`` uint8 (n, H, W, 3) RGB to ``feature`` float32 (n, L), including normalization."""

    model: str
    """The model's name, in timm if it is a timm model."""
    feature_size: _Size
    """L."""
    preprocessing: Preprocessing
    mean: tuple[float, float, float]
    """Per channel, of pixels scaled to 0..1; applied inside the graph."""
    std: tuple[float, float, float]
    weights_sha256: _Sha256
    """The digest of the file that the weights were read from, or of the weights as safetensors if there was none."""
    weights: str = ""
    """Source of the weights: a file name or hub name."""
    parity: Parity | None = None
    precision: str = "float32"
    """``float32``, ``float16`` or ``int8``, for information: what most layers compute with."""
    blocks: Annotated[tuple[Block, ...], Meta(min_length=1)] | UnsetType = UNSET
    """Blocks in the order of their values in the feature, each with mean 0 and length sqrt(width); absent from the file
    if the feature is the network's own."""

    def __post_init__(self) -> None:
        if self.blocks and sum(block.width for block in self.blocks) != self.feature_size:
            raise ValueError("expected blocks whose widths add up to feature_size")


class HeadMetadata(msgspec.Struct, frozen=True, kw_only=True, tag="head", tag_field="kind"):
    """A graph from ``feature`` float32 (n, L) to ``logits`` and ``probabilities`` float32 (n, C).

    Without rounds it also has ``novelty`` float32 (n,): 1 minus the greatest cosine to a class mean.
    """

    classes: Annotated[tuple[str, ...], Meta(min_length=1)]
    """C class names, in the order of the outputs."""
    version: int
    task: _Sha256
    """Digest of the task."""
    backbones: Annotated[tuple[_Sha256, ...], Meta(min_length=1)]
    """Digests of the backbones whose features it concatenates."""
    feature_size: _Size
    """L, of all backbones together."""
    training: dict[str, float]
    """Training metrics by name."""
    novelty_threshold: float | None = None
    """The novelty above which an image is of no known class; None until the head is calibrated."""


class GraphMetadata(msgspec.Struct, frozen=True, kw_only=True, tag="graph", tag_field="kind"):
    """A graph of a `protocol.wire.messages.Program`, which describes the roles."""

    role: Literal["init", "step", "project", "head"]
    algorithm: str
    classes: _Size
    """C."""
    feature_size: _Size
    """L, of all backbones together."""
    projection_size: _Size
    """D, of the prototypes."""
    opset: _Size
    """ONNX operator set."""
    runtime_min: _Version
    """Oldest ONNX Runtime with this operator set."""


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True, tag="model", tag_field="kind"):
    """A graph of backbones and head, from images to ``probabilities`` and ``logits`` float32 (n, C)."""

    backbones: Annotated[dict[str, BackboneMetadata], Meta(min_length=1)]
    """The backbone that takes each input of the graph, with the preprocessing of its images."""
    head: HeadMetadata
    head_sha256: str = ""
    """Digest of the head's file; empty in older files."""


def to_properties(
    metadata: BackboneMetadata | HeadMetadata | GraphMetadata | ModelMetadata,
) -> dict[str, str]:
    """Return the properties to put into an ONNX file: ``read_metadata(to_properties(m), type(m)) == m``."""
    return {PROPERTY: msgspec.json.encode(metadata).decode()}


_EXPECTED: dict[type[msgspec.Struct], str] = {
    BackboneMetadata: "backbone: make one with export-backbone",
    HeadMetadata: "head: use the head.onnx that the aggregator wrote",
    GraphMetadata: "graph of a program, which the aggregator makes",
    ModelMetadata: "model: use the model.onnx that the aggregator wrote",
}


def read_metadata(properties: Mapping[str, str], kind: type[_Metadata]) -> _Metadata:
    """Read metadata of a kind from an ONNX file's properties; raises BackboneMismatch if there is none."""
    text = properties.get(PROPERTY)
    if text is None:
        raise BackboneMismatch(
            f"no '{PROPERTY}' metadata in the ONNX file: expected a protofleet {_EXPECTED[kind]}"
        )
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise BackboneMismatch(
            f"invalid '{PROPERTY}' metadata in the ONNX file ({error}): expected a protofleet {_EXPECTED[kind]}"
        ) from error


def delete_notes(model: "onnx.ModelProto") -> None:
    """Delete the exporter's notes from a model: its stack traces contain paths of this machine."""
    graph = model.graph
    parts = (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer)
    for part in parts:
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
