"""Every message of the wire contract: one frozen struct each, shape, unit and bound beside every field.

A digest is the 32 raw bytes of a sha256. A map key a reader does not know is ignored; a key that is missing,
of another type or out of its bounds makes the whole message malformed. `docs/protocol.md` lists the same
fields in words, and a test compares the two.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1

MAX_CHUNK_BYTES = 60 * 1024
"""Bytes of payload in one frame: it fits with its envelope under every broker's packet limit we know."""

MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 1024
"""Bytes of one frame with its envelope."""

MAX_MANIFEST_BYTES = 120 * 1024
"""Bytes of one message that is not a frame, and of what a signed one says."""

MAX_SIGNED_BYTES = MAX_MANIFEST_BYTES + 512
"""Bytes of one signed message."""

MAX_BLOB_BYTES = 2 * 1024**3
"""Bytes of the largest thing that is ever transferred."""

MAX_CLASSES = 4096

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
Text = Annotated[str, Meta(max_length=256)]
ClassName = Annotated[str, Meta(min_length=1, max_length=128)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32, title="Ed25519")]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
ByteCount = Annotated[int, Meta(ge=0, le=MAX_BLOB_BYTES)]
PerClass = Annotated[tuple[Natural, ...], Meta(max_length=MAX_CLASSES)]
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
]
"""Why something was refused, for a program; the detail beside it is for a person."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all messages share: the protocol version, and a type name of their own."""

    v: Annotated[int, Meta(ge=0)] = PROTOCOL_VERSION


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """A blob by its digest: a backbone, a head, anything large."""

    digest: Digest
    size_bytes: ByteCount
    name: Text


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A dense little-endian array, row-major: `len(data) == prod(shape) * itemsize`."""

    dtype: Literal["f2", "f4", "u1", "u2", "u4"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...], Meta(max_length=4)]
    data: bytes


TensorMap = Annotated[dict[TensorName, Tensor], Meta(max_length=64)]


class Tensors(Message, frozen=True, kw_only=True, tag="tensors"):
    """Arrays by name, as a blob: what every device needs in a round."""

    values: TensorMap


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """How devices learn in rounds: ONNX graphs, and what becomes of the state that they hand on.

    A graph's inputs are bound by name: `feature`, `labels`, a tensor of the device's state, a tensor of the
    round, or, in the head, `local_prototypes` and `local_counts`.
    """

    init: BlobRef
    """`feature`, and `labels` if it asks for them, to every tensor of the state."""
    step: BlobRef
    """One step of the optimizer: the state and a batch to `loss` and, for each tensor that changes, `next_NAME`."""
    project: BlobRef
    """`feature` to `projection`: what is averaged into prototypes."""
    head: BlobRef
    """`feature` to `logits` and `probabilities`."""
    persistent: Annotated[tuple[TensorName, ...], Meta(max_length=64)]
    """State that stays from round to round; the rest begins anew with `init`."""
    uploaded: Annotated[tuple[TensorName, ...], Meta(max_length=64)]
    """State that a submission carries, as its change since the round's tensor of that name."""
    batch_size: Annotated[int, Meta(ge=1, le=65535)]
    """Images in one step."""


class Signed(Message, frozen=True, kw_only=True, tag="signed"):
    """A manifest as it is retained: its exact bytes, and the aggregator's word that they are its own."""

    key: PublicKey
    """Ed25519, the aggregator's: a device believes the one that it knows."""
    release: Positive
    """Grows with everything else that is said on a topic, an older head too, and with every start of the aggregator."""
    signature: Signature
    """Ed25519 over the fleet, the channel, `release` and `body` (`protocol.wire.signing`)."""
    body: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]


class Perturbation(msgspec.Struct, frozen=True, kw_only=True):
    """Noise as in FedTC, appendix C.2, eq. 6: `t <- t (1 - p) + e`. It is no differential privacy."""

    on: Literal["prototypes", "images"]
    noise: Literal["gaussian", "laplace"] = "gaussian"
    """What e is drawn from."""
    scale: Annotated[float, Meta(gt=0, le=1e6)]
    """Standard deviation of a Gaussian e, or the scale of a Laplacian; for images, of values from 0 to 1."""
    shrink: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """p."""


class DifferentialPrivacy(msgspec.Struct, frozen=True, kw_only=True):
    """The Gaussian mechanism on clipped sums; one image more or less is what it hides."""

    clip_norm: Annotated[float, Meta(gt=0, le=1e6)]
    """S: a longer feature is shortened to this L2 norm."""
    noise_multiplier: Annotated[float, Meta(gt=0, le=1e6)]
    """Standard deviation of the noise over the sensitivity of what is released."""
    delta: Annotated[float, Meta(gt=0, lt=1)]
    max_epsilon: Annotated[float, Meta(gt=0, le=1e6)]
    """A device sends nothing that would bring all that it ever sent of its images beyond this."""


class TaskManifest(Message, frozen=True, kw_only=True, tag="task"):
    """What the fleet works on. The sha256 of its bytes as retained is the task's identity."""

    fleet: Name
    algorithm: Name
    """Its name, for a person: what there is to do, `program` says."""
    classes: Annotated[tuple[ClassName, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
    """Class names; a label is an index into them."""
    backbones: Annotated[tuple[BlobRef, ...], Meta(min_length=1, max_length=16)]
    """An image's feature is what all of them make of it, one after the other."""
    alpha: Annotated[float, Meta(gt=0, le=1)]
    """Share of each class's images that outlier filtering keeps (FedTC eq. 3)."""
    batch_size: Annotated[int, Meta(ge=1, le=65535)]
    """Images averaged in one prototype (FedTC eq. 4)."""
    min_images: Annotated[int, Meta(ge=1, le=65535)]
    """A class with fewer kept images than this sends nothing."""
    seed: Natural
    """Seed of every shuffle, mixed with the device's id and a secret that it has for itself."""
    program: Program | None = None
    """How to take part in rounds, with one prototype a class; without it there is one submission, and no training."""
    perturbation: Perturbation | None = None
    differential_privacy: DifferentialPrivacy | None = None


class RoundManifest(Message, frozen=True, kw_only=True, tag="round"):
    """The round that is open. A device that missed others joins this one."""

    task: Digest
    number: Natural
    """From 0; as great as `rounds` once all of them are over."""
    rounds: Positive
    epochs: Annotated[int, Meta(ge=0, le=65535)]
    """Passes over the device's images before it uploads; 0 to upload prototypes without training."""
    tensors: BlobRef
    """What every device gets: a `tensors` message. One named like a tensor of the state takes its place."""


class HeadRef(msgspec.Struct, frozen=True, kw_only=True):
    """A head that devices may use."""

    version: Positive
    head: BlobRef
    devices: Positive
    """Devices whose prototypes it was trained on."""
    prototypes: Positive
    metrics: Annotated[dict[Text, float], Meta(max_length=32)] = {}
    round: Natural | None = None
    """The round that it closed."""
    tensors: BlobRef | None = None
    """With a program: a `tensors` message to bind to the head's inputs, beside the device's own state."""


class HeadManifest(Message, frozen=True, kw_only=True, tag="head"):
    """Which head the fleet uses, and which newer one some devices try first."""

    task: Digest
    current: HeadRef
    candidate: HeadRef | None = None
    """What the canaries use in the place of `current`, and report on."""
    canary_rank_limit: Annotated[int, Meta(ge=0, le=2**32)] = 0
    """A device is a canary if its rank for the candidate's version is below this (`canary_rank`)."""


PresenceState = Literal["online", "stopped", "offline"]


class Presence(Message, frozen=True, kw_only=True, tag="presence"):
    """Whether a device, or the aggregator, is there."""

    state: PresenceState
    epoch: Natural
    """Grows with every start of the sender, so that an old Last Will cannot end a new session."""


class DeviceInfo(Message, frozen=True, kw_only=True, tag="info"):
    """What a device runs and what it has, for the operator."""

    epoch: Natural
    software: Text
    runtime: Text
    """ONNX Runtime's version and the execution provider in use."""
    backbones: Annotated[tuple[Digest, ...], Meta(max_length=64)]
    """Backbones cached on the device."""
    images: Annotated[dict[ClassName, Natural], Meta(max_length=MAX_CLASSES)]
    """Images of each class found on the device."""
    unusable_images: Natural
    """Images that could not be used."""
    problem: Text = ""
    """What keeps the device from taking part; empty if nothing does."""
    head_version: Natural = 0
    """The head of its task in use; 0 if there is none."""
    refused_messages: Annotated[dict[Text, Natural], Meta(max_length=32)] = {}
    """What came over the wire and was not believed, and how often, since the program was started."""


class Privacy(msgspec.Struct, frozen=True, kw_only=True):
    """What a device has spent on its images, by the accountant that it runs itself."""

    epsilon: Annotated[float, Meta(ge=0)]
    """Of this submission alone."""
    total_epsilon: Annotated[float, Meta(ge=0)]
    """Of all that the device has released so far, this one included, of whatever task."""
    delta: Annotated[float, Meta(gt=0, lt=1)]
    """At which both hold."""
    releases: Positive
    """How many there were, this one included."""


class Submission(Message, frozen=True, kw_only=True, tag="submission"):
    """Prototypes of one device. A greater sequence supersedes a smaller one."""

    task: Digest
    sequence: Natural
    prototypes: Tensor
    """float16 (m, L)."""
    labels: Tensor
    """uint8 or uint16 (m,): class index of each prototype."""
    counts: Tensor
    """uint8, uint16 or uint32 (m,): images averaged in each prototype."""
    images: Natural
    """Images read, kept or filtered out."""
    omitted_classes: Annotated[tuple[Natural, ...], Meta(max_length=MAX_CLASSES)] = ()
    """Class indices with images, but fewer than `min_images` of them."""
    round: Natural = 0
    """The round that it is for."""
    tensors: TensorMap = {}
    """What the program has uploaded."""
    loss: float | None = None
    """Mean over the last epoch of training."""
    privacy: Privacy | None = None
    """With differential privacy: what it cost. Then `images` and `counts` are noisy as well."""


class Evaluation(Message, frozen=True, kw_only=True, tag="evaluation"):
    """How a head does on the images that a device kept out of its prototypes."""

    task: Digest
    head_version: Positive
    correct: PerClass
    """Held-out images of each class that the head got right."""
    incorrect: PerClass
    previous_correct: PerClass = ()
    """Those of each class that the head in use before got right; empty if there was none."""
    problem: Text = ""
    """Why the device does not use the head; empty if it does."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="frame"):
    """A piece of a blob or of a device's message: `data` are the bytes from `offset` on."""

    v: Annotated[int, Meta(ge=0)]
    digest: Digest
    size_bytes: ByteCount
    """Bytes of the whole."""
    offset: ByteCount
    data: Annotated[bytes, Meta(max_length=MAX_CHUNK_BYTES)]
    key: Annotated[bytes, Meta(max_length=32)] = b""
    """On `up`: Ed25519, the device's."""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    """On `up`: over the fleet, the device, `digest` and `size_bytes`; the same in all frames of a transfer."""


class Receipt(Message, frozen=True, kw_only=True, tag="receipt"):
    """The aggregator's word on a transfer: received for good, what is missing, or why it was refused."""

    digest: Digest
    status: Literal["received", "missing", "refused"]
    missing: Annotated[tuple[tuple[ByteCount, ByteCount], ...], Meta(max_length=64)] = ()
    """Byte ranges [start, stop) still wanted; the first ones, if there are more than fit."""
    reason: Reason | None = None
    detail: Text = ""
    sequence: Annotated[int, Meta(ge=0, le=2**62)] = 0
    """With `superseded`: the sequence that stands; send a greater one. Whoever forges it leaves room for others."""


class BlobRequest(Message, frozen=True, kw_only=True, tag="get"):
    """A device asks for bytes [offset, offset + length) of a blob."""

    digest: Digest
    offset: ByteCount
    length: Annotated[int, Meta(ge=1, le=16 * MAX_CHUNK_BYTES)]


WIRE_TYPES: tuple[type[msgspec.Struct], ...] = (
    Signed,
    TaskManifest,
    RoundManifest,
    HeadManifest,
    Presence,
    DeviceInfo,
    Submission,
    Evaluation,
    Frame,
    Receipt,
    BlobRequest,
    Tensors,
    Program,
    Perturbation,
    DifferentialPrivacy,
    Privacy,
    HeadRef,
    BlobRef,
    Tensor,
)
"""Everything that crosses the wire, in the order of `docs/protocol.md`."""
