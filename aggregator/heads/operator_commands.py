"""What an operator orders about heads: checked at once, left in the store, taken by the aggregator."""

import time

from aggregator.coordination import rollout
from aggregator.storage.store import Store
from protocol.errors import ConfigError

PATIENCE_S = 10.0
"""Seconds that a running aggregator is waited for."""

LOOK_S = 0.1


def usable_heads(store: Store, task: bytes) -> dict[int, bool]:
    """Every head of a task, and whether all is there that devices need of it."""
    return {
        head.version: head.digest in store.blobs
        and (head.tensors is None or head.tensors.digest in store.blobs)
        for head in store.heads.all(task)
    }


def order(store: Store, kind: rollout.CommandKind, version: int | None = None) -> str:
    """Have a head made current; returns what has become of it.

    Args:
        store: the aggregator's state, whether it runs or not.
        kind: go back to another head, or take the candidate.
        version: of the head to go back to; None for the one that was current before.

    Raises:
        ConfigError: it cannot be done, and why.
        StateError: there is no task yet, or the state cannot be written.
    """
    task = store.served_task().digest
    version = _agreed(store, task, kind, version)
    number = store.commands.add(task, kind, version)
    if not store.is_locked():
        return f"head {version} will be current when the aggregator is started"
    deadline_s = time.monotonic() + PATIENCE_S
    while (outcome := store.commands.outcome(number)) is None:
        if time.monotonic() > deadline_s:
            return f"the aggregator has not taken the order yet; it will make head {version} current"
        time.sleep(LOOK_S)
    if outcome:
        raise ConfigError(outcome)
    return f"head {version} is current"


def ordered(store: Store, task: bytes) -> int | None:
    """The head that will be current by the orders that nobody has taken yet; None if there are none."""
    heads = {head.version: True for head in store.heads.all(task)}  # as agreed when the orders were given
    return _foreseen(store, task, heads).current if store.commands.pending(task) else None


def _foreseen(store: Store, task: bytes, heads: dict[int, bool]) -> rollout.State:
    """What the orders that nobody has taken yet will make of the rollout."""
    state = store.heads.rollout(task)
    for earlier in store.commands.pending(task):
        event = rollout.CommandReceived(earlier.kind, earlier.version, heads)
        state, _ = rollout.step(state, event, settings=rollout.Settings())
    return state


def _agreed(store: Store, task: bytes, kind: rollout.CommandKind, version: int | None) -> int:
    """The head that an order is about, after those that nobody has taken yet.

    Raises:
        ConfigError: it cannot be carried out.
    """
    heads = usable_heads(store, task)
    event = rollout.CommandReceived(kind, version, heads)
    state, actions = rollout.step(_foreseen(store, task, heads), event, settings=rollout.Settings())
    for action in actions:
        if isinstance(action, rollout.RefuseCommand):
            raise ConfigError(action.reason)
    return state.current
