"""The job that closes a round.

It runs in every round, without torch, and writes `tensors.bin`, which the next round starts from, and a head for
devices that do not train.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Contribution, RoundAlgorithm
from aggregator.algorithms.tensors import check_finite, pack_tensors, unpack_tensors
from aggregator.config.schema import Robust
from aggregator.coordination.bounds import counted_images
from aggregator.graphs.program_export import bind, untrained
from aggregator.intake.validation import Expectation, Prototypes, check_submission
from aggregator.training.jobs import TENSORS_FILE, Result, RoundJob, Workspace, checked_parts, write_head
from aggregator.training.robust.rounds import contribution_of, robust_contributions
from aggregator.training.robust.weights import counting, limited, stated_images
from protocol.errors import ProtofleetError
from protocol.storage.blobstore import write_atomically
from protocol.wire.messages import Submission


def run(job: RoundJob, workspace: Workspace) -> Result:
    """Aggregate a round's submissions into the tensors of the next one, and write them and the head.

    Raises:
        ProtofleetError: the submissions cannot be aggregated, or the result is not finite.
    """
    started_s = time.perf_counter()
    blobs, manifest = workspace.blobs, job.manifest(workspace.blobs)
    algorithm, program = job.method, manifest.program
    if program is None:
        raise ProtofleetError("the task has no program")
    previous = unpack_tensors(blobs.read(bytes.fromhex(job.tensors)))
    expectation = Expectation(
        bytes.fromhex(job.task),
        manifest,
        algorithm.prototype_size(job.feature_size),
        {name: previous[name].shape for name in algorithm.uploaded},
    )
    submissions = dict(job.submissions(blobs))
    parts, refused = checked_parts(submissions.items(), lambda each: check_submission(each, expectation))
    robust = job.robust
    stated = stated_images(list(parts.values()), len(manifest.classes))
    of_classes = counted_images(stated, multiple=robust.max_multiple)
    counted = limited(list(parts.values()), multiple=robust.max_multiple)
    tensors, failed = aggregated(
        algorithm,
        [contribution_of(device, part) for device, part in zip(parts, counted, strict=True)],
        previous,
        robust=robust,
        num_classes=len(manifest.classes),
        seed=manifest.seed + job.version,
    )
    write_atomically(workspace.folder / TENSORS_FILE, pack_tensors(tensors))
    left_out = {**refused, **failed}
    metrics = _figures(
        {device: part for device, part in parts.items() if device not in left_out},
        [submissions[device] for device in parts if device not in left_out],
        number=job.version - 1,
    )
    state = untrained(blobs.read(program.init.digest), feature_size=job.feature_size)
    metadata = job.metadata(manifest, metrics)
    head = bind(blobs.read(program.head.digest), {**state, **tensors}, metadata=metadata)
    write_head(head, manifest, workspace)
    return Result(
        prototypes=sum(len(part.labels) for device, part in parts.items() if device not in left_out),
        metrics={**metrics, "seconds": time.perf_counter() - started_s},
        quarantined=left_out,
        counting=counting(
            dict(zip(parts, stated, strict=True)),
            manifest.classes,
            multiple=robust.max_multiple,
            of_classes=of_classes,
        ),
    )


def aggregated(
    algorithm: RoundAlgorithm,
    contributions: Sequence[Contribution],
    previous: Mapping[str, NDArray[Any]],
    *,
    robust: Robust,
    num_classes: int,
    seed: int,
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors of the next round, finite, and the devices that they are made without, with reasons.

    If not all contributions can be aggregated, those are left out that cannot be by themselves; they limit no other.

    Raises:
        ProtofleetError: none can be aggregated, or only all together cannot.
    """

    def aggregate(some: Sequence[Contribution]) -> dict[str, NDArray[Any]]:
        safe = robust_contributions(some, clip_multiple=robust.clip_multiple, power=algorithm.power)
        tensors = algorithm.aggregate(safe, previous, num_classes=num_classes, seed=seed)
        check_finite(tensors)
        return tensors

    failed: dict[str, str] = {}
    try:
        return aggregate(contributions), failed
    except ProtofleetError:
        for each in contributions:
            try:
                aggregate([each])
            except ProtofleetError as error:
                failed[each.device] = str(error)
        if len(failed) in (0, len(contributions)):
            raise
    return aggregate([each for each in contributions if each.device not in failed]), failed


def _figures(
    parts: Mapping[str, Prototypes], submissions: Sequence[Submission], *, number: int
) -> dict[str, float]:
    """Return the classes with prototypes, the submissions from earlier rounds, and the median loss if there is one."""
    classes = {int(label) for part in parts.values() for label in part.labels}
    carried = sum(submission.round < number for submission in submissions)
    figures = {"classes": float(len(classes)), "carried": float(carried)}
    losses = [submission.loss for submission in submissions if submission.loss is not None]
    return {**figures, "loss": statistics.median(losses)} if losses else figures
