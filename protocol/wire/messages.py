"""The messages on the wire: one frozen struct each, with bounds on every field.

A digest is a sha256, 32 raw bytes. Unknown map keys are ignored; a key that is missing, has another type or is out of
bounds makes the message malformed. `docs/protocol.md` says what each field means, and a test compares the two.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

PROTOCOL_VERSION = 1

MAX_CHUNK_BYTES = 60 * 1024
"""Payload bytes of a frame: with the envelope it fits the default packet limit of all known brokers."""

MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 1024
"""Bytes of a frame with its envelope."""

MAX_MANIFEST_BYTES = 120 * 1024
"""Bytes of a message that is not a frame, and of the body of a signed one."""

MAX_KEY_CERTIFICATES = 256
"""Key certificates in a signed message: replacements of the aggregator's key that a device may have missed."""

MAX_SIGNED_BYTES = MAX_MANIFEST_BYTES + 1024 + 208 * MAX_KEY_CERTIFICATES
"""Bytes of a signed message; a key certificate has 208 at most."""

MAX_BLOB_BYTES = 2 * 1024**3
"""Bytes of the largest payload that can be transferred."""

MAX_CLASSES = 4096

MAX_IMAGES = 10_000_000
"""Images that a device can count."""

CONFIDENCE_BINS = 32
"""Bins of a head's score of an image, in which a device counts its held-out images."""

MAX_MAPPED_SIZE = 4096
"""Values in a mapped feature."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
Text = Annotated[str, Meta(max_length=256)]
ClassName = Annotated[str, Meta(min_length=1, max_length=128)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32, title="Ed25519")]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
ByteCount = Annotated[int, Meta(ge=0, le=MAX_BLOB_BYTES)]
Images = Annotated[int, Meta(ge=0, le=MAX_IMAGES)]
PerClass = Annotated[tuple[Images, ...], Meta(max_length=MAX_CLASSES)]
PerBin = Annotated[tuple[Images, ...], Meta(min_length=CONFIDENCE_BINS, max_length=CONFIDENCE_BINS)]
Figure = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""A finite number; NaN is out of every range."""
Epsilon = Annotated[float, Meta(ge=0, le=1e6)]
Version = Annotated[int, Meta(ge=0, le=65535)]
TensorName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]

Reason = Literal[
    "malformed",
    "version",
    "oversized",
    "shape",
    "dtype",
    "not_finite",
    "unknown_class",
    "unknown_device",
    "unknown_task",
    "unknown_head",
    "unknown_blob",
    "digest",
    "superseded",
    "late",
    "unknown_round",
    "no_space",
    "signature",
    "revoked",
    "replayed",
    "implausible",
    "rate_limited",
    "quota",
]
"""Why a message was refused; the detail beside it is for people."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages: the protocol version and a type name."""

    v: Version = PROTOCOL_VERSION


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """A blob by its digest: a backbone, a head, a graph or tensors."""

    digest: Digest
    size_bytes: Annotated[int, Meta(ge=1, le=MAX_BLOB_BYTES)]
    name: Text


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A dense little-endian array, row-major: `len(data) == prod(shape) * itemsize`."""

    dtype: Literal["f2", "f4", "u1", "u2", "u4", "i1", "i4"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...], Meta(max_length=4)]
    data: bytes


TensorMap = Annotated[dict[TensorName, Tensor], Meta(max_length=64)]


class Tensors(Message, frozen=True, kw_only=True, tag="tensors"):
    """Arrays by name, as a blob: a round's input for every device."""

    values: TensorMap


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """Local training in rounds: ONNX graphs, and what happens to their state tensors.

    A graph's inputs are bound by name: `feature`, `labels`, a tensor of the device's state, a tensor of the
    round, or, in the head, `local_prototypes` and `local_counts`.
    """

    init: BlobRef
    step: BlobRef
    project: BlobRef
    head: BlobRef
    persistent: Annotated[tuple[TensorName, ...], Meta(max_length=64)]
    uploaded: Annotated[tuple[TensorName, ...], Meta(max_length=64)]
    batch_size: Annotated[int, Meta(ge=1, le=65535)]


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of mapped features instead of prototypes; a mapped feature is D integers from -127 to 127."""

    map: BlobRef
    size: Annotated[int, Meta(ge=1, le=MAX_MAPPED_SIZE)]
    """D."""


class KeyCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """A signed statement that the aggregator signs with another key from now on."""

    number: Positive
    key: PublicKey
    root: Annotated[bytes, Meta(max_length=32)] = b""
    signer: PublicKey
    signature: Signature


class Signed(Message, frozen=True, kw_only=True, tag="signed"):
    """A signed manifest, as it is retained by the broker."""

    key: PublicKey
    release: Positive
    issued_s: Natural
    expires_s: Natural
    signature: Signature
    body: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]
    certificates: Annotated[tuple[KeyCertificate, ...], Meta(max_length=MAX_KEY_CERTIFICATES)] = ()


class Perturbation(msgspec.Struct, frozen=True, kw_only=True):
    """Noise of the FedTC paper (appendix C.2, eq. 6): `t <- t (1 - p) + e`. It is not differential privacy."""

    on: Annotated[Literal["prototypes", "images"], Meta(examples=["prototypes"])]
    noise: Literal["gaussian", "laplace"] = "gaussian"
    scale: Annotated[float, Meta(gt=0, le=1e6, examples=[0.05])]
    """Standard deviation of a Gaussian, or scale of a Laplacian; images have values from 0 to 1."""
    shrink: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share p of each value that is subtracted."""


class DifferentialPrivacy(msgspec.Struct, frozen=True, kw_only=True):
    """The Gaussian mechanism on clipped sums; neighboring data sets differ in one image."""

    clip_norm: Annotated[float, Meta(ge=1e-6, le=1e6)]
    """S: features are clipped to this L2 norm."""
    noise_multiplier: Annotated[float, Meta(gt=0, le=1e6)]
    """Standard deviation of the noise divided by the sensitivity of the release."""
    delta: Annotated[float, Meta(gt=0, lt=1)]
    max_epsilon: Annotated[float, Meta(gt=0, le=1e6)]
    """A device releases nothing that would bring its total epsilon above this."""


class TaskManifest(Message, frozen=True, kw_only=True, tag="task"):
    """The fleet's task, identified by the sha256 of the encoded manifest."""

    fleet: Name
    algorithm: Name
    classes: Annotated[tuple[ClassName, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
    backbones: Annotated[tuple[BlobRef, ...], Meta(min_length=1, max_length=16)]
    alpha: Annotated[float, Meta(gt=0, le=1)]
    batch_size: Annotated[int, Meta(ge=1, le=65535)]
    min_images: Annotated[int, Meta(ge=1, le=65535)]
    seed: Natural
    program: Program | None = None
    statistics: Statistics | None = None
    perturbation: Perturbation | None = None
    differential_privacy: DifferentialPrivacy | None = None
    columns: (
        Annotated[tuple[tuple[Natural, Positive], ...], Meta(min_length=1, max_length=256)] | UnsetType
    ) = UNSET
    """Ranges of features that prototypes have, start and end, ascending; absent for all. Heads take all features."""


class RoundManifest(Message, frozen=True, kw_only=True, tag="round"):
    """The open round. A device that missed earlier rounds joins this one."""

    task: Digest
    number: Natural
    rounds: Positive
    epochs: Annotated[int, Meta(ge=0, le=65535)]
    tensors: BlobRef


class HeadRef(msgspec.Struct, frozen=True, kw_only=True):
    """A released head."""

    version: Positive
    head: BlobRef
    devices: Positive
    prototypes: Positive
    metrics: Annotated[dict[Text, Figure], Meta(max_length=32)] = {}
    round: Natural | None = None
    tensors: BlobRef | None = None


class HeadManifest(Message, frozen=True, kw_only=True, tag="head"):
    """The fleet's head, and the newer one on canary devices."""

    task: Digest
    current: HeadRef
    candidate: HeadRef | None = None
    canary_rank_limit: Annotated[int, Meta(ge=0, le=2**32)] = 0


PresenceState = Literal["online", "stopped", "offline", "replaced"]


class Presence(Message, frozen=True, kw_only=True, tag="presence"):
    """Presence of a device or of the aggregator."""

    state: PresenceState
    epoch: Natural
    instance: Annotated[bytes, Meta(max_length=16)] = b""
    address: Text = ""
    key: Annotated[bytes, Meta(max_length=32)] = b""
    signature: Annotated[bytes, Meta(max_length=64)] = b""


class DeviceInfo(Message, frozen=True, kw_only=True, tag="info"):
    """A device's software, images and problems, for the operator."""

    epoch: Natural
    software: Text
    runtime: Text
    backbones: Annotated[tuple[Digest, ...], Meta(max_length=64)]
    images: Annotated[dict[ClassName, Images], Meta(max_length=MAX_CLASSES)]
    unusable_images: Images
    problem: Text = ""
    warning: Text = ""
    head_version: Natural = 0
    refused_messages: Annotated[dict[Text, Natural], Meta(max_length=32)] = {}


class Privacy(msgspec.Struct, frozen=True, kw_only=True):
    """A device's privacy loss, by its own accountant."""

    epsilon: Epsilon
    total_epsilon: Epsilon
    delta: Annotated[float, Meta(gt=0, lt=1)]
    releases: Positive


class Submission(Message, frozen=True, kw_only=True, tag="submission"):
    """A device's prototypes or statistics. A submission with a higher sequence replaces earlier ones."""

    task: Digest
    sequence: Natural
    prototypes: Tensor
    """uint8 (m, L), with the tensor `range`; in rounds float16; with statistics int32 (p, D) class sums, or int8 (m, D)
    groups of images."""
    labels: Tensor
    """uint8 or uint16 (m,): class index of each row."""
    counts: Tensor
    """uint8, uint16 or uint32 (m,): images in each row."""
    images: Images
    omitted_classes: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=MAX_CLASSES - 1)], ...], Meta(max_length=MAX_CLASSES)
    ] = ()
    round: Natural = 0
    tensors: TensorMap = {}
    loss: Annotated[float, Meta(ge=-1e6, le=1e6)] | None = None
    privacy: Privacy | None = None
    """The privacy loss, with differential privacy. `images` and `counts` are then noisy as well."""


class Evaluation(Message, frozen=True, kw_only=True, tag="evaluation"):
    """A head's results on a device's held-out images."""

    task: Digest
    head_version: Positive
    correct: PerClass
    incorrect: PerClass
    previous_correct: PerClass = ()
    problem: Text = ""
    correct_with_prior: Images | msgspec.UnsetType = msgspec.UNSET
    """Of all classes, with the class prior of the held-out images."""
    confidence_correct: PerBin | msgspec.UnsetType = msgspec.UNSET
    """Correct predictions in each bin of `protocol.statistics.confidence`."""
    confidence_images: PerBin | msgspec.UnsetType = msgspec.UNSET
    """All predictions in each bin."""
    novelty_images: PerBin | msgspec.UnsetType = msgspec.UNSET
    """Reserved for a second score of the head; devices leave it out."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="frame"):
    """A chunk of a blob or of a device's message: the bytes from `offset` on."""

    v: Version
    digest: Digest
    size_bytes: ByteCount
    offset: ByteCount
    data: Annotated[bytes, Meta(max_length=MAX_CHUNK_BYTES)]
    key: Annotated[bytes, Meta(max_length=32)] = b""
    signature: Annotated[bytes, Meta(max_length=64)] = b""


class Receipt(Message, frozen=True, kw_only=True, tag="receipt"):
    """The aggregator's answer to a transfer: received, missing ranges, or refused."""

    digest: Digest
    status: Literal["received", "missing", "refused"]
    missing: Annotated[tuple[tuple[ByteCount, ByteCount], ...], Meta(max_length=64)] = ()
    """Missing byte ranges [start, stop); the first 64 if there are more."""
    reason: Reason | None = None
    detail: Text = ""
    sequence: Annotated[int, Meta(ge=0, le=2**62)] = 0


class BlobRequest(Message, frozen=True, kw_only=True, tag="get"):
    """A device's request for bytes [offset, offset + length) of a blob."""

    digest: Digest
    offset: ByteCount
    length: Annotated[int, Meta(ge=1, le=16 * MAX_CHUNK_BYTES)]
