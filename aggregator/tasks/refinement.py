"""`training.refine`: once FedTC's head is in use, devices upload statistics of its adapter's features.

Which of the two tasks is served follows from what is stored: a restart, or a kill in between, continues with it.
"""

import logging
from collections.abc import Iterable

from aggregator.coordination import rollout_state
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.stored_values import Refinable, Refinement
from protocol.log import event
from protocol.wire.messages import TaskManifest

log = logging.getLogger(__name__)

DATABASE_BYTES = 1024**2
"""Limit for what the database grows by when the other task follows."""


def refinable_head(state: rollout_state.State, heads: Iterable[HeadRecord]) -> HeadRecord | None:
    """Return the head of FedTC's task that devices use, if it has an adapter and no forgotten device is part of it."""
    if state.current <= state.forgotten:
        return None
    return next(
        (head for head in heads if head.version == state.current and head.metrics.get("epochs")), None
    )


def refined_head(store: Store, task: bytes) -> HeadRecord | None:
    """Return the head of FedTC's task that is being refined; None if FedTC's task is to be served."""
    head = refinable_head(store.heads.rollout(task), store.heads.all(task))
    known = store.facts.get(Refinement)
    is_refined = known is not None and head is not None and (known.task, known.head) == (task, head.version)
    return head if is_refined else None


def begin_if_due(store: Store, head: HeadRecord, *, deadline_s: float) -> bool:
    """Store that a head is refined once all devices that are online have evaluated it, and there is no candidate.

    Or `deadline_s` after the first head that could be refined: a device that often uploads, and evaluates no head,
    would otherwise prevent it with ever newer heads and candidates.
    """
    is_waiting = store.heads.rollout(head.task).trial is not None or bool(
        store.devices.online() - store.evaluations.devices(head.task, head.version)
    )
    if is_waiting and store.clock.now_s() < _refinable_since_s(store, head) + deadline_s:
        return False
    store.facts.put(Refinement(head.task, head.version))
    event(log, logging.INFO, "refining the head: devices upload statistics of its adapter", head=head.version)
    return True


def _refinable_since_s(store: Store, head: HeadRecord) -> float:
    known = store.facts.get(Refinable)
    if known is None or known.task != head.task or known.head <= store.forgotten.newest_head(head.task):
        known = Refinable(head.task, head.version, store.clock.now_s())
        store.facts.put(known)
    return known.since_s


def is_over(store: Store, head: HeadRecord) -> bool:
    """Return True if a head is refined no more, because a device that it learned from was forgotten."""
    if store.forgotten.newest_head(head.task) < head.version:
        return False
    event(log, logging.INFO, "the adapter has learned from a forgotten device: FedTC makes another head")
    return True


def room_bytes(head: HeadRecord, manifest: TaskManifest) -> int:
    """Return the greatest size of the files that are written when the other task follows.

    They are the database, head.onnx, the map or the adapter (counted as a head), and model.onnx.
    """
    backbones_bytes = sum(backbone.size_bytes for backbone in manifest.backbones)
    return DATABASE_BYTES + 2 * head.size_bytes + backbones_bytes


def delete_outdated(store: Store, task: bytes) -> None:
    """Delete what is stored of the task that refined an earlier head of FedTC's task."""
    known = store.facts.get(Refinement)
    if known is not None and known.task == task:
        with store.transaction():
            store.delete_task(known.refined)
            store.facts.delete(Refinement)
