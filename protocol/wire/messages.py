"""The messages on the wire: one frozen struct each, with bounds on every field.

Unknown map keys are ignored; a key that is missing, has another type or is out of bounds makes the message malformed.
`python -m docs.generate_wire` writes `docs/wire-fields.md` from this module.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

PROTOCOL_VERSION = 1
"""The version in every topic and message."""

MAX_CHUNK_BYTES = 60 * 1024
"""Payload bytes of a frame: with the envelope it fits the default packet limit of all known brokers."""

MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 1024
"""Bytes of a frame with its envelope."""

MAX_MANIFEST_BYTES = 120 * 1024
"""Bytes of a message that is neither a frame nor sent in frames, and of the body of a signed one."""

MAX_KEY_CERTIFICATES = 256
"""Key certificates in a signed message: replacements of the aggregator's key that a device may have missed."""

MAX_SIGNED_BYTES = MAX_MANIFEST_BYTES + 1024 + 208 * MAX_KEY_CERTIFICATES
"""Bytes of a signed message; a key certificate has 208 at most."""

MAX_BLOB_BYTES = 2 * 1024**3
"""Bytes of the largest payload that can be transferred."""

MAX_CLASSES = 4096
"""Classes of a task."""

MAX_IMAGES = 10_000_000
"""Images that a device can count."""

DRIFT_LIMIT = 3.09
"""Drift that a device whose images have not changed exceeds in 1 % of all weeks: of ten windows, one in 1,000."""

MAX_CONTINUED = 16
"""Earlier tasks that a task continues."""

MAX_CONFUSED = 1024
"""Pairs of confused classes in an evaluation."""

CONFIDENCE_BINS = 32
"""Bins of a head's score of an image, in which a device counts its held-out images."""

MAX_MAPPED_SIZE = 4096
"""Values in a mapped feature."""

MAX_RELEASED = 2**24
"""Values of a submission with differential privacy."""

MAX_IMAGES_PER_PERSON = 1000
"""Images of one person that a release counts at most."""

MAX_SUMMED = 1_000_000
"""Submissions in one sum."""

MAX_RELEASED_KINDS = 1024
"""Kinds of releases that a record of them has."""

MAX_SUMMED_VALUES = 2**36
"""Values in all submissions of a sum together: a second operator makes their masks within minutes."""

SEALED_BYTES = 80
"""Bytes of a sealed seed: the encapsulated key of 32, the seed of 32, and a tag of 16."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
Text = Annotated[str, Meta(max_length=256)]
ClassName = Annotated[str, Meta(min_length=1, max_length=128)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""The raw bytes of a sha256."""
PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32, title="Ed25519")]
"""The raw bytes of an Ed25519 public key."""
SealKey = Annotated[bytes, Meta(min_length=32, max_length=32, title="X25519")]
"""The raw bytes of an X25519 public key."""
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
"""The raw bytes of an Ed25519 signature."""
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
ByteCount = Annotated[int, Meta(ge=0, le=MAX_BLOB_BYTES)]
Images = Annotated[int, Meta(ge=0, le=MAX_IMAGES)]
PerClass = Annotated[tuple[Images, ...], Meta(max_length=MAX_CLASSES)]
"""One number per class of the task, in its order."""
ClassIndex = Annotated[int, Meta(ge=0, lt=MAX_CLASSES)]
PerBin = Annotated[tuple[Images, ...], Meta(min_length=CONFIDENCE_BINS, max_length=CONFIDENCE_BINS)]
"""One number per bin of confidence."""
Figure = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""A finite number; NaN is out of every range."""
Epsilon = Annotated[float, Meta(ge=0, le=1e6)]
Version = Annotated[int, Meta(ge=0, le=65535)]
TensorName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]

Reason = Literal[
    "malformed",  # not a message of this protocol, a value out of its bounds, or prototypes of too few images
    "version",  # another protocol version
    "oversized",  # a transfer larger than the aggregator accepts; answered at its first frame
    "shape",  # tensors that do not fit each other, the backbone's feature size or the number of classes
    "dtype",  # a tensor with another dtype than its field requires
    "not_finite",  # NaN or infinity among the prototypes, or in their range
    "unknown_class",  # a label outside of the task's classes
    "unknown_device",  # not in the task file's list of devices, or not enrolled; the device ends with an error
    "unknown_task",  # made for another task than the current one
    "unknown_head",  # an evaluation of a head that does not exist
    "unknown_blob",  # a `get` for a blob that neither the task nor a head names
    "digest",  # the bytes do not match the announced sha256, or frames contradict each other
    "superseded",  # a submission with a higher sequence is stored; the receipt contains it
    "late",  # for a closed round that is too old to count; the device continues with the open round
    "unknown_round",  # for a round that has not begun
    "no_space",  # the aggregator has no room for the transfer; the device keeps the message and retries later
    "signature",  # the signature is missing, invalid, or made with an untrusted key
    "revoked",  # the device's key was revoked
    "replayed",  # a manifest with a lower release than one that was seen
    "implausible",  # values or counts that no device of this fleet can have
    "rate_limited",  # a `get` for a blob downloaded too often lately; the device requests it again later
    "quota",  # a quota of the task file is used up (devices, bytes, uploads an hour); the device retries later
]
"""Why a message was refused: `malformed` for a value out of its field's bounds, before anything else is validated."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages: the protocol version and a type name."""

    v: Version = PROTOCOL_VERSION


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """A blob by its digest: a backbone, a head, a graph or tensors."""

    digest: Digest
    """The sha256 of the blob's bytes."""
    size_bytes: Annotated[int, Meta(ge=1, le=MAX_BLOB_BYTES)]
    """The number of bytes."""
    name: Text
    """A file name for display; never a path to write to."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A dense little-endian array, row-major: `len(data) == prod(shape) * itemsize`."""

    dtype: Literal["f2", "f4", "u1", "u2", "u4", "i1", "i4"]
    """IEEE 754 half or single, unsigned or signed integer (two's complement), with the bytes of an item."""
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...], Meta(max_length=4)]
    """The dimensions."""
    data: bytes
    """The values."""


TensorMap = Annotated[dict[TensorName, Tensor], Meta(max_length=64)]


class Tensors(Message, frozen=True, kw_only=True, tag="tensors"):
    """Arrays by name, as a blob: a round's input for every device."""

    values: TensorMap
    """The arrays; a device casts each to the dtype of the graph's input."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """Local training in rounds: ONNX graphs, and what happens to their state tensors.

    A graph's inputs are bound by name: `feature`, `labels`, a tensor of the device's state, a tensor of the
    round, or, in the head, `local_prototypes` and `local_counts`.
    """

    init: BlobRef
    """ONNX graph: from `feature`, and optionally `labels`, of n >= 0 images to every state tensor."""
    step: BlobRef
    """ONNX graph: one optimizer step, to `loss`, and `next_` and its name for each state tensor that changes."""
    project: BlobRef
    """ONNX graph: from `feature` to `projection`, float32 (n, D), which is averaged into prototypes."""
    head: BlobRef
    """ONNX graph: from `feature` to `logits` and `probabilities`, float32 (n, C)."""
    persistent: Annotated[tuple[TensorName, ...], Meta(max_length=64)]
    """State tensors that are kept from round to round; `init` makes the others anew in every round."""
    uploaded: Annotated[tuple[TensorName, ...], Meta(max_length=64)]
    """State tensors that are uploaded, as the difference from the round's tensor of that name."""
    batch_size: Annotated[int, Meta(ge=1, le=65535)]
    """Images in one step."""


class SecondOperator(msgspec.Struct, frozen=True, kw_only=True):
    """A party that opens sums of masks for the aggregator, and no single one; the aggregator sees masked values."""

    seal_key: SealKey
    """Seeds of masks are sealed to this public key of the second operator, which is for this task alone."""
    seal_key_signature: Signature
    """By `sign_key`, over `seal_key`."""
    sign_key: PublicKey
    """The second operator's long-lived key, which devices know; it signs the sums of masks."""
    aggregator_key: SealKey
    """Masked values are sealed to this public key of the aggregator."""
    min_devices: Annotated[int, Meta(ge=2, le=MAX_SUMMED)]
    """Submissions in a sum, at least."""
    honest: Annotated[int, Meta(ge=1, le=MAX_SUMMED)]
    """Submissions in each sum whose noise counts: each device adds noise of the standard deviation of all divided by
    sqrt(`honest`). At most `min_devices`."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of mapped features instead of prototypes; a mapped feature is D integers from -127 to 127.

    With `batch_size` 2 or more, a group of n images has the row `r = m + sqrt(n) (g - m)`, rounded to the nearest
    integer (ties to even) and clipped: g is the mean of the group's rows, m the mean of all uploaded rows of the class.
    It counts n times: the class sum is the sum of n r, and the second moment the sum of n r r'.

    The second moment is the sum of q q' over all rows q: its upper triangle by rows, D (D + 1) / 2 integers. Subtracted
    is a prediction, `rint(sum of m s' over the classes / 256)` with the class means `m = rint(256 s / n)`, in IEEE 754
    double precision. A difference d is `2 d`, a negative one `-2 d - 1`, in 1 to 5 bytes, as few as hold all of them:
    first the lowest bytes of all values, then the next ones, in one zlib stream (RFC 1950).
    """

    map: BlobRef
    """ONNX graph: from `feature` to `projection`, float32 (n, D) with integers from -127 to 127.

    With differential privacy a `tensors` message: `center` c, `f4` (L), and `components` P, `f4` (D, L). A row is P (f
    - c), shortened to the length 127 if it is longer, and rounded.
    """
    size: Annotated[int, Meta(ge=1, le=MAX_MAPPED_SIZE)]
    """D."""
    second_operator: SecondOperator | UnsetType = UNSET
    """Present if submissions are masked; only with differential privacy."""


class KeyCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """A signed statement that the aggregator signs with another key from now on."""

    number: Positive
    """Greater than the number of every earlier key."""
    key: PublicKey
    """The new key."""
    root: Annotated[bytes, Meta(max_length=32)] = b""
    """The public key that signs the certificates of all later keys; empty if each key signs the next one."""
    signer: PublicKey
    """The previous key, or the root."""
    signature: Signature
    """By `signer`, over the fleet, `number`, `key` and `root`."""


class Signed(Message, frozen=True, kw_only=True, tag="signed"):
    """The payload on `task`, `round` and `head`: an encoded manifest with the aggregator's signature."""

    key: PublicKey
    """The aggregator's key; a device accepts only the key that it trusts."""
    release: Positive
    """Grows with each publication on the topic and each start of the aggregator; devices refuse a lower one."""
    issued_s: Natural
    """The time of the signature, in unix seconds."""
    expires_s: Natural
    """The end of its validity, in unix seconds: 30 days later; the aggregator signs it again every day."""
    signature: Signature
    """Over the fleet, the channel, `release`, `issued_s`, `expires_s` and `body`."""
    body: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]
    """The encoded `task`, `round` or `head` message."""
    certificates: Annotated[tuple[KeyCertificate, ...], Meta(max_length=MAX_KEY_CERTIFICATES)] = ()
    """Lead from the aggregator's earlier keys to `key`."""


class Perturbation(msgspec.Struct, frozen=True, kw_only=True):
    """Noise of the FedTC paper (appendix C.2, eq. 6): `t <- t (1 - p) + e`. It is not differential privacy."""

    on: Annotated[Literal["prototypes", "images"], Meta(examples=["prototypes"])]
    """Values that are perturbed."""
    noise: Literal["gaussian", "laplace"] = "gaussian"
    """Distribution of the noise."""
    scale: Annotated[float, Meta(gt=0, le=1e6, examples=[0.05])]
    """Standard deviation of a Gaussian, or scale of a Laplacian; images have values from 0 to 1."""
    shrink: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share p of each value that is subtracted."""


class DifferentialPrivacy(msgspec.Struct, frozen=True, kw_only=True):
    """Discrete Gaussian noise on the statistics of single images; neighboring data sets differ in one unit."""

    noise_multiplier: Annotated[float, Meta(gt=0, le=1e6)]
    """Standard deviation of the noise divided by what one image can change."""
    delta: Annotated[float, Meta(gt=0, lt=1)]
    """The delta of the privacy loss."""
    max_epsilon: Annotated[float, Meta(gt=0, le=1e6)]
    """A device releases nothing that would bring its total epsilon above this."""
    images_per_person: Annotated[int, Meta(ge=1, le=MAX_IMAGES_PER_PERSON)] | UnsetType = UNSET
    """The unit is a person, of whom at most so many images count; absent if it is one image."""
    person_level: Annotated[int, Meta(ge=1, le=16)] | UnsetType = UNSET
    """The folder below the device's data folder that names a person, 1 for the first; absent if none does."""


class TaskManifest(Message, frozen=True, kw_only=True, tag="task"):
    """The fleet's task, identified by the sha256 of the encoded manifest: other messages carry it as `task`."""

    fleet: Name
    """The fleet."""
    algorithm: Name
    """The algorithm's name, for display; `program` and `statistics` define what devices do."""
    classes: Annotated[tuple[ClassName, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
    """The classes; a label is an index into them, from 0."""
    backbones: Annotated[tuple[BlobRef, ...], Meta(min_length=1, max_length=16)]
    """ONNX files; an image's feature is the concatenation of their outputs."""
    alpha: Annotated[float, Meta(gt=0, le=1)]
    """Fraction of each class's images that outlier filtering keeps: the best `ceil(alpha * n)`."""
    batch_size: Annotated[int, Meta(ge=1, le=65535)]
    """Images averaged in one prototype."""
    min_images: Annotated[int, Meta(ge=1, le=65535)]
    """Classes with fewer images after filtering are omitted."""
    seed: Natural
    """Seed of every shuffle, combined with the device's name and its local secret."""
    program: Program | None = None
    """Local training in rounds, with one prototype per class; without it, one submission and no training."""
    statistics: Statistics | None = None
    """Upload statistics instead of prototypes; not together with `program`, and `alpha` is 1 then."""
    perturbation: Perturbation | None = None
    """Noise that devices add."""
    differential_privacy: DifferentialPrivacy | None = None
    """The noise with which devices release their statistics; `batch_size` and `min_images` are 1 then."""
    columns: (
        Annotated[tuple[tuple[Natural, Positive], ...], Meta(min_length=1, max_length=256)] | UnsetType
    ) = UNSET
    """Ranges of features that prototypes have, start and end, ascending; absent for all. Heads take all features."""
    prototypes: Literal["auto"] | UnsetType = UNSET
    """Upload principal prototypes, where there are enough images; absent for prototypes of batches alone."""
    continues: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MAX_CONTINUED)] | UnsetType = UNSET
    """Earlier tasks, newest first, whose submissions count for this one. Its classes begin with theirs."""

    @property
    def accepts_blocks(self) -> bool:
        """True if submissions may have principal prototypes; numbers of prototypes are then those of their images."""
        return self.prototypes is not UNSET

    @property
    def second_operator(self) -> SecondOperator | None:
        """The party that opens sums of masks; None if submissions are not masked."""
        return (self.statistics and self.statistics.second_operator) or None


class RoundManifest(Message, frozen=True, kw_only=True, tag="round"):
    """The open round. A device that missed earlier rounds joins this one."""

    task: Digest
    """The task."""
    number: Natural
    """The round, from 0; equal to `rounds` after the last round."""
    rounds: Positive
    """The number of rounds."""
    epochs: Annotated[int, Meta(ge=0, le=65535)]
    """Passes over the device's images before it uploads; 0 to upload prototypes without training."""
    tensors: BlobRef
    """A `tensors` message; a tensor with the name of a state tensor replaces it."""


class HeadRef(msgspec.Struct, frozen=True, kw_only=True):
    """A released head."""

    version: Positive
    """1 for a task's first head, increased by 1 for each later one."""
    head: BlobRef
    """The ONNX file, features to probabilities."""
    devices: Positive
    """Devices whose prototypes it was trained on."""
    prototypes: Positive
    """Prototypes it was trained on; where the task's `prototypes` is `auto`, the images in them."""
    metrics: Annotated[dict[Text, Figure], Meta(max_length=32)] = {}
    """Training metrics, for display."""
    round: Natural | None = None
    """The round that it was made from."""
    tensors: BlobRef | None = None
    """With a program: a `tensors` message to bind to the head's inputs, beside the device's own state."""


class HeadManifest(Message, frozen=True, kw_only=True, tag="head"):
    """The fleet's current head, and the candidate that canary devices try first."""

    task: Digest
    """The task that the heads were trained for; a device ignores heads of another task."""
    current: HeadRef
    """The head that devices use."""
    candidate: HeadRef | None = None
    """The head that canary devices use instead of `current`, and evaluate."""
    canary_rank_limit: Annotated[int, Meta(ge=0, le=2**32)] = 0
    """Devices of a lower rank are canaries: the first four bytes of the sha256 of `VERSION/DEVICE`, big-endian."""


PresenceState = Literal["online", "stopped", "offline", "replaced"]


class Presence(Message, frozen=True, kw_only=True, tag="presence"):
    """Presence of a device or of the aggregator, published on every connect; `offline` is the will message."""

    state: PresenceState
    """`stopped`: ended normally; `replaced`: ended, as another program with the same key has started later."""
    epoch: Natural
    """Grows with every start of the program, even if its state is lost, and above what the broker has retained."""
    instance: Annotated[bytes, Meta(max_length=16)] = b""
    """Random, of this start of the program."""
    address: Text = ""
    """The sender's host name and its IP address on the connection, for the operator."""
    key: Annotated[bytes, Meta(max_length=32)] = b""
    """The sender's public key."""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    """Over the topic and all fields but `v` and `key`."""


class DeviceInfo(Message, frozen=True, kw_only=True, tag="info"):
    """A device's software, images and problems, for the operator; published on every connect and every change."""

    epoch: Natural
    """The epoch in the device's presence."""
    software: Text
    """The program's version."""
    runtime: Text
    """The version of ONNX Runtime, and the execution provider."""
    backbones: Annotated[tuple[Digest, ...], Meta(max_length=64)]
    """The task's backbones that the device has."""
    images: Annotated[dict[ClassName, Images], Meta(max_length=MAX_CLASSES)]
    """Images per class."""
    unusable_images: Images
    """Files that cannot be used."""
    problem: Text = ""
    """Why the device cannot take part; empty if it can."""
    warning: Text = ""
    """The operator's next step although the device takes part; empty if there is none."""
    head_version: Natural = 0
    """Version of the installed head of the task; 0 if there is none."""
    refused_messages: Annotated[dict[Text, Natural], Meta(max_length=32)] = {}
    """Refused messages by reason, since the program was started."""
    drift: Figure | msgspec.UnsetType = msgspec.UNSET
    """How far the last predicted images are from the labeled ones, in standard deviations of chance; absent if no
    program has predicted enough images, and under differential privacy."""


class Privacy(msgspec.Struct, frozen=True, kw_only=True):
    """A device's privacy loss, by its own accountant."""

    epsilon: Epsilon
    """Of this submission alone."""
    total_epsilon: Epsilon
    """Of all releases of the device so far, this one included, across tasks."""
    delta: Annotated[float, Meta(gt=0, lt=1)]
    """The delta of both."""
    releases: Positive
    """Number of releases, this one included."""


class SealedMask(msgspec.Struct, frozen=True, kw_only=True):
    """The mask of a submission, which only the second operator can open.

    The mask is the ChaCha20 key stream of the seed, 32 bytes, with a nonce of zeros, as little-endian u4. The context
    is `protofleet 1 mask FLEET TASK DEVICE SEQUENCE VALUES`, with the task in hex and the number of values.
    """

    sealed: Annotated[bytes, Meta(min_length=SEALED_BYTES, max_length=SEALED_BYTES)]
    """The seed, by HPKE (RFC 9180, base mode) with DHKEM(X25519, HKDF-SHA256), HKDF-SHA256 and ChaCha20-Poly1305:
    encapsulated key and ciphertext. The context is its `info`."""
    min_devices: Annotated[int, Meta(ge=2, le=MAX_SUMMED)]
    """Submissions in a sum, at least, before the device allows it."""
    key: PublicKey
    """The device's public key."""
    signature: Signature
    """By `key`, over the context, `min_devices` and `sealed`."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Principal prototypes of a block of at least 50 images, or of several blocks, one after the other.

    k is at most a tenth of the images. The scatter within classes is about `rows' rows + diag(d)`, with the rows in
    units of their scales, and the squared `diagonal` in units of the last scale, d.
    """

    means: Tensor
    """`u1` (p, L), in steps of the tensor `range`: the mean of each class of each block."""
    labels: Tensor
    """`u1`, `u2` or `u4` (p): the class of each mean."""
    counts: Tensor
    """`u1`, `u2` or `u4` (p): images averaged in each mean, at least `batch_size` and `min_images`."""
    rows: Tensor
    """`i1` (k, L): the strongest directions of the scatter within classes, each times the root of its eigenvalue."""
    diagonal: Tensor
    """`u1` (L): the root of what the rows leave of the sum of squared deviations of each value."""
    scales: Tensor
    """`f4` (k + 1), finite and not negative: the step of each row, and of `diagonal`."""


class Submission(Message, frozen=True, kw_only=True, tag="submission"):
    """A device's prototypes: m vectors of L values, or statistics in their place. Sent in frames on `up`.

    m is at least 1, or 0 beside a `block` or a `mask`. L is the feature size of the backbones together, with a program
    the size of its projection. Uploaded tensors of a program are finite `f2` in the shapes of the round's tensors. A
    count is at most `MAX_IMAGES`, and at least the smaller of `min_images` and `batch_size` (with a program, at least
    `min_images`). Without a program, it is at least `batch_size` in a class of several prototypes.

    With differential privacy, class sums and counts have noise, also of classes without images. `prototypes` and the
    tensor `counts`, `i4` (C), are in units of 1/64, and `second_moment` is `i4`, the triangle as it is. The field
    `counts` is the tensor's, rounded down, and at least 1.
    """

    task: Digest
    """The task."""
    sequence: Natural
    """A submission with a higher one replaces earlier ones of the same device and task."""
    prototypes: Tensor
    """`u1` (m, L) in steps of the tensor `range`; with a program finite `f2`; with statistics `i4` or `i1`."""
    labels: Tensor
    """`u1`, `u2` or `u4` (m): the class of each prototype."""
    counts: Tensor
    """`u1`, `u2` or `u4` (m): images averaged in each prototype."""
    images: Images
    """Images read, including held-out, filtered, and deleted ones that unchanged prototypes still average."""
    omitted_classes: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=MAX_CLASSES - 1)], ...], Meta(max_length=MAX_CLASSES)
    ] = ()
    """Class indices with images, but fewer than `min_images`."""
    round: Natural = 0
    """The round; 0 without rounds."""
    tensors: TensorMap = {}
    """With a program exactly its `uploaded`; with class sums `second_moment`, or with a mask `sealed`; else `range`,
    finite `f2` (2, L).

    Where the task's `prototypes` is `auto`, `range` may be `u1` (2, L), in 256 steps between the two values of
    `limits`, finite `f2` (2), which is there then.
    """
    loss: Annotated[float, Meta(ge=-1e6, le=1e6)] | None = None
    """Mean training loss of the last epoch."""
    privacy: Privacy | None = None
    """With differential privacy: the privacy loss; `images` and `counts` are then noisy as well."""
    mask: SealedMask | UnsetType = UNSET
    """With a second operator; m and `images` are 0 then. The one tensor is `sealed`, `u1` (N): what would be the tensor
    `counts`, `prototypes` and `second_moment`, in this order, each value as `u4` plus the mask, modulo 2^32. It is
    sealed to `aggregator_key` as the seed is to the second operator, with `values ` before the context."""
    block: Block | UnsetType = UNSET
    """Images that are in no other prototype; only if the task's `prototypes` is `auto`."""


class MaskedSubmission(msgspec.Struct, frozen=True, kw_only=True):
    """A submission whose mask is to be added."""

    device: Name
    """The device."""
    sequence: Natural
    """The submission's number."""
    mask: SealedMask
    """As the device has uploaded it."""


class SumRequest(Message, frozen=True, kw_only=True, tag="sum_request"):
    """A list of submissions that the aggregator adds up. Sent in frames on `sums/request`."""

    task: Digest
    """The task."""
    seal_key: SealKey
    """The task's `seal_key`."""
    values: Annotated[int, Meta(ge=1, le=MAX_RELEASED)]
    """Values of each submission, as its device has signed; of all together at most `MAX_SUMMED_VALUES`."""
    submissions: Annotated[tuple[MaskedSubmission, ...], Meta(min_length=1, max_length=MAX_SUMMED)]
    """Each device once, in the order of their names."""


class SumReply(Message, frozen=True, kw_only=True, tag="sum_reply"):
    """The second operator's answer to a list. Sent in frames on `sums/reply`."""

    request: Digest
    """The sha256 of the encoded request."""
    masks: Tensor | UnsetType = UNSET
    """`u4`: the sum of all masks, modulo 2^32; absent if the list is refused."""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    """By `sign_key`, over the fleet, `request`, and the sha256 of the values or `problem`."""
    problem: Text = ""
    """Why the list is refused."""


class Confused(msgspec.Struct, frozen=True, array_like=True):
    """Held-out images of one class that a head puts into another one."""

    label: ClassIndex
    """The images' class."""
    predicted: ClassIndex
    """The class that the head finds most probable."""
    images: Annotated[int, Meta(ge=1, le=MAX_IMAGES)]
    """Their number."""


class Evaluation(Message, frozen=True, kw_only=True, tag="evaluation"):
    """A head's results on a device's held-out images.

    Sent in frames on `up`. Without held-out images, the fields that may be absent are absent. `confidence_images` is
    present with `confidence_correct`, and counts as many images as `correct` and `incorrect`.

    Let p be the probability of the head's best class (the first of equal ones), q the sum of the other classes'
    probabilities, both in IEEE 754 double precision, and z = ln(p / q).
    Bin i, from 0 to 31, has the images with -4 + i / 2 <= z < -4 + (i + 1) / 2. The first bin also has the images
    below, the last one the images above and those with q = 0.
    """

    task: Digest
    """The head's task."""
    head_version: Positive
    """The head's version."""
    correct: PerClass
    """Held-out images of each class that the head classified correctly."""
    incorrect: PerClass
    """Held-out images of each class that it classified incorrectly."""
    previous_correct: PerClass = ()
    """`correct` of the previously installed head; empty if there was none."""
    problem: Text = ""
    """Why the device does not use the head (`correct` and `incorrect` are then zeros); empty if it does."""
    correct_with_prior: Images | msgspec.UnsetType = msgspec.UNSET
    """Of all classes, correct with the prior of `edge-client predict --prior auto`; absent for a personal model."""
    confidence_correct: PerBin | msgspec.UnsetType = msgspec.UNSET
    """Correctly classified images in each bin; absent with a program."""
    confidence_images: PerBin | msgspec.UnsetType = msgspec.UNSET
    """All held-out images in each bin."""
    novelty_images: PerBin | msgspec.UnsetType = msgspec.UNSET
    """All held-out images in each bin of novelty, bin i from i / 32, the first and the last one without a limit;
    absent if the head has no novelty."""
    confused: Annotated[tuple[Confused, ...], Meta(max_length=MAX_CONFUSED)] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    """The pairs of classes that the head confused, most images first; the first 1,024 if there are more."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="frame"):
    """A chunk of a transfer: of a submission or evaluation on `up`, of a blob on `blk` or `cast`."""

    v: Version
    """The protocol version, 1."""
    digest: Digest
    """The sha256 of the payload, which identifies the transfer."""
    size_bytes: ByteCount
    """The size of the payload."""
    offset: ByteCount
    """The position of `data` in the payload."""
    data: Annotated[bytes, Meta(max_length=MAX_CHUNK_BYTES)]
    """The bytes; empty only if the payload is."""
    key: Annotated[bytes, Meta(max_length=32)] = b""
    """On `up`: the device's public key."""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    """On `up`: over fleet, device, `digest` and `size_bytes`; the same in all frames of a transfer."""


class Receipt(Message, frozen=True, kw_only=True, tag="receipt"):
    """The aggregator's answer to a transfer or to a `get`."""

    digest: Digest
    """The transfer, or the requested blob."""
    status: Literal["received", "missing", "refused"]
    """Stored durably, incomplete, or refused."""
    missing: Annotated[tuple[tuple[ByteCount, ByteCount], ...], Meta(max_length=64)] = ()
    """With `missing`: byte ranges [start, stop); the first 64 if there are more."""
    reason: Reason | None = None
    """With `refused`: why."""
    detail: Text = ""
    """With `refused`: details for people."""
    sequence: Annotated[int, Meta(ge=0, le=2**62)] = 0
    """With the reason `superseded`: the stored sequence; the next submission needs a higher one."""


class Released(msgspec.Struct, frozen=True, array_like=True):
    """Releases of a device under differential privacy that cost the same."""

    noise_multiplier: Annotated[float, Meta(gt=0, le=1e6)]
    """That of their noise."""
    honest: Annotated[int, Meta(ge=0, le=MAX_SUMMED)]
    """Devices that have this noise together; 1 without a second operator, 0 if it is not known."""
    times: Annotated[int, Meta(ge=1, le=100_000)]
    """Number of such releases."""
    images_per_person: Annotated[int, Meta(ge=0, le=MAX_IMAGES_PER_PERSON)] = 0
    """Images of one person that count at most; 0 if all do."""


class PrivacyRecord(Message, frozen=True, kw_only=True, tag="privacy_record"):
    """All releases of a device: what it has recorded, on `get`, and in answer what it has ever reported, on `ack`."""

    releases: Annotated[tuple[Released, ...], Meta(max_length=MAX_RELEASED_KINDS)] = ()
    """Each kind once."""
    key: Annotated[bytes, Meta(max_length=32)] = b""
    """Ed25519 public key of the sender."""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    """Of the record, for its topic."""


class BlobRequest(Message, frozen=True, kw_only=True, tag="get"):
    """A device's request for bytes [offset, offset + length) of a blob.

    Answered by frames on `blk`, clipped to the end of the blob; not answered past the end.
    """

    digest: Digest
    """The blob."""
    offset: ByteCount
    """The first byte."""
    length: Annotated[int, Meta(ge=1, le=16 * MAX_CHUNK_BYTES)]
    """The number of bytes, at most 16 full frames."""
