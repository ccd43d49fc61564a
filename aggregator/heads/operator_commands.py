"""An operator's commands about heads: checked at once, left in the store, carried out by the aggregator."""

import time

from aggregator.coordination import canary_rollout
from aggregator.storage.store import Store
from protocol.errors import ConfigError

OUTCOME_TIMEOUT_S = 10.0
"""Seconds to wait for a running aggregator."""

POLL_S = 0.1


def usable_heads(store: Store, task: bytes) -> dict[int, bool]:
    """Return every head of a task, with True if all blobs that devices need for it are stored."""
    return {
        head.version: head.digest in store.blobs
        and (head.tensors is None or head.tensors.digest in store.blobs)
        for head in store.heads.all(task)
    }


def submit_command(store: Store, kind: canary_rollout.CommandKind, version: int | None = None) -> str:
    """Make a head current; return the outcome in words.

    Args:
        store: the state of an aggregator, running or not.
        kind: "rollback" to another head, or "promote" the candidate.
        version: the head to roll back to; None for the previous one.

    Raises:
        ConfigError: it cannot be done.
        StateError: there is no task yet, or the state cannot be written.
    """
    task = store.served_task().digest
    version = _check(store, task, kind, version)
    number = store.commands.add(task, kind, version)
    if not store.is_locked():
        return f"head {version} will be current when the aggregator is started"
    deadline_s = time.monotonic() + OUTCOME_TIMEOUT_S
    while (outcome := store.commands.outcome(number)) is None:
        if time.monotonic() > deadline_s:
            return f"the aggregator has not carried out the command yet; it will make head {version} current"
        time.sleep(POLL_S)
    if outcome:
        raise ConfigError(outcome)
    return f"head {version} is current"


def commanded_version(store: Store, task: bytes) -> int | None:
    """Return the head that pending commands will make current; None without pending commands."""
    heads = {head.version: True for head in store.heads.all(task)}  # checked when the commands were given
    return _after_pending(store, task, heads).current if store.commands.pending(task) else None


def _after_pending(store: Store, task: bytes, heads: dict[int, bool]) -> canary_rollout.State:
    state = store.heads.rollout(task)
    for earlier in store.commands.pending(task):
        command = canary_rollout.CommandReceived(earlier.kind, earlier.version, heads)
        state, _ = canary_rollout.step(state, command, settings=canary_rollout.Settings())
    return state


def _check(store: Store, task: bytes, kind: canary_rollout.CommandKind, version: int | None) -> int:
    """Return the head that a command makes current once the pending ones are carried out.

    Raises:
        ConfigError: it cannot be carried out.
    """
    heads = usable_heads(store, task)
    command = canary_rollout.CommandReceived(kind, version, heads)
    state, actions = canary_rollout.step(
        _after_pending(store, task, heads), command, settings=canary_rollout.Settings()
    )
    for action in actions:
        if isinstance(action, canary_rollout.RefuseCommand):
            raise ConfigError(action.reason)
    return state.current
