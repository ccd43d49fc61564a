"""A device's part in a round: train on its images' features, average, and remember what was learned."""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edge_client.data.prototypes import class_means
from edge_client.runtime.graph import Graph, Tensors, open_graph
from edge_client.runtime.onnx_validation import check_graph
from edge_client.training.trainer import (
    Checkpoint,
    Diverged,
    Schedule,
    TrainingHooks,
    initial_state,
    project,
    train,
)
from protocol.errors import BackboneMismatch, GraphRefused, MalformedMessage, StateError
from protocol.metadata import GraphMetadata, graph_metadata
from protocol.storage.blobstore import BlobStore
from protocol.wire.codec import decode, digest_of, to_array, to_tensor
from protocol.wire.messages import BlobRef, Program, RoundManifest, TaskManifest, Tensor
from protocol.wire.messages import Tensors as TensorsMessage

_DIGEST_BYTES = 32

_ABOUT, _PROTOTYPES, _COUNTS, _STATE = "about", "prototypes", "counts", "state."

_Note = tuple[list[str | int], Annotated[int, Meta(ge=0)], float]
"""What a training on its way is of, its steps, and the sum of its losses."""


@dataclass(frozen=True)
class LocalModel:
    """What a device knows after a round, and binds a head to.

    Args:
        state: the program's, by name.
        prototypes: its own, float32 (C, D); zeros for a class that it has none of.
        counts: images in each, float32 (C,).
    """

    state: Tensors
    prototypes: NDArray[np.float32]
    counts: NDArray[np.float32]


@dataclass(frozen=True)
class TrainingSet:
    """Features of the images to learn from, float32 (n, L), and their classes, int64 (n,)."""

    feature: NDArray[np.float32]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class RoundResult:
    """What a round has made of a device's images.

    Args:
        local_model: what stays here.
        prototypes: float16 (p, D).
        labels: uint32 (p,), their classes.
        counts: uint32 (p,), images in each.
        changes: what the program has uploaded: the change of each tensor since the round's, float16.
        loss: mean over the last epoch; None if there was none.
    """

    local_model: LocalModel
    prototypes: NDArray[np.float16]
    labels: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    changes: Mapping[str, Tensor]
    loss: float | None


def train_round(
    manifest: TaskManifest,
    opened: RoundManifest,
    *,
    data: TrainingSet,
    last: LocalModel | None,
    resumed: Checkpoint | None,
    blobs: BlobStore,
    device_id: str,
    hooks: TrainingHooks,
) -> RoundResult:
    """Take part in a round.

    Args:
        manifest: the task, which has a program.
        opened: the round.
        data: what to learn from.
        last: what was learned in earlier rounds, if anything was.
        resumed: where this round's training was interrupted, if it was.
        blobs: has the program's graphs and the round's tensors.
        device_id: mixed into the seed of the shuffles.
        hooks: what happens beside the training.

    Raises:
        GraphRefused: a graph or the round's tensors cannot be used.
        Diverged: the training has led to NaN or infinity.
        Interrupted: the watch said so.
    """
    program = _program(manifest)
    tensors = read_tensors(blobs, opened.tensors)
    if resumed is None:
        kept = {name: last.state[name] for name in program.persistent if name in last.state} if last else {}
        resumed = Checkpoint(_initial_state(blobs, program, data, kept=kept, tensors=tensors))
    key = digest_of(f"{manifest.seed}/{device_id}/{opened.number}".encode())
    trained = train(
        _graph(blobs, program, "step"),
        resumed,
        feature=data.feature,
        labels=data.labels,
        tensors=tensors,
        schedule=Schedule(opened.epochs, program.batch_size, tuple(key)),
        hooks=hooks,
    )
    projection = project(
        _graph(blobs, program, "project"), feature=data.feature, state=trained.state, tensors=tensors
    )
    classes = len(manifest.classes)
    values, owners, counts = class_means(
        projection, data.labels, num_classes=classes, min_images=manifest.min_images
    )
    return RoundResult(
        local_model=_local_model(trained.state, values, owners, counts, classes=classes),
        prototypes=_half("the prototypes", values),
        labels=owners,
        counts=counts,
        changes=_changes(program, trained.state, tensors),
        loss=trained.loss,
    )


def initial_model(
    manifest: TaskManifest, tensors: BlobRef, *, data: TrainingSet | None, blobs: BlobStore
) -> LocalModel:
    """What a device that took part in no round binds a head to: the first state, and no prototypes.

    Args:
        manifest: the task, which has a program.
        tensors: the head's.
        data: the device's images, for a state that suits them; None if it has none.
        blobs: has the program's graphs and the tensors.

    Raises:
        GraphRefused: a graph or the tensors cannot be used.
    """
    program, metadata = _program(manifest), _metadata(manifest, blobs)
    if data is None:
        data = TrainingSet(np.empty((0, metadata.feature_size), np.float32), np.empty(0, np.int64))
    state = _initial_state(blobs, program, data, kept={}, tensors=read_tensors(blobs, tensors))
    classes = len(manifest.classes)
    shape = (classes, metadata.projection_size)
    return LocalModel(state, np.zeros(shape, np.float32), np.zeros(classes, np.float32))


def feature_size(manifest: TaskManifest, blobs: BlobStore) -> int:
    """L, of all of the task's backbones together, as its program has it.

    Raises:
        GraphRefused: the graph cannot be used.
    """
    return _metadata(manifest, blobs).feature_size


def read_tensors(blobs: BlobStore, reference: BlobRef) -> dict[str, NDArray[Any]]:
    """The arrays in a `tensors` blob; floats are finite.

    Raises:
        GraphRefused: it is none.
    """
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


def pack(local_model: LocalModel) -> bytes:
    """What was learned as bytes; `unpack(pack(x))` equals x."""
    state = {_STATE + name: array for name, array in local_model.state.items()}
    return _to_npz({_PROTOTYPES: local_model.prototypes, _COUNTS: local_model.counts, **state})


def unpack(data: bytes) -> LocalModel:
    """What `pack` was given.

    Raises:
        StateError: the bytes are not from `pack`.
    """
    arrays = _from_npz(data)
    try:
        return LocalModel(_state(arrays), arrays[_PROTOTYPES], arrays[_COUNTS])
    except KeyError as error:
        raise StateError(f"expected what a round has taught, got a file without {error}") from error


def pack_checkpoint(checkpoint: Checkpoint, about: Sequence[str | int]) -> bytes:
    """A training on its way as bytes, with a note of what it is of; their digest is in front."""
    note = json.dumps([list(about), checkpoint.steps, checkpoint.loss_sum])
    state = {_STATE + name: array for name, array in checkpoint.state.items()}
    data = _to_npz({_ABOUT: np.array(note), **state})
    return digest_of(data) + data


def unpack_checkpoint(data: bytes, about: Sequence[str | int]) -> Checkpoint | None:
    """What `pack_checkpoint` was given, if it is of the same.

    Raises:
        StateError: the bytes are not from `pack_checkpoint`, or were changed since.
    """
    digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if digest_of(data) != digest:
        raise StateError(
            "expected a training on its way, got a file that was changed on disk, or another one"
        )
    arrays = _from_npz(data)
    try:
        of, steps, loss_sum = msgspec.json.decode(str(arrays[_ABOUT]), type=_Note)
    except (KeyError, msgspec.MsgspecError, UnicodeError) as error:
        raise StateError(
            f"expected a training on its way, got a file without a note of it ({error})"
        ) from error
    return Checkpoint(_state(arrays), steps, loss_sum) if of == list(about) else None


def _program(manifest: TaskManifest) -> Program:
    if manifest.program is None:
        raise GraphRefused(f"the task ({manifest.algorithm}) has no program: there are no rounds")
    return manifest.program


def _initial_state(
    blobs: BlobStore, program: Program, data: TrainingSet, *, kept: Tensors, tensors: Tensors
) -> dict[str, NDArray[Any]]:
    """The state to begin with; the graph that made it is closed again, for it holds as much memory."""
    init = _graph(blobs, program, "init")
    return initial_state(init, feature=data.feature, labels=data.labels, kept=kept, tensors=tensors)


def _metadata(manifest: TaskManifest, blobs: BlobStore) -> GraphMetadata:
    try:
        return graph_metadata(check_graph(blobs.read(_program(manifest).init.digest)))
    except BackboneMismatch as error:
        raise GraphRefused(str(error)) from error


def _graph(blobs: BlobStore, program: Program, role: Any) -> Graph:
    return open_graph(blobs.read(getattr(program, role).digest), role=role)


def _local_model(
    state: Tensors,
    values: NDArray[np.float32],
    owners: NDArray[np.uint32],
    counts: NDArray[np.uint32],
    *,
    classes: int,
) -> LocalModel:
    prototypes = np.zeros((classes, values.shape[1]), np.float32)
    images = np.zeros(classes, np.float32)
    prototypes[owners], images[owners] = values, counts
    return LocalModel(state, prototypes, images)


def _changes(program: Program, state: Tensors, tensors: Tensors) -> dict[str, Tensor]:
    missing = [name for name in program.uploaded if name not in state or name not in tensors]
    if missing:
        raise GraphRefused(f"the program wants to know of {', '.join(missing)}, and there is no such tensor")
    return {name: to_tensor(_half(name, state[name] - tensors[name])) for name in program.uploaded}


def _half(what: str, values: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise Diverged(f"{what} grew past what float16 holds")
    return half


def _state(arrays: Tensors) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(_STATE): array for name, array in arrays.items() if name.startswith(_STATE)}


def _to_npz(arrays: Tensors) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub knows only of allow_pickle by name
    return file.getvalue()


def _from_npz(data: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of a file, read-only; what they take is in the file, whatever it says of itself.

    Raises:
        StateError: it is none of `_to_npz`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
                raise StateError("its arrays are compressed")
            return {name.removesuffix(".npy"): _from_npy(file.read(name)) for name in file.namelist()}
    except Exception as error:  # over bytes that are no such file, zipfile and numpy raise what they like
        raise StateError(f"expected arrays, got another file ({error})") from error


def _from_npy(data: bytes) -> NDArray[Any]:
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise StateError("an array has another version of numpy's format")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    return np.frombuffer(file.read(), dtype).reshape(shape, order="F" if is_fortran else "C")
