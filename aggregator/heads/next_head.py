"""The training of the next head, as it is stored: a restart repeats it, and knows how often it has failed."""

import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from aggregator.coordination import round_state, rounds
from aggregator.storage.devices import REVOKED
from aggregator.storage.heads import ADAPTER_MISSING, CALIBRATED_FROM, NO_PYTORCH, HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.stored_values import NextHead
from aggregator.storage.sum_lists import SumLists, put_sums, sums_of, with_total
from aggregator.tasks.task_preparation import Task
from aggregator.training.jobs import (
    HEAD_FILE,
    TENSORS_FILE,
    TOTAL_FILE,
    BlobJob,
    HeadJob,
    NoisySumsJob,
    Result,
    RoundJob,
    StatisticsJob,
)
from protocol.errors import StateError
from protocol.log import event
from protocol.wire.messages import BlobRef


def _noisy_sums_job(shared: Mapping[str, Any], lists: SumLists) -> NoisySumsJob:
    """Return the job on the fleet's sums; with a second operator on its newest list and the total of the others."""
    if lists.pending is None:
        return NoisySumsJob(**shared)
    masked = {"members": lists.pending.members, "masks": lists.pending.masks, "total": lists.total}
    return NoisySumsJob(**{**shared, **masked}, devices=lists.summed)


def put_started(store: Store, head: NextHead, members: Mapping[str, round_state.Entry]) -> None:
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


def folder_of(store: Store, job: BlobJob) -> Path:
    """Return the folder in which a job is run, and leaves its files."""
    return store.folder / "training" / job.name


def job_of(
    train: rounds.Train, task: Task, store: Store, state: round_state.State, *, tensors: BlobRef | None
) -> HeadJob | StatisticsJob | NoisySumsJob | RoundJob:
    """Return the job that makes a head; `tensors` are those of the open round."""
    shared: dict[str, Any] = {
        "version": train.version,
        "task": task.digest.hex(),
        "members": {device: entry.digest.hex() for device, entry in train.members},
        "feature_size": task.feature_size,
    }
    if tensors is not None:
        return RoundJob(
            **shared,
            algorithm=task.file.algorithm,
            settings=msgspec.to_builtins(task.file.method),
            robust=task.file.robust,
            tensors=tensors.digest.hex(),
        )
    shared |= {
        "released": tuple(sorted(state.decisions.released)),
        "robust": task.file.robust,
        "has_novelty": task.calibrates,
    }
    if task.manifest.differential_privacy is not None:
        return _noisy_sums_job(shared, sums_of(store.facts, task.digest))
    if (rows := task.feature_map) is not None:
        return StatisticsJob(
            **shared,
            random_features=rows.random_features,
            seed=rows.seed,
            columns=rows.columns,
            normalized=rows.normalized,
        )
    return HeadJob(
        **shared,
        algorithm=task.file.algorithm,
        settings=msgspec.to_builtins(task.file.method),
        training=task.file.training,
        widths=task.widths,
    )


log = logging.getLogger(__name__)


def store_head(
    task: Task,
    store: Store,
    job: BlobJob,
    result: Result,
    members: Mapping[str, round_state.Entry],
) -> HeadRecord:
    """Store the head that a job has made of `members`, and update the quarantine.

    Raises StateError if it cannot be stored, or a member's submission was deleted meanwhile.
    """
    digests = {device: entry.digest.hex() for device, entry in members.items()}
    folder, program = folder_of(store, job), task.manifest.program
    file = store.put_file(folder / HEAD_FILE)
    tensors = total = None
    if TENSORS_FILE in job.files:
        tensors = store.put_file(folder / TENSORS_FILE, name=f"tensors-{job.version}")
    if TOTAL_FILE in job.files:
        total = store.put_file(folder / TOTAL_FILE)
    head = file if program is None else program.head
    record = HeadRecord(
        version=job.version,
        task=task.digest,
        digest=head.digest,
        size_bytes=head.size_bytes,
        trained_s=time.time(),
        prototypes=result.prototypes,
        members={device: digest for device, digest in digests.items() if device not in result.quarantined},
        metrics={
            **result.metrics,
            "images": result.counting.images,
            "counted_images": result.counting.counted,
        },
        tensors=tensors,
        file=file.digest,
        quarantined={device: digest for device, digest in digests.items() if device in result.quarantined},
        warning=result.warning,
        limited=tuple(" ".join(filter(None, each)) for each in result.counting.limited),
    )
    with store.transaction():
        if total is not None:
            put_sums(store.facts, with_total(sums_of(store.facts, task.digest), total.digest))
        if not store.next_head(record.task, record.version).members:
            raise StateError(f"a submission that head {record.version} is made of was deleted")
        store.heads.add(record)
        store.facts.delete(NextHead)
        update_quarantine(store, record, result)
    if result.few_prototypes:
        few = ", ".join(f"{name} {number}" for name, number in result.few_prototypes.items())
        event(log, logging.WARNING, "few prototypes: add images or devices", head=job.version, classes=few)
    if ADAPTER_MISSING in record.metrics:
        event(log, logging.INFO, "the adapter was not tried", head=job.version, reason=NO_PYTORCH)
    if record.limited:
        event(log, logging.INFO, "images limited", head=job.version, limits="; ".join(record.limited))
    return record


def log_head(
    head: HeadRecord, state: round_state.State, settings: round_state.Settings, *, counts_images: bool = False
) -> None:
    metrics, total = head.metrics, settings.rounds
    if before := metrics.get(CALIBRATED_FROM):
        images = round(metrics["calibration_images"])
        event(
            log, logging.INFO, "head calibrated", version=head.version, of=int(before), held_out_images=images
        )
        return
    made: dict[str, object] = {"devices": len(head.members)}
    made |= {} if counts_images else {"prototypes": head.prototypes}
    made |= {
        "seconds": metrics["seconds"],
        "images": int(metrics["images"]),
        "counted": int(metrics["counted_images"]),
    }
    if total is None:
        made["onnx_max_difference"] = metrics["onnx_max_difference"]
        event(log, logging.INFO, "head trained", version=head.version, **made)
        return
    carried, classes = int(metrics["carried"]), int(metrics["classes"])
    figures = {**made, "carried": carried, "classes": classes, "head": head.version}
    event(log, logging.INFO, "round closed", round=head.version - 1, rounds=total, **figures)
    if round_state.is_over(state.head_version, settings):
        event(log, logging.INFO, "last round closed", rounds=total, head=head.version)


def update_quarantine(store: Store, head: HeadRecord, result: Result) -> None:
    """Quarantine the devices that a training excluded, and end the quarantine of those that it did not.

    A device that was released meanwhile stays released, and a revoked one stays quarantined.
    """
    known = store.quarantine.all(head.task)
    for device in sorted({**head.members, **head.quarantined}):
        entry = known.get(device)
        if entry is not None and (entry.released_s is not None or entry.reason == REVOKED):
            continue
        if device in head.quarantined:
            reason = result.quarantined[device]
            store.quarantine.add(head.task, device, reason=reason, now_s=head.trained_s)
            if entry is None:
                what_to_do = "device quarantined: `aggregator release DEVICE` includes it again"
                event(log, logging.WARNING, what_to_do, device=device, reason=reason)
        elif entry is not None:
            store.quarantine.delete(head.task, device)
            event(log, logging.INFO, "device no longer quarantined", device=device)
    if result.warning:
        event(log, logging.WARNING, "outliers not quarantined", reason=result.warning)
