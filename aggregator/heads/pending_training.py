"""The training of the next head, as it is stored: a restart repeats it, and knows how often it has failed."""

import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from aggregator.coordination import round_state, rounds
from aggregator.storage.store import Store
from aggregator.storage.stored_values import NextHead
from aggregator.tasks.task_preparation import Task
from aggregator.training.jobs import HeadJob, RoundJob, StatisticsJob
from protocol.wire.messages import BlobRef

FULL_MEMORY_TRAININGS = 4
"""Failed trainings of a head after which it is made with half the memory."""


def has_half_memory(failures: int) -> bool:
    """Return True if a training after so many failed ones of the same head uses half the memory."""
    return failures >= FULL_MEMORY_TRAININGS


def put_started(store: Store, head: NextHead, members: Mapping[str, round_state.Entry]) -> None:
    """Store that the training of the next head has started, of these submissions."""
    store.facts.put(replace(head, members=dict(members), is_running=True, progress=None))


def put_stopped(store: Store) -> None:
    """Store that a running training was stopped, which is no failure."""
    if (head := store.facts.get(NextHead)) is not None:
        store.facts.put(replace(head, is_running=False, progress=None))


def put_failure(
    store: Store, task: bytes, state: round_state.State, members: Mapping[str, round_state.Entry], reason: str
) -> None:
    """Store for `status` and the next start that a training of these submissions has failed."""
    store.facts.put(
        NextHead(
            task,
            state.head_version + 1,
            members=dict(members),
            failures=state.failures,
            reason=reason,
            failed_s=time.time(),
            retry_s=state.retry_s,
        )
    )


def delete_members(store: Store, devices: Collection[str]) -> None:
    """Delete the members of the next head if one of the devices is among them: it is made of others."""
    head = store.facts.get(NextHead)
    if head is not None and not head.members.keys().isdisjoint(devices):
        store.facts.put(replace(head, members={}, is_running=False, progress=None))
        store.jobs.cancel(head.task)


def blobs_of(job: HeadJob | StatisticsJob | RoundJob, task: Task) -> list[bytes]:
    """Return the digests of what a job reads beside the submissions, except for the backbones: it can do without."""
    program = task.manifest.program
    if program is None or not isinstance(job, RoundJob):
        return [task.digest]
    return [task.digest, bytes.fromhex(job.tensors), program.init.digest, program.head.digest]


def job_of(
    train: rounds.Train, task: Task, store: Store, state: round_state.State, *, tensors: BlobRef | None
) -> HeadJob | StatisticsJob | RoundJob:
    """Return the job that makes a head; `tensors` are those of the open round."""
    folder = store.folder / "training"
    shared: dict[str, Any] = {
        "version": train.version,
        "task": task.digest.hex(),
        "members": {device: entry.digest.hex() for device, entry in train.members},
        "blobs": store.blobs.location,
        "feature_size": task.feature_size,
    }
    if tensors is not None:
        return RoundJob(
            **shared,
            task_file=task.file,
            tensors=tensors.digest.hex(),
            folder=str(folder / f"round-{train.version - 1}"),
        )
    shared |= {
        "released": tuple(sorted(state.decisions.released)),
        "robust": task.file.robust,
        "half_memory": has_half_memory(state.failures),
        "folder": str(folder / f"head-{train.version}"),
    }
    if (rows := task.feature_map) is not None:
        return StatisticsJob(
            **shared,
            random_features=rows.random_features,
            seed=rows.seed,
            columns=rows.columns,
            normalized=rows.normalized,
            engine=task.file.training.engine,
        )
    return HeadJob(
        **shared,
        algorithm=task.file.algorithm,
        settings=msgspec.to_builtins(task.file.method),
        training=task.file.training,
        widths=task.widths,
    )
