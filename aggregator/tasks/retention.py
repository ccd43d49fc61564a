"""Which blobs the aggregator still needs: what can be asked for, and what may yet count."""

import logging
from itertools import groupby

from aggregator.coordination import rollout
from aggregator.coordination.rounds import still_counts
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.tasks.graph_cache import known_graphs
from aggregator.tasks.task import Task

log = logging.getLogger(__name__)


def served_blobs(task: Task, heads: list[HeadRecord], state: rollout.State) -> set[bytes]:
    """What devices may ask for: the task's blobs, the heads that may be used, and what these are bound to.

    Args:
        task: what they work on.
        heads: its heads, oldest first.
        state: which of them devices use.
    """
    usable = rollout.retained_heads(state, [head.version for head in heads])
    used = [head for head in heads if head.version in usable]
    return (
        task.blobs | {head.digest for head in used} | {head.tensors.digest for head in used if head.tensors}
    )


def needed_blobs(task: Task, store: Store) -> set[bytes]:
    """What must not be deleted: what is served, what may yet be part of a head, and what other tasks need."""
    state, settings = store.round_state(task.digest), task.file.settings
    heads = store.heads.all()
    graphs = {graph.digest for graphs in known_graphs(store).values() for graph in graphs.values()}
    return (
        served_blobs(
            task, [head for head in heads if head.task == task.digest], store.heads.rollout(task.digest)
        )
        | {task.digest}
        | graphs
        | {entry.digest for entry in state.submissions.values() if still_counts(entry, state, settings)}
        | {entry.digest for entry in (state.training or {}).values()}
        | store.submissions.digests_of_other_tasks(task.digest)
        | _needed_of_heads(store, heads)
    )


def _needed_of_heads(store: Store, heads: list[HeadRecord]) -> set[bytes]:
    """Of every task: the heads with which it goes on if it comes back, and what they are bound to."""
    needed: set[bytes] = set()
    for task, of_task in groupby(sorted(heads, key=lambda head: head.task), key=lambda head: head.task):
        rows = list(of_task)
        usable = rollout.retained_heads(store.heads.rollout(task), [head.version for head in rows])
        for head in rows:
            if head.version in usable:
                needed |= {head.digest, head.file} | ({head.tensors.digest} if head.tensors else set())
    return needed


def forget_lost(task: Task, store: Store) -> None:
    """Drop submissions that may yet count, but whose blobs are gone: their devices will ask, and upload again."""
    state, settings = store.round_state(task.digest), task.file.settings
    for device, entry in state.submissions.items():
        if entry.digest in store.blobs or not still_counts(entry, state, settings):
            continue
        if (
            entry.round < state.head_version
        ):  # what was cleared at the end of the rounds, before there were more
            store.submissions.delete(task.digest, device)
        else:
            log.warning("the submission of %s is gone from the disk; it will be asked for again", device)
            store.submissions.delete(task.digest, device)
