"""One fixed message of every type, and a hypothesis strategy for any valid message."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from hypothesis import strategies as st

from protocol.wire import messages
from protocol.wire.arrays import to_tensor
from protocol.wire.messages import (
    PROTOCOL_VERSION,
    BlobRef,
    BlobRequest,
    DeviceInfo,
    DifferentialPrivacy,
    Evaluation,
    Frame,
    HeadManifest,
    HeadRef,
    KeyCertificate,
    MaskedSubmission,
    Message,
    Perturbation,
    Presence,
    Privacy,
    PrivacyRecord,
    Program,
    Receipt,
    Released,
    RoundManifest,
    SealedMask,
    SecondOperator,
    Signed,
    Statistics,
    Submission,
    SumReply,
    SumRequest,
    TaskManifest,
    Tensors,
)
from protocol.wire.principal_prototypes import PrincipalPrototypes
from protocol.wire.quantization import principal_fields

WIRE_TYPES: list[type[msgspec.Struct]] = [
    value
    for value in vars(messages).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not Message
]
"""All messages and their parts."""

_DIGEST = bytes(range(32))
_MASK = SealedMask(sealed=bytes(range(80)), min_devices=10, key=_DIGEST, signature=bytes(range(64)))

SAMPLES: tuple[Message | Frame, ...] = (
    Signed(
        key=_DIGEST,
        release=1_700_000_000,
        issued_s=1_700_000_000,
        expires_s=1_702_592_000,
        signature=bytes(range(64)),
        body=b"bytes of a manifest",
        certificates=(
            KeyCertificate(
                number=1_700_000_000, key=_DIGEST, root=_DIGEST, signer=_DIGEST, signature=bytes(range(64))
            ),
        ),
    ),
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
        statistics=Statistics(
            map=BlobRef(digest=_DIGEST, size_bytes=6, name="map.onnx"),
            size=4,
            second_operator=SecondOperator(
                seal_key=_DIGEST,
                seal_key_signature=bytes(range(64)),
                sign_key=_DIGEST,
                aggregator_key=_DIGEST,
                min_devices=10,
                honest=6,
            ),
        ),
        perturbation=Perturbation(on="prototypes", noise="laplace", scale=0.05, shrink=0.1),
        differential_privacy=DifferentialPrivacy(noise_multiplier=2.5, delta=1e-5, max_epsilon=8.0),
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
    Presence(
        state="online",
        epoch=1_700_000_000,
        instance=bytes(range(16)),
        address="shed-1/192.0.2.7",
        key=bytes(range(32)),
        signature=bytes(range(64)),
    ),
    DeviceInfo(
        epoch=1_700_000_000,
        software="0.1.0",
        runtime="1.31.1 CPUExecutionProvider",
        backbones=(_DIGEST,),
        images={"cat": 40, "Großer Käfer": 0},
        unusable_images=1,
        problem="the step of round 2 diverged",
        warning="a copy of this device was started earlier",
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
        mask=_MASK,
    ),
    Submission(
        task=_DIGEST,
        sequence=2,
        labels=to_tensor(np.zeros(0, np.uint8)),
        counts=to_tensor(np.zeros(0, np.uint8)),
        images=60,
        **principal_fields(
            np.zeros((0, 3), np.float16),
            PrincipalPrototypes(
                means=np.array([[0.5, 1, 2], [3, 4, 5]], np.float32),
                labels=np.array([0, 1]),
                counts=np.array([25, 35]),
                rows=np.array([[2, 0, 1]], np.float32),
                diagonal=np.array([1, 4, 9], np.float32),
            ),
        ),
    ),
    Submission(
        task=_DIGEST,
        sequence=3,
        prototypes=to_tensor(np.zeros((0, 3), np.int32)),
        labels=to_tensor(np.zeros(0, np.uint8)),
        counts=to_tensor(np.zeros(0, np.uint8)),
        images=0,
        privacy=Privacy(epsilon=1.5, total_epsilon=2.25, delta=1e-5, releases=2),
        mask=_MASK,
        tensors={"sealed": to_tensor(np.arange(60, dtype=np.uint8))},
    ),
    SumRequest(
        task=_DIGEST,
        seal_key=_DIGEST,
        values=9,
        submissions=(MaskedSubmission(device="shed-1", sequence=1, mask=_MASK),),
    ),
    SumReply(
        request=_DIGEST,
        masks=to_tensor(np.array([1, 2**32 - 1], dtype=np.uint32)),
        signature=bytes(range(64)),
        problem="a submission is in an earlier list",
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
    PrivacyRecord(
        releases=(Released(2.5, 1, 3), Released(3.727, 6, 1)), key=_DIGEST, signature=bytes(range(64))
    ),
    Tensors(values={"prototypes": to_tensor(np.array([[0.0, 1.0]], dtype=np.float16))}),
)

_BOUNDS = ("gt", "ge", "lt", "le", "min_length", "max_length", "pattern")


def _values(hint: Any, **bounds: Any) -> st.SearchStrategy[Any]:
    """Return valid values of a type; `bounds` are those of its `msgspec.Meta`."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        given = {name: getattr(meta, name) for meta in arguments[1:] for name in _BOUNDS}
        return _values(arguments[0], **{name: bound for name, bound in given.items() if bound is not None})
    if kind is Literal:
        return st.sampled_from(arguments)
    if kind in {Union, types.UnionType}:
        return st.one_of([_values(argument) for argument in arguments])
    if kind is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(_values, arguments))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind, include_extras=True)
        fields = {name: _values(hints[name]) for name in kind.__struct_fields__ if name != "v"}
        version = {"v": st.just(PROTOCOL_VERSION)} if "v" in hints else {}
        return st.builds(kind, **version, **fields)
    return _builtin_values(kind, arguments, **bounds)


def _builtin_values(  # noqa: PLR0911 - one return for each type
    kind: type, arguments: tuple[Any, ...], **bounds: Any
) -> st.SearchStrategy[Any]:
    least, most = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    size = {"min_size": bounds.get("min_length", 0)}
    if kind is int:
        return st.integers(least, most).filter(lambda value: value != bounds.get("lt"))
    if kind is float:
        return st.floats(least, most, exclude_min="gt" in bounds, exclude_max="lt" in bounds, allow_nan=False)
    if kind is bytes:
        return st.binary(**size, max_size=min(300, bounds.get("max_length", 300)))
    if kind is str and "pattern" in bounds:
        return st.from_regex(bounds["pattern"], fullmatch=True)
    if kind is str:
        return st.text(**size, max_size=bounds["max_length"])
    most_items = max(size["min_size"], min(8, bounds.get("max_length", 8)))
    if kind is dict:
        return st.dictionaries(*map(_values, arguments), **size, max_size=most_items)
    if kind is tuple:
        return st.lists(_values(arguments[0]), **size, max_size=most_items).map(tuple)
    assert kind in {types.NoneType, msgspec.UnsetType}, kind
    return st.none() if kind is types.NoneType else st.just(msgspec.UNSET)


MESSAGES: st.SearchStrategy[Message | Frame] = st.one_of([_values(type(sample)) for sample in SAMPLES])
"""Any valid message of this protocol version."""
