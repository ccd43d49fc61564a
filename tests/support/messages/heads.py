"""Heads in a store, without a training."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from aggregator.coordination.rollout_state import State, activated
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from protocol.wire.messages import Evaluation
from tests.support.messages.submissions import TASK

NOBODY: Mapping[str, bytes] = MappingProxyType({})


def initial_state(versions: Iterable[int]) -> State:
    """Return the rollout of heads that all went to every device, one after the other."""
    state = State()
    for version in sorted(versions):
        state = replace(activated(state, version), newest=version)
    return state


def add_head(
    store: Store,
    version: int,
    *,
    task: bytes = TASK,
    members: Mapping[str, bytes] = NOBODY,
    is_used: bool = True,
    **fields: Any,
) -> HeadRecord:
    """Store a head of submissions, by device with their digests.

    With `is_used`, all heads of the task were current in turn.
    """
    covered = {"up_to": store.newest_change(), "members": store.put_members(members), "devices": len(members)}
    head = HeadRecord(task=task, version=version, state="made", **{**covered, **fields})
    store.heads.put(head)
    if is_used:
        store.heads.put_rollout(task, initial_state(each.version for each in store.heads.all(task)))
    return head


def evaluate(
    store: Store, device: str, version: int, *, correct: int, previous: int, images: int = 10
) -> None:
    """Let a device have evaluated a head of TASK and the one before it."""
    zeros = (0, 0)
    found = Evaluation(
        task=TASK,
        head_version=version,
        correct=(correct, *zeros),
        incorrect=(images - correct, *zeros),
        previous_correct=(previous, *zeros),
    )
    store.evaluations.put(device, found, digest=b"%d" % version, now_s=60.0)


def plan_head(
    store: Store, version: int, *, task: bytes = TASK, members: Mapping[str, bytes] = NOBODY, **fields: Any
) -> HeadRecord:
    """Store a planned head of submissions."""
    planned = {"members": store.put_members(members), "devices": len(members), "up_to": store.newest_change()}
    head = HeadRecord(task=task, version=version, **{**planned, **fields})
    store.heads.put(head)
    return head
