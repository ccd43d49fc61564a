"""An operator's commands: checked at once, left in the store, carried out by the aggregator."""

import time
from dataclasses import replace

from aggregator.coordination.canary_rollout import commanded, named_head
from aggregator.coordination.rollout_state import CommandKind, HeadCommand, RefuseCommand, State
from aggregator.storage.devices import REVOKED
from aggregator.storage.store import Store
from protocol.errors import ConfigError

OUTCOME_TIMEOUT_S = 10.0
"""Seconds to wait for a running aggregator."""

POLL_S = 0.1


def with_heads(store: Store, task: bytes, state: State, command: HeadCommand) -> HeadCommand:
    """Return a command in a state, with every head, and whether the blobs of the one that it names are stored."""
    named = named_head(state, command)
    heads = {
        head.version: head.version != named
        or (head.digest in store.blobs and (head.tensors is None or head.tensors.digest in store.blobs))
        for head in store.heads.all(task)
    }
    return replace(command, heads=heads)


def submit_command(store: Store, kind: CommandKind, version: int | None = None) -> str:
    """Make a head current, the previous one without `version`; return the outcome in words.

    Raises ConfigError if that is impossible, and StateError if there is no task yet.
    """
    task = store.served_task().digest
    state = _after_pending(store, task)
    state, actions = commanded(state, with_heads(store, task, state, HeadCommand(kind, version)))
    for action in actions:
        if isinstance(action, RefuseCommand):
            raise ConfigError(action.reason)
    version = state.current
    number = store.commands.add(task, HeadCommand(kind, version))
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
    return _after_pending(store, task).current if store.commands.pending(task) else None


def _after_pending(store: Store, task: bytes) -> State:
    state = store.heads.rollout(task)
    heads = {head.version: True for head in store.heads.all(task)}  # checked when the commands were given
    for command in store.commands.pending(task).values():
        state, _ = commanded(state, replace(command, heads=heads))
    return state


def release(store: Store, device: str) -> str:
    """Release a device from quarantine; return the outcome in words.

    Raises ConfigError if it is not quarantined or was revoked, and StateError if there is no task yet.
    """
    task = store.served_task().digest
    entry = store.quarantine.all(task).get(device)
    if entry is None:
        raise ConfigError(f"{device} is not quarantined: `aggregator status` lists quarantined devices")
    if entry.released_s is not None:
        return f"{device} is already released"
    if entry.reason == REVOKED:
        raise ConfigError(f"{device} is revoked: enroll it again with `aggregator enroll --renew`")
    store.quarantine.release(task, device, now_s=time.time())
    when = "" if store.is_locked() else " after the start of the aggregator"
    return f"released {device}: the next head{when} includes it"
