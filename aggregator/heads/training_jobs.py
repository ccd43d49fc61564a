"""The jobs that make heads, and the heads that they have made."""

import time
from collections.abc import Mapping
from pathlib import Path

from aggregator.coordination import rounds
from aggregator.heads.quarantine import update_quarantine
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.tasks.task import Task
from aggregator.training.jobs import HeadJob, Result, RoundJob
from protocol.storage.blobstore import state_errors
from protocol.wire.messages import BlobRef


def training_job(
    task: Task, store: Store, train: rounds.Train, *, tensors: BlobRef | None, released: frozenset[str]
) -> HeadJob | RoundJob:
    """Return the job that makes a head.

    Args:
        task: what the head is for.
        store: holds the submissions.
        train: the version and the submissions.
        tensors: with rounds, the tensors of the round that closes.
        released: devices that are not to be quarantined.
    """
    members = {device: entry.digest.hex() for device, entry in train.members}
    blobs, folder = str(store.blobs.folder), store.folder / "training"
    if tensors is not None:
        return RoundJob(
            version=train.version,
            task=task.digest.hex(),
            task_file=task.file,
            members=members,
            tensors=tensors.digest.hex(),
            blobs=blobs,
            feature_size=task.feature_size,
            folder=str(folder / f"round-{train.version - 1}"),
        )
    return HeadJob(
        version=train.version,
        task=task.digest.hex(),
        members=members,
        released=tuple(sorted(released)),
        robust=task.file.robust,
        blobs=blobs,
        feature_size=task.feature_size,
        training=task.file.training,
        folder=str(folder / f"head-{train.version}"),
    )


def store_head(
    task: Task, store: Store, job: HeadJob | RoundJob, result: Result, members: Mapping[str, rounds.Entry]
) -> HeadRecord:
    """Store the head that a job has made of `members`, and the quarantine that it decided.

    Raises:
        StateError: it cannot be stored.
    """

    def blob(data: bytes, name: str) -> BlobRef:
        return BlobRef(digest=store.blobs.put(data), size_bytes=len(data), name=name)

    def digests(*, quarantined: bool) -> dict[str, str]:
        return {
            device: entry.digest.hex()
            for device, entry in members.items()
            if (device in result.quarantined) == quarantined
        }

    folder, program = Path(job.folder), task.manifest.program
    file = blob(_read(folder / "head.onnx"), "head.onnx")
    head, tensors = file, None
    if program is not None:
        head, tensors = program.head, blob(_read(folder / "tensors.bin"), f"tensors-{job.version}")
    record = HeadRecord(
        version=job.version,
        task=task.digest,
        digest=head.digest,
        size_bytes=head.size_bytes,
        trained_s=time.time(),
        prototypes=result.prototypes,
        members=digests(quarantined=False),
        metrics=result.metrics,
        tensors=tensors,
        file=file.digest,
        quarantined=digests(quarantined=True),
    )
    with store.transaction():
        store.heads.add(record)
        update_quarantine(store, record, result)
    return record


def _read(file: Path) -> bytes:
    with state_errors(file):
        return file.read_bytes()
