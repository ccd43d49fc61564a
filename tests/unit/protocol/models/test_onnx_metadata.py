"""Metadata in ONNX files is read back, and refused if it is invalid."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BackboneMismatch
from protocol.models.onnx_metadata import (
    PROPERTY,
    BackboneMetadata,
    Block,
    GraphMetadata,
    HeadMetadata,
    ModelMetadata,
    Parity,
    read_metadata,
    to_properties,
)
from protocol.models.preprocessing import Preprocessing

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
)
BLOCKS = msgspec.structs.replace(
    BACKBONE, blocks=(Block(name="c384", width=384), Block(name="last", width=128))
)
MODEL = ModelMetadata(backbones={"image": BACKBONE}, head=HEAD)
KINDS = [BackboneMetadata, HeadMetadata, GraphMetadata, ModelMetadata]
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("metadata", [BACKBONE, BLOCKS, HEAD, GRAPH, MODEL])
def test_metadata_is_read_back(metadata: Any) -> None:
    assert read_metadata(to_properties(metadata), type(metadata)) == metadata


@given(classes=st.lists(st.text(), min_size=1), training=st.dictionaries(st.text(), st.floats(-1e9, 1e9)))
def test_any_class_name_and_metric_is_read_back(classes: list[str], training: dict[str, float]) -> None:
    head = msgspec.structs.replace(HEAD, classes=tuple(classes), training=training)
    assert read_metadata(to_properties(head), HeadMetadata) == head


@each_kind
def test_file_without_metadata_is_refused(kind: Any) -> None:
    with pytest.raises(BackboneMismatch, match=r"no 'protofleet' metadata .*: expected a protofleet"):
        read_metadata({"producer": "another"}, kind)


@each_kind
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"kind": "other"}', "\ud800"])
def test_invalid_metadata_is_refused(kind: Any, text: str) -> None:
    with pytest.raises(BackboneMismatch, match="invalid 'protofleet' metadata"):
        read_metadata({PROPERTY: text}, kind)


def test_blocks_are_the_whole_feature() -> None:
    text = to_properties(BLOCKS)[PROPERTY]
    for wrong in (text.replace('"width":128', '"width":127'), text.replace('"c384"', '""')):
        with pytest.raises(BackboneMismatch, match="invalid"):
            read_metadata({PROPERTY: wrong}, BackboneMetadata)


@pytest.mark.parametrize("size", [0, -1, 2**20 + 1, 2**62])
def test_size_out_of_bounds_is_refused(size: int) -> None:
    with pytest.raises(BackboneMismatch, match="invalid"):
        read_metadata(to_properties(msgspec.structs.replace(GRAPH, projection_size=size)), GraphMetadata)


@pytest.mark.parametrize(
    ("found", "kind", "expected"),
    [
        (HEAD, BackboneMetadata, "make one with export-backbone"),
        (BACKBONE, HeadMetadata, r"head\.onnx"),
        (HEAD, GraphMetadata, "graph of a program"),
        (HEAD, ModelMetadata, r"model\.onnx"),
    ],
)
def test_another_kind_of_file_is_refused(found: Any, kind: Any, expected: str) -> None:
    with pytest.raises(BackboneMismatch, match=expected):
        read_metadata(to_properties(found), kind)
