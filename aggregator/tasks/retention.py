"""Rules for what is kept: what devices are served, what a later head is made of, and earlier tasks for a while."""

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import groupby

from aggregator.coordination import rollout_state, round_state
from aggregator.storage.heads import HeadRecord, rollout_of
from aggregator.storage.store import Store
from aggregator.storage.stored_values import CompiledGraphs, NotServed
from aggregator.sums.stored_lists import blobs_of_sums, drop_requests
from aggregator.tasks.graph_cache import known_graphs
from aggregator.tasks.task_preparation import Task
from protocol.errors import BlobLost
from protocol.log import event

log = logging.getLogger(__name__)

KEPT_S = 30 * 24 * 3600.0
"""Elapsed seconds for which the rows and graphs of a task are kept after another one has replaced it."""

RETENTION_S = 60.0
"""Seconds from one deletion of what nothing needs to the next: a device can upload all day."""

PAUSE_S = 0.25
"""Seconds from one slice of a deletion to the next."""

SLICE_ROWS = 50
"""Rows that are deleted at once."""


class Retention:
    """Deletes what nothing needs while a task is served: a slice at a time, so that messages do not wait for it."""

    def __init__(self, task: Task, store: Store) -> None:
        self._task, self._store = task, store
        self._due_s = store.clock.now_s() + RETENTION_S  # not while devices connect after a start
        self._deletion = deletion(task, store)
        for head in store.heads.all_planned():
            _members(head, store)  # are in memory from now on

    def tick(self) -> None:
        """Delete the next slice if it is due; raises StateError."""
        if (now_s := self._store.clock.now_s()) < self._due_s:
            return
        self._due_s = now_s + PAUSE_S  # also if it fails
        for _ in self._deletion:
            return
        self._due_s = now_s + RETENTION_S
        self._deletion = deletion(self._task, self._store)


def served_blobs(task: Task, heads: Sequence[HeadRecord], state: rollout_state.State) -> set[bytes]:
    """Return the digests of the blobs that devices may download for a task with these heads, oldest first."""
    retained = _retained(heads, state)
    return task.blobs | {head.digest for head in retained} | _tensors(retained)


def needed_blobs(task: Task, store: Store, among: Collection[bytes]) -> set[bytes]:
    """Return the digests, among some, of blobs that must not be deleted now.

    The time that it takes grows neither with the stored submissions nor, but for planned heads, with their devices.
    """
    planned, asked = store.heads.all_planned(), set(among)
    needed = asked & _needed_but_submissions(task, store, planned)
    oldest = _oldest_round(store.heads.newest(task.digest), task.file.settings)
    needed |= store.submissions.digests_among(asked - needed, task=task.digest, oldest_round=oldest)
    for head in planned if needed != asked else ():
        needed |= asked.intersection(_members(head, store))
    return needed


def _needed_but_submissions(task: Task, store: Store, planned: Sequence[HeadRecord]) -> set[bytes]:
    retained, named = list[HeadRecord](), list(planned)
    every = sorted(store.heads.all(), key=lambda head: (head.task, head.version))
    for other, group in groupby(every, key=lambda head: head.task):  # they may be served again
        heads = list(group)
        forgotten = store.forgotten.newest_head(other)
        retained += _retained(heads, rollout_state.without_forgotten(rollout_of(heads), forgotten))
        named.append(heads[-1])
    return (
        task.blobs
        | {task.digest, *(task.manifest.continues or ())}
        | store.tasks()  # which may be continued
        | {digest for head in retained for digest in (head.digest, head.file)}
        | _tensors(retained)
        | {graph.digest for graphs in known_graphs(store).values() for graph in graphs.values()}
        | {head.members for head in named}
        | blobs_of_sums(store.facts)
    )


def delete_earlier_tasks(task: Task, store: Store) -> Iterator[None]:
    """Delete what is stored of tasks that another one has replaced `KEPT_S` ago, in slices; raises StateError.

    Until then, an operator can return to such a task, or continue it.
    """
    with store.transaction():
        graphs, now_s = known_graphs(store), store.clock.now_s()
        tasks = store.tasks() - {task.digest, *(task.manifest.continues or ())}
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
        if not expired.isdisjoint(graphs):
            kept = {key: roles for key, roles in graphs.items() if key not in expired}
            store.facts.put(CompiledGraphs(kept))
        if (after := NotServed(since_s)) != known:
            store.facts.put(after)
    for digest in tasks:
        if digest.hex() in expired:
            with store.transaction():
                drop_requests(store.facts, task=digest)
            while store.delete_rows(digest, SLICE_ROWS):
                yield
            event(log, logging.INFO, "earlier task deleted", task=digest)


def deletion(task: Task, store: Store) -> Iterator[None]:
    """Delete what nothing needs any more; yields after each slice. Raises StateError.

    What is needed is decided for each slice by what is stored then. A blob gets its name in the same tick as the row
    that names it is committed, and before it, so that no slice comes in between.
    """
    yield from delete_earlier_tasks(task, store)
    yield from store.blobs.delete_unneeded(partial(needed_blobs, task, store))


def delete_unneeded_blobs(task: Task, store: Store) -> None:
    """Delete what nothing needs any more, at once; raises StateError."""
    for _ in deletion(task, store):
        pass


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


def _members(head: HeadRecord, store: Store) -> Collection[bytes]:
    with contextlib.suppress(BlobLost):
        return store.members(head).values()
    return ()


def _retained(heads: Sequence[HeadRecord], state: rollout_state.State) -> list[HeadRecord]:
    versions = rollout_state.retained_heads(state, [head.version for head in heads])
    return [head for head in heads if head.version in versions]


def _tensors(heads: Sequence[HeadRecord]) -> set[bytes]:
    return {head.tensors.digest for head in heads if head.tensors is not None}
