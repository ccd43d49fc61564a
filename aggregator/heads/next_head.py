"""The next head: the job that makes it, and what is stored of its result."""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from aggregator.coordination.round_state import Settings, is_over
from aggregator.storage.heads import ADAPTER_MISSING, CALIBRATED_FROM, NO_PYTORCH, HeadRecord
from aggregator.storage.quarantine import REVOKED
from aggregator.storage.store import Store
from aggregator.sums.stored_lists import (
    add_to_total,
    copy_total,
    delete_added,
    job_fields,
    payloads_of_pending,
)
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
from protocol.log import event
from protocol.wire.messages import BlobRef

log = logging.getLogger(__name__)


def folder_of(store: Store, job: BlobJob) -> Path:
    """Return the folder in which a job is run, and leaves its files."""
    return store.folder / "training" / job.name


def job_of(
    plan: HeadRecord, members: Mapping[str, bytes], task: Task, store: Store, *, tensors: BlobRef | None
) -> HeadJob | StatisticsJob | NoisySumsJob | RoundJob:
    """Return the job that makes a planned head of these submissions; `tensors` are the open round's."""
    shared: dict[str, Any] = {
        "version": plan.version,
        "attempt": plan.attempt,
        "task": task.digest.hex(),
        "members": {device: digest.hex() for device, digest in members.items()},
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
        "released": tuple(sorted(store.decisions(task.digest).released)),
        "robust": task.file.robust,
        "has_novelty": task.calibrates,
    }
    if task.manifest.differential_privacy is not None:
        return NoisySumsJob(**shared | job_fields(store.facts, task.digest))
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


def store_head(task: Task, store: Store, plan: HeadRecord, job: BlobJob, result: Result) -> HeadRecord:
    """Store the head that a training has made, and update the quarantine; raises StateError if it cannot be stored."""
    head = _made(task, store, plan, job, result)
    members = () if job.is_calibration else store.members(plan)
    total, payloads = None, payloads_of_pending(store.facts, task.digest)
    if TOTAL_FILE in job.files:
        file = folder_of(store, job) / TOTAL_FILE
        total = store.put_file(file)
        copy_total(store, file, total.digest)
    with store.transaction():
        if total is not None:
            add_to_total(store, task.digest, total.digest)
        before = store.heads.newest(task.digest)
        if before is not None and before.quarantined:  # only the newest head's are needed
            store.heads.put(replace(before, quarantined={}))
        store.heads.put(head)
        update_quarantine(store, head, members, result)
    if total is not None:
        delete_added(store, payloads)
    _log_warnings(head, result)
    return head


def _made(task: Task, store: Store, plan: HeadRecord, job: BlobJob, result: Result) -> HeadRecord:
    """Return the head that a training has made, and store its files."""
    folder, program = folder_of(store, job), task.manifest.program
    file = store.put_file(folder / HEAD_FILE)
    published = file if program is None else program.head
    head = replace(
        plan,
        state="made",
        progress=None,
        failures=0,
        problem="",
        digest=published.digest,
        size_bytes=published.size_bytes,
        trained_s=time.time(),
        metrics={**plan.metrics, **result.metrics},
        file=file.digest,
    )
    if job.is_calibration:
        return head
    members = store.members(plan)
    quarantined = {device: members[device].hex() for device in members if device in result.quarantined}
    tensors = None
    if TENSORS_FILE in job.files:
        tensors = store.put_file(folder / TENSORS_FILE, name=f"tensors-{job.version}")
    counting = result.counting
    return replace(
        head,
        devices=len(members) - len(quarantined),
        prototypes=result.prototypes,
        metrics={**head.metrics, "images": counting.images, "counted_images": counting.counted},
        tensors=tensors,
        quarantined=quarantined,
        warning=result.warning,
        limited=tuple(" ".join(filter(None, each)) for each in counting.limited),
    )


def _log_warnings(head: HeadRecord, result: Result) -> None:
    if result.few_prototypes:
        few = ", ".join(f"{name} {number}" for name, number in result.few_prototypes.items())
        event(log, logging.WARNING, "few prototypes: add images or devices", head=head.version, classes=few)
    if ADAPTER_MISSING in result.metrics:
        event(log, logging.INFO, "the adapter was not tried", head=head.version, reason=NO_PYTORCH)
    if result.counting.limited:
        event(log, logging.INFO, "images limited", head=head.version, limits="; ".join(head.limited))


def log_head(head: HeadRecord, settings: Settings, *, counts_images: bool = False) -> None:
    metrics, total = head.metrics, settings.rounds
    if before := metrics.get(CALIBRATED_FROM):
        images = round(metrics["calibration_images"])
        event(
            log, logging.INFO, "head calibrated", version=head.version, of=int(before), held_out_images=images
        )
        return
    made: dict[str, object] = {"devices": head.devices}
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
    if is_over(head.version, settings):
        event(log, logging.INFO, "last round closed", rounds=total, head=head.version)


def update_quarantine(store: Store, head: HeadRecord, members: Iterable[str], result: Result) -> None:
    """Quarantine the devices that a training excluded, and end the quarantine of those that it did not.

    A device that was released meanwhile stays released, and a revoked one stays quarantined.
    """
    known = store.quarantine.all(head.task)
    for device in sorted(members):
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
