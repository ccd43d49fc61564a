"""The job that closes a round: `python -m aggregator.training.round_job JOB.json`.

It runs in every round, without torch, and writes `tensors.bin`, which the next round starts from, and a head for
devices that do not train.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from aggregator.algorithms.algorithm import Contribution
from aggregator.algorithms.tensors import pack_tensors, unpack_tensors
from aggregator.graphs.program_export import bind, untrained
from aggregator.ingest.validation import Expectation, check_submission
from aggregator.training.jobs import Result, RoundJob, run_as_program
from protocol.errors import ProtofleetError
from protocol.storage.blobstore import BlobStore, write_atomically
from protocol.wire.messages import Submission


def run(job: RoundJob) -> Result:
    """Aggregate a round's submissions into the tensors of the next one, and write them and the head.

    Raises:
        ProtofleetError: the submissions cannot be aggregated, or the result is not finite.
    """
    started_s = time.perf_counter()
    blobs, manifest = BlobStore(Path(job.blobs)), job.manifest()
    algorithm, program = job.task_file.learning, manifest.program
    if algorithm is None or program is None:
        raise ProtofleetError(f"{job.task_file.algorithm} has no rounds")
    previous = unpack_tensors(blobs.read(bytes.fromhex(job.tensors)))
    expectation = Expectation(
        bytes.fromhex(job.task),
        manifest,
        algorithm.projection_size,
        {name: previous[name].shape for name in algorithm.uploaded},
    )
    submissions = job.submissions()
    contributions = [
        Contribution(device=device, **vars(check_submission(each, expectation)))
        for device, each in submissions.items()
    ]
    tensors = algorithm.aggregate(
        contributions, previous, num_classes=len(manifest.classes), seed=manifest.seed + job.version
    )
    write_atomically(Path(job.folder) / "tensors.bin", pack_tensors(tensors))
    metrics = _figures(contributions, list(submissions.values()), number=job.version - 1)
    state = untrained(blobs.read(program.init.digest), feature_size=job.feature_size)
    metadata = job.metadata(manifest, metrics)
    head = bind(blobs.read(program.head.digest), {**state, **tensors}, metadata=metadata)
    job.write_head(head, manifest)
    prototypes = sum(len(part.labels) for part in contributions)
    return Result(prototypes=prototypes, metrics={**metrics, "seconds": time.perf_counter() - started_s})


def _figures(
    contributions: Sequence[Contribution], submissions: Sequence[Submission], *, number: int
) -> dict[str, float]:
    """Return the classes with prototypes, the submissions from earlier rounds, and the mean loss if there is one."""
    classes = {int(label) for part in contributions for label in part.labels}
    carried = sum(submission.round < number for submission in submissions)
    figures = {"classes": float(len(classes)), "carried": float(carried)}
    losses = [submission.loss for submission in submissions if submission.loss is not None]
    return {**figures, "loss": sum(losses) / len(losses)} if losses else figures


if __name__ == "__main__":
    run_as_program(RoundJob, run)
