"""Files: arrays and checkpoints on disk, metadata of ONNX files, enrollment folders."""

import base64
import binascii
import contextlib
import functools
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np

from aggregator.security.enrollment import enroll
from aggregator.storage.open_store import open_store
from edge_client.training.local_round import LocalModel, pack, pack_checkpoint, unpack, unpack_checkpoint
from edge_client.training.trainer import Checkpoint
from protocol.enrollment import read_enrollment
from protocol.errors import BackboneMismatch, ConfigError, StateError
from protocol.models.onnx_metadata import (
    PROPERTY,
    BackboneMetadata,
    GraphMetadata,
    HeadMetadata,
    ModelMetadata,
    read_metadata,
)
from protocol.wire.codec import digest_of
from tests.fuzz.devices import state_folder
from tests.fuzz.target import MIB, Target

ABOUT = ("task", 3, "tensors", "images")
LOCAL_MODEL = LocalModel(
    {"weight": np.ones((2, 3), np.float32)}, np.zeros((2, 3), np.float32), np.ones(2, np.float32)
)


def unpack_any(data: bytes) -> None:
    """Read a local model and a checkpoint; nothing but `StateError` is raised."""
    with contextlib.suppress(StateError):
        local_model = unpack(data)
        assert all(isinstance(array, np.ndarray) for array in local_model.state.values())
    # With its digest in front, so that the content is read as well.
    for file in (data, digest_of(data) + data):
        with contextlib.suppress(StateError):
            checkpoint = unpack_checkpoint(file, ABOUT)
            assert checkpoint is None or (
                isinstance(checkpoint.steps, int) and isinstance(checkpoint.loss_sum, float)
            )


def _arrays() -> Iterable[bytes]:
    yield pack(LOCAL_MODEL)
    yield pack_checkpoint(Checkpoint({"weight": np.ones(3, np.float32)}, 7, 1.5), ABOUT)[32:]
    yield pack(LOCAL_MODEL).replace(b"f4", b"f8")


def read_any_metadata(data: bytes) -> None:
    """Read the metadata of an ONNX file as every kind; nothing but `BackboneMismatch` is raised."""
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
    yield f'{{"kind":"model","backbones":{{"image":{backbone}}},"head":{head}}}'.encode()
    yield (
        b'{"kind":"graph","role":"step","algorithm":"fpl","classes":3,"feature_size":4,"projection_size":2,'
        b'"opset":17,"runtime_min":"1.14","runtime_max":"1.31"}'
    )


ARRAYS = Target("arrays", unpack_any, _arrays, at_least_bytes=2 * MIB, bytes_per_byte=64, share=3)
METADATA = Target("metadata", read_any_metadata, _metadata, max_bytes=1024, share=8)


FILES = ("enrollment.toml", "ca.crt", "device.crt", "signing.key")


@functools.cache
def _enrolled() -> tuple[Path, dict[str, bytes]]:
    """Return a device's enrollment folder, and its files."""
    root = Path(state_folder().name) / "enrolled"
    folder = root / "shed-1"
    with closing(open_store(root / "state")) as store:
        enroll(store, "shed-1", fleet="orchard", out=folder)
    return folder, {name: (folder / name).read_bytes() for name in FILES}


def read_damaged(data: bytes) -> None:
    """Read an enrollment in which the first byte selects the file and the others replace it."""
    if not data:
        return
    folder, files = _enrolled()
    name = FILES[data[0] % len(FILES)]
    (folder / name).write_bytes(data[1:])
    try:
        with contextlib.suppress(ConfigError):
            assert read_enrollment(folder).device == "shed-1"
    finally:
        (folder / name).write_bytes(files[name])


def _mutate_enrollment(data: bytes, random: Random) -> bytes:
    """Change bytes that a PEM file encodes; insert syntax into another file."""
    lines = data.split(b"\n")
    try:
        inner = bytearray(base64.b64decode(b"".join(lines[1:-2]), validate=True))
    except binascii.Error:
        inner = bytearray()
    if len(lines) > 3 and inner:
        for _ in range(random.choice((1, 1, 3))):
            values = (0, 1, 0x06, 0x30, 0x7F, 0x80, random.randrange(256))
            inner[random.randrange(len(inner))] = random.choice(values)
        return b"\n".join([lines[0], base64.encodebytes(bytes(inner)).strip(), *lines[-2:]])
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice((b"[", b"[" * 3000, b"{a=", b'"', b"1", b"\n")) + data[at:]


def _enrollments() -> Iterable[bytes]:
    _, files = _enrolled()
    return (bytes([number]) + files[name] for number, name in enumerate(FILES))


ENROLLMENT = Target("enrollment", read_damaged, _enrollments, _mutate_enrollment, bytes_per_byte=512, share=1)
