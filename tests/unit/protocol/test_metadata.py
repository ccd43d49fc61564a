"""What an ONNX file says of itself survives the file and is refused where it does not fit."""

from collections.abc import Callable, Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BackboneMismatch
from protocol.metadata import (
    PROPERTY,
    BackboneMetadata,
    GraphMetadata,
    HeadMetadata,
    ModelMetadata,
    Parity,
    backbone_metadata,
    graph_metadata,
    head_metadata,
    model_metadata,
    to_properties,
)
from protocol.preprocessing import Preprocessing

BACKBONE = BackboneMetadata(
    model="resnet18",
    feature_size=512,
    preprocessing=Preprocessing(height=224, width=192, crop_pct=0.875, crop_mode="border", fill=(1, 2, 3)),
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    weights_sha256="0" * 64,
    weights="resnet18.safetensors",
    parity=Parity(cosine=0.999, relative_error=1e-6, images=2),
)
HEAD = HeadMetadata(
    classes=("cat", "dog"),
    version=3,
    task="1" * 64,
    backbones=("2" * 64,),
    feature_size=512,
    training={"epochs": 15.0},
)
GRAPH = GraphMetadata(
    role="step",
    algorithm="fedpcl",
    classes=10,
    feature_size=1280,
    projection_size=256,
    opset=18,
    runtime_min="1.14",
    runtime_max="1.31.0",
)
READERS: list[Callable[[Mapping[str, str]], object]] = [
    backbone_metadata,
    head_metadata,
    graph_metadata,
    model_metadata,
]


def test_what_is_written_is_read() -> None:
    """Each kind of metadata comes back equal."""
    model = ModelMetadata(backbone=BACKBONE, head=HEAD)
    assert backbone_metadata(to_properties(BACKBONE)) == BACKBONE
    assert head_metadata(to_properties(HEAD)) == HEAD
    assert graph_metadata(to_properties(GRAPH)) == GRAPH
    assert model_metadata(to_properties(model)) == model


@given(classes=st.lists(st.text(), min_size=1), training=st.dictionaries(st.text(), st.floats(-1e9, 1e9)))
def test_any_name_and_figure_survives(classes: list[str], training: dict[str, float]) -> None:
    """Class names of any script and figures of any size come back equal."""
    head = HeadMetadata(
        classes=tuple(classes),
        version=1,
        task="a" * 64,
        backbones=("b" * 64,),
        feature_size=8,
        training=training,
    )
    assert head_metadata(to_properties(head)) == head


@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_somebody_else_is_refused(reader: Callable[[Mapping[str, str]], object]) -> None:
    """An ONNX file without our metadata is refused, and the message says how to get one with it."""
    with pytest.raises(BackboneMismatch, match=r"no 'protofleet' metadata .*: expected a protofleet"):
        reader({"producer": "somebody"})


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"kind": "other"}', "\ud800"])
def test_broken_metadata_is_refused(reader: Callable[[Mapping[str, str]], object], text: str) -> None:
    """Metadata that is not ours, cut or of another shape is refused in one message."""
    with pytest.raises(BackboneMismatch, match="does not fit"):
        reader({PROPERTY: text})


@pytest.mark.parametrize("size", [0, -1, 2**20 + 1, 2**62])
def test_a_size_that_no_array_has_is_refused(size: int) -> None:
    """Before room is made for it."""
    with pytest.raises(BackboneMismatch, match="does not fit"):
        graph_metadata(to_properties(msgspec.structs.replace(GRAPH, projection_size=size)))


def test_a_head_is_no_backbone() -> None:
    """One kind of file is never taken for another."""
    with pytest.raises(BackboneMismatch, match="make one with export-backbone"):
        backbone_metadata(to_properties(HEAD))
    with pytest.raises(BackboneMismatch, match=r"head\.onnx"):
        head_metadata(to_properties(BACKBONE))
    with pytest.raises(BackboneMismatch, match="graph of a program"):
        graph_metadata(to_properties(HEAD))


def test_every_cut_of_the_metadata_is_refused() -> None:
    """No prefix of a backbone's metadata is taken for the whole."""
    text = to_properties(BACKBONE)[PROPERTY]
    for size in range(len(text)):
        with pytest.raises(BackboneMismatch):
            backbone_metadata({PROPERTY: text[:size]})
