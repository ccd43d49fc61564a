"""What is read back from a disk, or stands in a file that came: arrays, checkpoints, metadata."""

import contextlib
import io
import json
from collections.abc import Iterable

import numpy as np

from edge_client.training.local_round import LocalModel, pack, pack_checkpoint, unpack, unpack_checkpoint
from edge_client.training.trainer import Checkpoint
from protocol.errors import BackboneMismatch, StateError
from protocol.onnx_metadata import (
    PROPERTY,
    BackboneMetadata,
    GraphMetadata,
    HeadMetadata,
    ModelMetadata,
    read_metadata,
)
from protocol.wire.codec import digest_of
from tests.fuzz.target import MIB, Target

ABOUT = ("task", 3, "tensors", "images")
LEARNED = LocalModel(
    {"weight": np.ones((2, 3), np.float32)}, np.zeros((2, 3), np.float32), np.ones(2, np.float32)
)


def unpack_any(data: bytes) -> None:
    """Bytes are a local model, a checkpoint, or neither; nothing but `StateError` is raised."""
    with contextlib.suppress(StateError):
        local_model = unpack(data)
        assert all(isinstance(array, np.ndarray) for array in local_model.state.values())
    # With the right digest in front, or no change would ever get past it.
    for file in (data, digest_of(data) + data):
        with contextlib.suppress(StateError):
            checkpoint = unpack_checkpoint(file, ABOUT)
            assert checkpoint is None or (
                isinstance(checkpoint.steps, int) and isinstance(checkpoint.loss_sum, float)
            )


def _arrays() -> Iterable[bytes]:
    yield pack(LEARNED)
    yield pack_checkpoint(Checkpoint({"weight": np.ones(3, np.float32)}, 7, 1.5), ABOUT)[32:]
    squeezed = io.BytesIO()
    np.savez_compressed(
        squeezed,
        about=np.array(json.dumps([list(ABOUT), 7, 1.5])),
        counts=np.zeros(9),
        prototypes=np.zeros(9),
    )
    yield squeezed.getvalue()
    alone = io.BytesIO()
    np.save(alone, np.zeros(5, np.float32))
    yield alone.getvalue()


def read_any_metadata(data: bytes) -> None:
    """What an ONNX file says of itself is metadata of a kind, or the file is refused."""
    text = data.decode(errors="surrogateescape")
    for kind in (GraphMetadata, HeadMetadata, BackboneMetadata, ModelMetadata):
        with contextlib.suppress(BackboneMismatch):
            read_metadata({PROPERTY: text}, kind)


def _metadata() -> Iterable[bytes]:
    digest = "0123456789abcdef" * 4
    spec = '{"height":16,"width":16,"crop_pct":0.9,"crop_mode":"center","interpolation":"bicubic","fill":[0,0,255]}'
    backbone = (
        f'{{"kind":"backbone","model":"tiny","feature_size":16,"preprocessing":{spec},"mean":[0.5,0.5,0.5],'
        f'"std":[0.2,0.2,0.2],"weights_sha256":"{digest}","parity":{{"cosine":1,"relative_error":0,"images":4}}}}'
    )
    head = (
        f'{{"kind":"head","classes":["cat","K\\u00e4fer"],"version":3,"task":"{digest}","backbones":["{digest}"],'
        '"feature_size":16,"training":{"loss":0.5}}'
    )
    yield backbone.encode()
    yield head.encode()
    yield f'{{"kind":"model","backbone":{backbone},"head":{head}}}'.encode()
    yield (
        b'{"kind":"graph","role":"step","algorithm":"fpl","classes":3,"feature_size":4,"projection_size":2,'
        b'"opset":17,"runtime_min":"1.14","runtime_max":"1.31"}'
    )


ARRAYS = Target("arrays", unpack_any, _arrays, at_least_bytes=2 * MIB, bytes_per_byte=64, share=3)
METADATA = Target("metadata", read_any_metadata, _metadata, max_bytes=1024, share=8)
