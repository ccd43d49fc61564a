"""One fixed message of every type, and hypothesis strategies for all the others."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from protocol.wire.codec import to_tensor
from protocol.wire.messages import (
    MAX_BLOB_BYTES,
    MAX_CHUNK_BYTES,
    BlobRef,
    BlobRequest,
    DeviceInfo,
    DifferentialPrivacy,
    Evaluation,
    Frame,
    HeadManifest,
    HeadRef,
    Message,
    Perturbation,
    Presence,
    Privacy,
    Program,
    Receipt,
    RoundManifest,
    Signed,
    Submission,
    TaskManifest,
    Tensor,
    Tensors,
)

_DIGEST = bytes(range(32))

SAMPLES: tuple[Message | Frame, ...] = (
    Signed(key=_DIGEST, release=1_700_000_000, signature=bytes(range(64)), body=b"bytes of a manifest"),
    TaskManifest(
        fleet="default",
        algorithm="fedtc",
        classes=("cat", "Großer Käfer"),
        backbones=(BlobRef(digest=_DIGEST, size_bytes=12345, name="mobilenetv2_100.onnx"),),
        alpha=0.99,
        batch_size=5,
        min_images=2,
        seed=7,
        program=Program(
            init=BlobRef(digest=_DIGEST, size_bytes=1, name="init.onnx"),
            step=BlobRef(digest=_DIGEST, size_bytes=2, name="step.onnx"),
            project=BlobRef(digest=_DIGEST, size_bytes=3, name="project.onnx"),
            head=BlobRef(digest=_DIGEST, size_bytes=4, name="head.onnx"),
            persistent=("weight", "bias"),
            uploaded=("weight",),
            batch_size=32,
        ),
        perturbation=Perturbation(on="prototypes", noise="laplace", scale=0.05, shrink=0.1),
        differential_privacy=DifferentialPrivacy(
            clip_norm=8.0, noise_multiplier=2.5, delta=1e-5, max_epsilon=8.0
        ),
    ),
    RoundManifest(
        task=_DIGEST,
        number=2,
        rounds=60,
        epochs=1,
        tensors=BlobRef(digest=_DIGEST, size_bytes=5, name="round-2"),
    ),
    HeadManifest(
        task=_DIGEST,
        current=HeadRef(
            version=3,
            head=BlobRef(digest=_DIGEST[::-1], size_bytes=678, name="head-3.onnx"),
            devices=10,
            prototypes=220,
            metrics={"loss": 0.25},
            round=2,
            tensors=BlobRef(digest=_DIGEST, size_bytes=5, name="round-3"),
        ),
        candidate=HeadRef(
            version=4,
            head=BlobRef(digest=_DIGEST, size_bytes=679, name="head-4.onnx"),
            devices=11,
            prototypes=230,
        ),
        canary_rank_limit=429_496_730,
    ),
    Presence(state="online", epoch=1_700_000_000),
    DeviceInfo(
        epoch=1_700_000_000,
        software="0.1.0",
        runtime="1.31.1 CPUExecutionProvider",
        backbones=(_DIGEST,),
        images={"cat": 40, "Großer Käfer": 0},
        unusable_images=1,
        problem="the step of round 2 diverged",
        head_version=3,
        refused_messages={"signature": 2},
    ),
    Submission(
        task=_DIGEST,
        sequence=1,
        prototypes=to_tensor(np.array([[0.5, -1.0, 65504.0], [0.0, 0.25, 2.0]], dtype=np.float16)),
        labels=to_tensor(np.array([0, 1], dtype=np.uint8)),
        counts=to_tensor(np.array([5, 300], dtype=np.uint16)),
        images=306,
        omitted_classes=(1,),
        round=2,
        tensors={"weight": to_tensor(np.array([0.5], dtype=np.float16))},
        loss=1.5,
        privacy=Privacy(epsilon=1.5, total_epsilon=2.25, delta=1e-5, releases=2),
    ),
    Evaluation(
        task=_DIGEST,
        head_version=3,
        correct=(8, 0),
        incorrect=(1, 2),
        previous_correct=(7, 1),
        problem="it does not run",
    ),
    Frame(
        v=1,
        digest=_DIGEST,
        size_bytes=70_000,
        offset=61_440,
        data=b"bytes of a blob",
        key=_DIGEST,
        signature=bytes(range(64)),
    ),
    Receipt(
        digest=_DIGEST,
        status="refused",
        missing=((0, 61_440),),
        reason="superseded",
        detail="a submission with sequence 4 stands",
        sequence=4,
    ),
    BlobRequest(digest=_DIGEST, offset=61_440, length=983_040),
    Tensors(values={"prototypes": to_tensor(np.array([[0.0, 1.0]], dtype=np.float16))}),
)

_natural = st.integers(0, 2**63 - 1)
_positive = st.integers(1, 2**63 - 1)
_byte_count = st.integers(0, MAX_BLOB_BYTES)
_digest = st.binary(min_size=32, max_size=32)
_text = st.text(max_size=256)
_class_name = st.text(min_size=1, max_size=128)
_name = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
_per_class = st.lists(_natural, max_size=20).map(tuple)
_blob_ref = st.builds(BlobRef, digest=_digest, size_bytes=_byte_count, name=_text)
_tensor = st.builds(
    Tensor,
    dtype=st.sampled_from(["f2", "f4", "u1", "u2", "u4"]),
    shape=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
    data=st.binary(max_size=200),
)
_tensor_names = st.from_regex(r"[a-z][a-z0-9_]{0,63}", fullmatch=True)
_tensor_map = st.dictionaries(_tensor_names, _tensor, max_size=4)
_head_ref = st.builds(
    HeadRef,
    version=_positive,
    head=_blob_ref,
    devices=_positive,
    prototypes=_positive,
    metrics=st.dictionaries(_text, st.floats(allow_nan=False), max_size=32),
    round=st.none() | _natural,
    tensors=st.none() | _blob_ref,
)
_program = st.builds(
    Program,
    init=_blob_ref,
    step=_blob_ref,
    project=_blob_ref,
    head=_blob_ref,
    persistent=st.lists(_tensor_names, max_size=4).map(tuple),
    uploaded=st.lists(_tensor_names, max_size=4).map(tuple),
    batch_size=st.integers(1, 65535),
)
_large = st.floats(0, 1e6, exclude_min=True)
_share = st.floats(0, 1, exclude_min=True, exclude_max=True)
_perturbation = st.builds(
    Perturbation,
    on=st.sampled_from(["prototypes", "images"]),
    noise=st.sampled_from(["gaussian", "laplace"]),
    scale=_large,
    shrink=_share,
)
_differential_privacy = st.builds(
    DifferentialPrivacy, clip_norm=_large, noise_multiplier=_large, delta=_share, max_epsilon=_large
)
_privacy = st.builds(
    Privacy, epsilon=st.floats(0, 1e9), total_epsilon=st.floats(0, 1e9), delta=_share, releases=_positive
)


def _version_one(message_type: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(message_type, v=st.just(1), **fields)


MESSAGES: st.SearchStrategy[Message | Frame] = st.one_of(
    _version_one(
        Signed,
        key=_digest,
        release=_positive,
        signature=st.binary(min_size=64, max_size=64),
        body=st.binary(max_size=300),
    ),
    _version_one(
        TaskManifest,
        fleet=_name,
        algorithm=_name,
        classes=st.lists(_class_name, min_size=1, max_size=20).map(tuple),
        backbones=st.lists(_blob_ref, min_size=1, max_size=16).map(tuple),
        alpha=st.floats(0, 1, exclude_min=True),
        batch_size=st.integers(1, 65535),
        min_images=st.integers(1, 65535),
        seed=_natural,
        program=st.none() | _program,
        perturbation=st.none() | _perturbation,
        differential_privacy=st.none() | _differential_privacy,
    ),
    _version_one(
        RoundManifest,
        task=_digest,
        number=_natural,
        rounds=_positive,
        epochs=st.integers(0, 65535),
        tensors=_blob_ref,
    ),
    _version_one(
        HeadManifest,
        task=_digest,
        current=_head_ref,
        candidate=st.none() | _head_ref,
        canary_rank_limit=st.integers(0, 2**32),
    ),
    _version_one(Presence, state=st.sampled_from(["online", "stopped", "offline"]), epoch=_natural),
    _version_one(
        DeviceInfo,
        epoch=_natural,
        software=_text,
        runtime=_text,
        backbones=st.lists(_digest, max_size=5).map(tuple),
        images=st.dictionaries(_class_name, _natural, max_size=20),
        unusable_images=_natural,
        problem=_text,
        head_version=_natural,
        refused_messages=st.dictionaries(_text, _natural, max_size=5),
    ),
    _version_one(
        Submission,
        task=_digest,
        sequence=_natural,
        prototypes=_tensor,
        labels=_tensor,
        counts=_tensor,
        images=_natural,
        omitted_classes=_per_class,
        round=_natural,
        tensors=_tensor_map,
        loss=st.none() | st.floats(allow_nan=False),
        privacy=st.none() | _privacy,
    ),
    _version_one(
        Evaluation,
        task=_digest,
        head_version=_positive,
        correct=_per_class,
        incorrect=_per_class,
        previous_correct=_per_class,
        problem=_text,
    ),
    _version_one(
        Frame,
        digest=_digest,
        size_bytes=_byte_count,
        offset=_byte_count,
        data=st.binary(max_size=300),
        key=st.binary(max_size=32),
        signature=st.binary(max_size=64),
    ),
    _version_one(
        Receipt,
        digest=_digest,
        status=st.sampled_from(["received", "missing", "refused"]),
        missing=st.lists(st.tuples(_byte_count, _byte_count), max_size=64).map(tuple),
        reason=st.sampled_from([None, "malformed", "version", "oversized", "digest", "superseded"]),
        detail=_text,
        sequence=st.integers(0, 2**62),
    ),
    _version_one(
        BlobRequest, digest=_digest, offset=_byte_count, length=st.integers(1, 16 * MAX_CHUNK_BYTES)
    ),
    _version_one(Tensors, values=_tensor_map),
)
"""Any valid message of protocol version 1."""
