"""Which blobs must be kept: served to devices, part of a later head, or needed by another task."""

import contextlib
import logging
from collections.abc import Sequence
from itertools import groupby

from aggregator.coordination import rollout_state
from aggregator.coordination.round_state import still_counts
from aggregator.storage.blobs import FolderBlobs
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.sum_lists import blobs_of_lists, sums_of_tasks
from aggregator.tasks.graph_cache import known_graphs
from aggregator.tasks.task_preparation import Task

log = logging.getLogger(__name__)


def served_blobs(task: Task, heads: Sequence[HeadRecord], state: rollout_state.State) -> set[bytes]:
    """Return the digests of the blobs that devices may download for a task with these heads, oldest first."""
    retained = _retained(heads, state)
    return task.blobs | {head.digest for head in retained} | _tensors(retained)


def needed_blobs(task: Task, store: Store) -> set[bytes]:
    """Return the digests of the blobs that must not be deleted."""
    state, settings = store.round_state(task.digest), task.file.settings
    heads = sorted(store.heads.all(), key=lambda head: head.task)
    # Other tasks may be served again.
    retained = [
        head
        for other, of_task in groupby(heads, key=lambda head: head.task)
        for head in _retained(list(of_task), store.heads.rollout(other))
    ]
    return (
        task.blobs
        | {task.digest, *(task.manifest.continues or ())}
        | {digest for head in retained for digest in (head.digest, head.file)}
        | _tensors(retained)
        | {graph.digest for graphs in known_graphs(store).values() for graph in graphs.values()}
        | {
            entry.digest
            for entry in state.submissions.values()
            if still_counts(entry, state.head_version, settings)
        }
        | {entry.digest for entry in (state.training or {}).values()}
        | store.submissions.digests_of_other_tasks(task.digest)
        | store.jobs.blobs()
        | {digest for lists in sums_of_tasks(store.facts).values() for digest in blobs_of_lists(lists)}
    )


def delete_unneeded_blobs(task: Task, store: Store) -> None:
    """Delete the blobs that nothing needs any more; raises StateError."""
    # In a folder also those of a transaction that has not ended yet: no other process may write meanwhile.
    in_folder = isinstance(store.blobs, FolderBlobs)
    with store.transaction() if in_folder else contextlib.nullcontext():
        store.blobs.keep_only(needed_blobs(task, store))


def delete_carried_submissions(task: Task, store: Store) -> None:
    """Delete stored submissions of earlier rounds whose blobs are missing.

    They were deleted when all rounds were over, before the task got more rounds.
    """
    state, settings = store.round_state(task.digest), task.file.settings
    present = set(store.blobs.digests())  # faster than a question for each
    missing = [
        device
        for device, entry in state.submissions.items()
        if entry.digest not in present
        and still_counts(entry, state.head_version, settings)
        and settings.rounds is not None
        and entry.round < state.head_version
    ]
    if missing:
        with store.transaction():
            for device in missing:
                store.submissions.delete(device, task.digest)


def _retained(heads: Sequence[HeadRecord], state: rollout_state.State) -> list[HeadRecord]:
    versions = rollout_state.retained_heads(state, [head.version for head in heads])
    return [head for head in heads if head.version in versions]


def _tensors(heads: Sequence[HeadRecord]) -> set[bytes]:
    return {head.tensors.digest for head in heads if head.tensors is not None}
