"""A device's part in a round: training on its images' features, prototypes, and the local model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edge_client.graphs.onnx_model import Tensors
from edge_client.graphs.program_graph import Graph, Role, graph_metadata, open_graph
from edge_client.prototypes.prototype_averaging import class_means
from edge_client.training.trainer import (
    Checkpoint,
    Diverged,
    Schedule,
    TrainingHooks,
    TrainingSet,
    initial_state,
    project,
    train,
)
from protocol.errors import GraphRefused, MalformedMessage, StateError
from protocol.models.onnx_metadata import GraphMetadata
from protocol.models.onnx_validation import check_graph
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.codec import decode, digest_of
from protocol.wire.messages import BlobRef, Program, RoundManifest, TaskManifest, Tensor
from protocol.wire.messages import Tensors as TensorsMessage

_Array = tuple[
    Literal["<f2", "<f4", "<f8", "<i4", "<i8", "|u1", "|b1"],
    tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...],
    bytes,
]
"""Dtype, shape and bytes of an array in a file."""


class _CheckpointFile(NamedTuple):
    about: list[str | int]
    """The training that it belongs to."""
    checkpoint: Checkpoint


_FORMAT = 2
"""Earlier checkpoints may hold steps in other coordinates: their training begins again."""

_File = TypeVar("_File")


class BlobReader(Protocol):
    """Blobs, such as those of a `BlobStore`."""

    def read(self, digest: bytes) -> bytes:
        """Return the blob with a digest."""


@dataclass(frozen=True)
class LocalModel:
    """A device's local model: what stays on it after a round and is bound to a head."""

    state: Tensors
    prototypes: NDArray[np.float32]
    """The device's own, (C, D); zeros for classes without images."""
    counts: NDArray[np.float32]
    """Images in each, (C,)."""


@dataclass(frozen=True)
class RoundResult:
    """The result of a round on one device: the local model stays there, the rest is uploaded."""

    local_model: LocalModel
    prototypes: NDArray[np.float16]
    """(p, D)."""
    labels: NDArray[np.uint32]
    """Their classes, (p,)."""
    counts: NDArray[np.uint32]
    """Images in each, (p,)."""
    changes: Mapping[str, Tensor]
    """Differences from the round's tensors that the program uploads, float16."""
    loss: float | None
    """Mean over the last epoch; None without epochs."""


def train_round(
    manifest: TaskManifest,
    opened: RoundManifest,
    *,
    data: TrainingSet,
    last: LocalModel | None,
    resumed: Checkpoint | None,
    blobs: BlobReader,
    device_id: str,
    hooks: TrainingHooks,
) -> RoundResult:
    """Train for the opened round and compute what to upload.

    `last` is the local model of earlier rounds, and `resumed` the checkpoint of this round's interrupted training.
    `blobs` has the program's graphs and the round's tensors; `device_id` is a part of the seed of the shuffles.

    Raises:
        GraphRefused: a graph or the round's tensors cannot be used.
        Diverged: the training led to NaN or infinity.
    """
    program = _program(manifest)
    tensors = read_tensors(blobs, opened.tensors)
    if resumed is None:
        state = {} if last is None else last.state
        kept = {name: state[name] for name in program.persistent if name in state}
        # Each graph is closed once it was used: it holds as much memory as the state.
        start = initial_state(_graph(blobs, program, "init"), data, kept=kept, tensors=tensors)
        resumed = Checkpoint(start)
    key = digest_of(f"{manifest.seed}/{device_id}/{opened.number}".encode())
    trained = train(
        _graph(blobs, program, "step"),
        resumed,
        data,
        tensors=tensors,
        schedule=Schedule(opened.epochs, program.batch_size, tuple(key)),
        hooks=hooks,
    )
    projection = project(
        _graph(blobs, program, "project"), data.feature, state=trained.state, tensors=tensors
    )
    classes = len(manifest.classes)
    values, owners, counts = class_means(
        projection, data.labels, num_classes=classes, min_images=manifest.min_images
    )
    prototypes, images = np.zeros((classes, values.shape[1]), np.float32), np.zeros(classes, np.float32)
    prototypes[owners], images[owners] = values, counts
    return RoundResult(
        local_model=LocalModel(trained.state, prototypes, images),
        prototypes=_half("the prototypes", values),
        labels=owners,
        counts=counts,
        changes=_changes(program, trained.state, tensors),
        loss=trained.loss,
    )


def initial_model(
    manifest: TaskManifest, tensors: BlobRef, *, data: TrainingSet | None, blobs: BlobReader
) -> LocalModel:
    """Return the local model of a device that has taken part in no round: the initial state, no prototypes.

    `tensors` are the head's. The initial state may depend on the device's images; `data` is None if there are none.

    Raises:
        GraphRefused: a graph or the tensors cannot be used.
    """
    program, metadata = _program(manifest), _metadata(manifest, blobs)
    if data is None:
        data = TrainingSet(np.empty((0, metadata.feature_size), np.float32), np.empty(0, np.int64))
    round_tensors = read_tensors(blobs, tensors)
    state = initial_state(_graph(blobs, program, "init"), data, kept={}, tensors=round_tensors)
    classes = len(manifest.classes)
    shape = (classes, metadata.projection_size)
    return LocalModel(state, np.zeros(shape, np.float32), np.zeros(classes, np.float32))


def feature_size(manifest: TaskManifest, blobs: BlobReader) -> int:
    """Return L as the task's program declares it; raises GraphRefused if its graph cannot be used."""
    return _metadata(manifest, blobs).feature_size


def read_tensors(blobs: BlobReader, reference: BlobRef) -> dict[str, NDArray[Any]]:
    """Return the arrays of a `tensors` blob; raises GraphRefused if it is malformed, or holds NaN or infinity."""
    data = blobs.read(reference.digest)
    try:
        values = decode(data, TensorsMessage, max_bytes=len(data)).values
        arrays = {name: to_array(tensor) for name, tensor in values.items()}
    except MalformedMessage as error:
        raise GraphRefused(f"{reference.name} cannot be used: {error}") from error
    broken = [
        name for name, array in arrays.items() if array.dtype.kind == "f" and not np.isfinite(array).all()
    ]
    if broken:
        raise GraphRefused(f"{reference.name} cannot be used: {', '.join(broken)} holds NaN or infinity")
    return arrays


def pack(model: LocalModel) -> bytes:
    """Return a local model as bytes; `unpack(pack(x))` equals x."""
    return msgspec.msgpack.encode(model, enc_hook=_packed)


def unpack(data: bytes) -> LocalModel:
    """Return the local model that `pack` wrote; raises StateError if the bytes are not from `pack`."""
    return _read(data, LocalModel, "a local model")


def pack_checkpoint(checkpoint: Checkpoint, about: Sequence[str | int]) -> bytes:
    """Return a checkpoint as bytes, with what it belongs to, and preceded by their digest."""
    data = msgspec.msgpack.encode(_CheckpointFile([_FORMAT, *about], checkpoint), enc_hook=_packed)
    return digest_of(data) + data


def unpack_checkpoint(data: bytes, about: Sequence[str | int]) -> Checkpoint | None:
    """Return the checkpoint that `pack_checkpoint` wrote; None if it belongs to something else.

    Raises:
        StateError: the bytes are not from `pack_checkpoint`, or have changed since.
    """
    digest, data = data[:32], data[32:]
    if digest_of(data) != digest:
        raise StateError("expected a checkpoint, got a file that has changed on disk, or another one")
    file = _read(data, _CheckpointFile, "a checkpoint")
    return file.checkpoint if file.about == [_FORMAT, *about] else None


def _program(manifest: TaskManifest) -> Program:
    if manifest.program is None:
        raise GraphRefused(f"the task ({manifest.algorithm}) has no program: there are no rounds")
    return manifest.program


def _metadata(manifest: TaskManifest, blobs: BlobReader) -> GraphMetadata:
    return graph_metadata(check_graph(blobs.read(_program(manifest).init.digest)))


def _graph(blobs: BlobReader, program: Program, role: Role) -> Graph:
    return open_graph(blobs.read(getattr(program, role).digest), role=role)


def _changes(program: Program, state: Tensors, tensors: Tensors) -> dict[str, Tensor]:
    missing = [name for name in program.uploaded if name not in state or name not in tensors]
    if missing:
        raise GraphRefused(f"the program uploads {', '.join(missing)}, and there is no such tensor")
    return {name: to_tensor(_half(name, state[name] - tensors[name])) for name in program.uploaded}


def _half(name: str, values: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise Diverged(f"{name} exceeded the range of float16")
    return half


def _packed(array: NDArray[Any]) -> _Array:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    packed: _Array = msgspec.convert((little.dtype.str, little.shape, little.tobytes()), _Array)
    return packed


def _unpacked(_kind: type, packed: object) -> NDArray[Any]:
    """Return an array, read-only and without a copy: the file's size bounds its memory."""
    dtype, shape, data = msgspec.convert(packed, _Array)
    return np.frombuffer(data, dtype).reshape(shape)


def _read(data: bytes, kind: type[_File], what: str) -> _File:
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_unpacked)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise StateError(f"expected {what}, got another file ({error})") from error
