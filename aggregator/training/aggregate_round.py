"""One round's pooling, as a process of its own: `python -m aggregator.training.aggregate_round JOB.json`.

It runs in every round, so it does without torch. The results are files in the job's folder: `tensors.bin`, what the
next round begins with; `head.onnx`, the head for who has no training device; and with one backbone `model.onnx`.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from aggregator.algorithms.program import Contribution
from aggregator.algorithms.tensors import pack_tensors, unpack_tensors
from aggregator.graphs.fuse import fuse
from aggregator.graphs.program_export import bind, untrained
from aggregator.ingest.validation import Expectation, check_submission, read_message
from aggregator.training.jobs import Result, RoundJob, run_as_program
from protocol.errors import ProtofleetError
from protocol.metadata import HeadMetadata
from protocol.storage.blobstore import BlobStore, write_atomically
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_MANIFEST_BYTES, Program, Submission, TaskManifest


def run(job: RoundJob) -> Result:
    """Pool a round's submissions into the tensors of the next one, and write them and the head.

    Raises:
        ProtofleetError: the submissions cannot be pooled, or not into finite values.
    """
    begun_s = time.perf_counter()
    blobs = BlobStore(Path(job.blobs))
    manifest = decode(blobs.read(bytes.fromhex(job.task)), TaskManifest, max_bytes=MAX_MANIFEST_BYTES)
    learning, program = job.task_file.learning, manifest.program
    if learning is None or program is None:
        raise ProtofleetError(f"{job.task_file.algorithm} has no rounds")
    previous = unpack_tensors(blobs.read(bytes.fromhex(job.tensors)))
    expectation = Expectation(
        bytes.fromhex(job.task),
        manifest,
        learning.projection_size,
        {name: previous[name].shape for name in learning.uploaded},
    )
    submissions = {
        device: _submission(blobs.read(bytes.fromhex(digest))) for device, digest in job.members.items()
    }
    contributions = [_contribution(device, each, expectation) for device, each in submissions.items()]
    tensors = learning.aggregate(
        contributions, previous, num_classes=len(manifest.classes), seed=manifest.seed + job.version
    )
    write_atomically(Path(job.folder) / "tensors.bin", pack_tensors(tensors))
    metrics = _figures(contributions, list(submissions.values()), number=job.version - 1)
    _write_head(job, manifest, program=program, tensors=tensors, metrics=metrics)
    seconds = time.perf_counter() - begun_s
    prototypes = sum(len(part.labels) for part in contributions)
    return Result(prototypes=prototypes, metrics={**metrics, "seconds": seconds})


def _write_head(
    job: RoundJob,
    manifest: TaskManifest,
    *,
    program: Program,
    tensors: Mapping[str, NDArray[Any]],
    metrics: dict[str, float],
) -> None:
    """The head as a file that works by itself, on the state of a device that has no image."""
    blobs = BlobStore(Path(job.blobs))
    metadata = HeadMetadata(
        classes=manifest.classes,
        version=job.version,
        task=job.task,
        backbones=tuple(backbone.digest.hex() for backbone in manifest.backbones),
        feature_size=job.feature_size,
        training=metrics,
    )
    state = untrained(blobs.read(program.init.digest), feature_size=job.feature_size)
    head = bind(blobs.read(program.head.digest), {**state, **tensors}, metadata=metadata)
    write_atomically(Path(job.folder) / "head.onnx", head)
    if len(manifest.backbones) == 1:
        model = fuse(blobs.read(manifest.backbones[0].digest), head)
        write_atomically(Path(job.folder) / "model.onnx", model)


def _submission(payload: bytes) -> Submission:
    message = read_message(payload)
    if not isinstance(message, Submission):
        raise ProtofleetError("expected a stored submission, got an evaluation")
    return message


def _contribution(device: str, submission: Submission, expectation: Expectation) -> Contribution:
    taken = check_submission(submission, expectation)
    return Contribution(
        device=device,
        values=taken.values,
        labels=taken.labels,
        counts=taken.counts,
        tensors=taken.tensors,
    )


def _figures(
    contributions: Sequence[Contribution], submissions: Sequence[Submission], *, number: int
) -> dict[str, float]:
    """Classes that somebody has, submissions from earlier rounds, and the mean loss if anybody has trained."""
    classes = {int(label) for part in contributions for label in part.labels}
    carried = sum(submission.round < number for submission in submissions)
    figures = {"classes": float(len(classes)), "carried": float(carried)}
    losses = [submission.loss for submission in submissions if submission.loss is not None]
    return {**figures, "loss": sum(losses) / len(losses)} if losses else figures


if __name__ == "__main__":
    run_as_program(RoundJob, run)
