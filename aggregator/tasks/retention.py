"""Rules for what is kept: what devices are served, what a later head is made of, and earlier tasks for a while."""

import contextlib
import logging
from collections.abc import Collection, Sequence

from aggregator.coordination import rollout_state, round_state
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.stored_values import CompiledGraphs, NotServed
from aggregator.sums.stored_lists import blobs_of_sums, drop_requests
from aggregator.tasks.graph_cache import known_graphs
from aggregator.tasks.task_preparation import Task
from protocol.errors import BlobLost
from protocol.log import event

log = logging.getLogger(__name__)

KEPT_S = 30 * 24 * 3600.0
"""Elapsed seconds for which the submissions and graphs of a task are kept after another one has replaced it."""


def served_blobs(task: Task, heads: Sequence[HeadRecord], state: rollout_state.State) -> set[bytes]:
    """Return the digests of the blobs that devices may download for a task with these heads, oldest first."""
    retained = _retained(heads, state)
    return task.blobs | {head.digest for head in retained} | _tensors(retained)


def needed_blobs(task: Task, store: Store) -> set[bytes]:
    """Return the digests of the blobs that must not be deleted."""
    retained, named = list[HeadRecord](), store.heads.all_planned()
    digests = {digest for head in named for digest in _members(head, store)}
    for other in {head.task for head in store.heads.all()} | {task.digest}:  # they may be served again
        heads = store.heads.all(other)
        retained += _retained(heads, store.heads.rollout(other))
        named += heads[-1:]
    newest = store.heads.newest(task.digest)
    return (
        task.blobs
        | {task.digest, *(task.manifest.continues or ())}
        | store.submissions.tasks()  # which may be continued
        | {digest for head in retained for digest in (head.digest, head.file)}
        | _tensors(retained)
        | {graph.digest for graphs in known_graphs(store).values() for graph in graphs.values()}
        | store.submissions.digests(task.digest, _oldest_round(newest, task.file.settings))
        | digests
        | {head.members for head in named}
        | store.submissions.digests_of_other_tasks(task.digest)
        | blobs_of_sums(store.facts)
    )


def delete_earlier_tasks(task: Task, store: Store) -> None:
    """Delete the submissions, evaluations and graphs of tasks that another one has replaced `KEPT_S` ago.

    Until then, an operator can return to such a task, or continue it. Raises StateError.
    """
    with store.transaction():
        graphs, now_s = known_graphs(store), store.clock.now_s()
        tasks = store.submissions.tasks() - {task.digest, *(task.manifest.continues or ())}
        unused = {
            *(digest.hex() for digest in tasks),
            *(
                key
                for key, roles in graphs.items()
                if not {each.digest for each in roles.values()} <= task.blobs
            ),
        }
        known = store.facts.get(NotServed) or NotServed({})
        since_s = {name: known.since_s.get(name, now_s) for name in unused}
        expired = {name for name, each_s in since_s.items() if now_s - each_s >= KEPT_S}
        for digest in tasks:
            if digest.hex() in expired:
                store.submissions.delete_task(digest)
                if (planned := store.heads.planned(digest)) is not None:
                    store.heads.delete(digest, planned.version)
                drop_requests(store.facts, task=digest)
                event(log, logging.INFO, "submissions of an earlier task deleted", task=digest)
        if not expired.isdisjoint(graphs):
            kept = {key: roles for key, roles in graphs.items() if key not in expired}
            store.facts.put(CompiledGraphs(kept))
        if (after := NotServed({name: since_s[name] for name in unused - expired})) != known:
            store.facts.put(after)


def delete_unneeded_blobs(task: Task, store: Store) -> None:
    """Delete what nothing needs any more; raises StateError."""
    delete_earlier_tasks(task, store)
    store.blobs.keep_only(needed_blobs(task, store))


def delete_carried_submissions(task: Task, store: Store, present: Collection[bytes]) -> None:
    """Delete stored submissions of earlier rounds whose blobs are not among those that are present.

    They were deleted when all rounds were over, before the task got more rounds.
    """
    settings, newest = task.file.settings, store.heads.newest(task.digest)
    if settings.rounds is None or newest is None:
        return
    oldest = _oldest_round(newest, settings)
    missing = [
        device
        for device, record in store.submissions.all(task.digest).items()
        if record.entry.digest not in present and oldest <= record.entry.round < newest.version
    ]
    if missing:
        with store.transaction():
            for device in missing:
                store.submissions.delete(device, task.digest)


def _oldest_round(newest: HeadRecord | None, settings: round_state.Settings) -> int:
    """Return the oldest round whose submissions may count."""
    if settings.rounds is None or newest is None:
        return 0
    if round_state.is_over(newest.version, settings):
        return newest.version + 1
    return newest.version - settings.staleness


def _members(head: HeadRecord, store: Store) -> set[bytes]:
    with contextlib.suppress(BlobLost):
        return set(store.members(head).values())
    return set()


def _retained(heads: Sequence[HeadRecord], state: rollout_state.State) -> list[HeadRecord]:
    versions = rollout_state.retained_heads(state, [head.version for head in heads])
    return [head for head in heads if head.version in versions]


def _tensors(heads: Sequence[HeadRecord]) -> set[bytes]:
    return {head.tensors.digest for head in heads if head.tensors is not None}
