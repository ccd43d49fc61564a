"""FedPCL and FPL in process: devices' and aggregator's own functions, graphs and messages, without a network."""

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.tensors import pack_tensors, unpack_tensors
from aggregator.config.schema import Robust
from aggregator.graphs.program_export import Graphs, build
from aggregator.intake.validation import Expectation, Prototypes
from aggregator.tasks.manifests import program_of, round_manifest
from aggregator.training.robust.rounds import contribution_of, robust_contributions
from aggregator.training.robust.weights import limited
from edge_client.heads.head import open_round_head
from edge_client.kinds.prepared_submission import PreparedSubmission, encode_submission
from edge_client.store.stored_values import ClassReport
from edge_client.training.local_round import LocalModel, RoundResult, train_round
from edge_client.training.trainer import TrainingHooks, TrainingSet
from protocol.storage.blobstore import BlobStore
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, RoundManifest, TaskManifest
from protofleet.simulation.engine import LOCAL, Engine
from protofleet.simulation.fleet import Client
from protofleet.submissions import decoded, task_manifest

HOOKS = TrainingHooks(on_checkpoint=lambda _: None, on_progress=lambda _done, _total: None)


Falsify = Callable[[int, Prototypes], Prototypes]
"""Returns a client's submission as the aggregator gets it, by the client's number."""

ROBUST = Robust()


def honest(_client: int, part: Prototypes) -> Prototypes:
    """Return a submission unchanged."""
    return part


_built: Any = functools.lru_cache(maxsize=16)(build)
"""All fleets of a seed share their graphs."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a fleet's rounds."""

    up_bytes: NDArray[np.float64]
    """The size of an encoded submission, mean over the devices, (rounds,)."""
    down_bytes: NDArray[np.int64]
    """The size of the blob of tensors that a round starts from, (rounds,)."""
    once_bytes: int
    """The size of the graphs, and of the tensors that the last round leaves."""
    probabilities: tuple[NDArray[np.float32], ...]
    """Each client's probabilities of its test images, (K) times (m, C)."""
    seconds: float
    """Processor time of the rounds, without the export of graphs and the evaluation."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    algorithm: RoundAlgorithm
    manifest: TaskManifest
    expectation: Expectation
    blobs: BlobStore
    first: BlobRef
    graph_bytes: int


def run_rounds(
    algorithm: RoundAlgorithm,
    clients: Sequence[Client],
    *,
    classes: int,
    seed: int,
    robust: Robust = ROBUST,
    falsify: Falsify = honest,
    engine: Engine = LOCAL,
) -> Outcome:
    """Run all rounds of a fleet, whose submissions `falsify` changes, and evaluate every client's head."""
    with tempfile.TemporaryDirectory() as folder:
        blobs = BlobStore(Path(folder))
        task = _prepare(algorithm, blobs, feature_size=clients[0].train.shape[1], classes=classes, seed=seed)
        local_model: list[LocalModel | None] = [None] * len(clients)
        tensors, up, down = task.first, [], []
        started_s = engine.processor_s()
        for number in range(algorithm.rounds):
            down.append(tensors.size_bytes)
            items = (
                (index, client.train, client.train_labels, local_model[index])
                for index, client in enumerate(clients)
            )
            made = list(
                engine.map(_client_round, _round_of(task, number, tensors), items, count=len(clients))
            )
            local_model = [part.local_model for part, _ in made]
            payloads = [payload for _, payload in made]
            up.append(np.mean([len(payload) for payload in payloads]))
            tensors = _aggregate(task, payloads, tensors, number=number, robust=robust, falsify=falsify)
        seconds = engine.processor_s() - started_s
        probabilities = tuple(
            _probabilities(task, client, model, tensors)
            for client, model in zip(clients, local_model, strict=True)
            if model is not None
        )
    return Outcome(
        up_bytes=np.array(up),
        down_bytes=np.array(down),
        once_bytes=task.graph_bytes + tensors.size_bytes,
        probabilities=probabilities,
        seconds=seconds,
    )


def _prepare(
    algorithm: RoundAlgorithm, blobs: BlobStore, *, feature_size: int, classes: int, seed: int
) -> _Task:
    """Return the task as the aggregator would publish it, with its graphs in `blobs`."""
    graphs: Graphs = _built(algorithm, feature_size=feature_size, num_classes=classes, seed=seed)
    program = program_of(algorithm, {role: _put(blobs, data, role) for role, data in vars(graphs).items()})
    manifest = task_manifest(
        algorithm.name,
        tuple(map(str, range(classes))),
        alpha=1.0,
        batch_size=1,
        min_images=1,
        seed=seed,
        program=program,
    )
    first = algorithm.first_tensors(feature_size=feature_size, num_classes=classes, seed=seed)
    shapes = {name: first[name].shape for name in algorithm.uploaded}
    return _Task(
        algorithm=algorithm,
        manifest=manifest,
        expectation=Expectation(
            digest_of(encode(manifest)), manifest, algorithm.prototype_size(feature_size), shapes
        ),
        blobs=blobs,
        first=_put(blobs, pack_tensors(first), "tensors"),
        graph_bytes=sum(map(len, vars(graphs).values())),
    )


def _put(blobs: BlobStore, data: bytes, name: str) -> BlobRef:
    return BlobRef(digest=blobs.put(data), size_bytes=len(data), name=name)


@dataclass(frozen=True, kw_only=True)
class _Round:
    """A round's task, manifests and files, the same for all clients."""

    task: bytes
    manifest: TaskManifest
    opened: RoundManifest
    files: Mapping[bytes, bytes]
    """The graphs and the round's tensors, by their digests."""

    def read(self, digest: bytes) -> bytes:
        """Return a file, as from a store."""
        return self.files[digest]


def _round_of(task: _Task, number: int, tensors: BlobRef) -> _Round:
    program = task.manifest.program
    references = [
        tensors,
        *(() if program is None else (program.init, program.step, program.project, program.head)),
    ]
    return _Round(
        task=task.expectation.task,
        manifest=task.manifest,
        opened=round_manifest(task.expectation.task, number, learning=task.algorithm, tensors=tensors),
        files={each.digest: task.blobs.read(each.digest) for each in references},
    )


Device = tuple[int, NDArray[np.float32], NDArray[np.int64], LocalModel | None]
"""A client's number, its features and labels, and its local model of the round before."""


def _client_round(task: _Round, device: Device) -> tuple[RoundResult, bytes]:
    """Return a client's result of a round, and its encoded submission."""
    index, features, labels, last = device
    made = train_round(
        task.manifest,
        task.opened,
        data=TrainingSet(features, labels),
        last=last,
        resumed=None,
        blobs=task,
        device_id=str(index),
        hooks=HOOKS,
    )
    images = np.bincount(labels, minlength=len(task.manifest.classes))
    prepared = PreparedSubmission(
        prototypes=made.prototypes,
        labels=made.labels,
        counts=made.counts,
        classes=tuple(
            ClassReport(name, int(count), 0, (int(count),))
            for name, count in zip(task.manifest.classes, images, strict=True)
            if count
        ),
        unusable=(),
        tensors=made.changes,
        loss=made.loss,
    )
    payload = encode_submission(
        prepared,
        task=task.task,
        manifest=task.manifest,
        sequence=task.opened.number + 1,
        round_number=task.opened.number,
    )
    return made, payload


def _aggregate(
    task: _Task,
    payloads: Sequence[bytes],
    tensors: BlobRef,
    *,
    number: int,
    robust: Robust,
    falsify: Falsify,
) -> BlobRef:
    """Return the tensors that the next round starts from."""
    parts = [falsify(index, decoded(payload, task.expectation)) for index, payload in enumerate(payloads)]
    counted = limited(parts, multiple=robust.max_multiple)
    pooled = task.algorithm.aggregate(
        robust_contributions(
            [contribution_of(str(index), part) for index, part in enumerate(counted)],
            clip_multiple=robust.clip_multiple,
            power=task.algorithm.power,
        ),
        _read(task.blobs, tensors),
        num_classes=len(task.manifest.classes),
        seed=task.manifest.seed + number + 1,
    )
    return _put(task.blobs, pack_tensors(pooled), "tensors")


def _read(blobs: BlobStore, reference: BlobRef) -> Mapping[str, NDArray[Any]]:
    return unpack_tensors(blobs.read(reference.digest))


def _probabilities(
    task: _Task, client: Client, local_model: LocalModel, tensors: BlobRef
) -> NDArray[np.float32]:
    """Return what the client's head, bound to its local model, says of its test images."""
    if task.manifest.program is None:
        raise TypeError("the task of an algorithm of rounds has a program")
    head = open_round_head(
        task.blobs.read(task.manifest.program.head.digest),
        local_model=local_model,
        tensors=_read(task.blobs, tensors),
        feature_size=client.train.shape[1],
        classes=task.manifest.classes,
    )
    return head.probabilities(client.test)
