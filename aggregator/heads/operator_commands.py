"""An operator's commands: checked at once, left in the store, carried out by the aggregator."""

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from aggregator.coordination.canary_rollout import commanded, named_head
from aggregator.coordination.rollout_state import CommandKind, HeadCommand, RefuseCommand, State
from aggregator.storage.devices import REVOKED, ForgottenDevice
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask
from aggregator.sums.stored_lists import devices_of, drop_requests, opened_tasks, sums_of
from protocol.errors import BlobLost, ConfigError

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
    if not store.database.is_locked():
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
    with store.transaction():
        store.quarantine.release(task, device, now_s=time.time())
        store.submissions.count_again(device)
    when = "" if store.database.is_locked() else " after the start of the aggregator"
    return f"released {device}: the next head{when} includes it"


def forget(store: Store, device: str) -> list[str]:
    """Delete a device's submissions, evaluations and report; return what follows, a sentence each.

    All of it is deleted durably, or nothing. The aggregator notices it at once, or at its next start. Sums of earlier
    tasks that a second operator has opened stay, and a list that it has not opened is made again without the device.

    Raises:
        ConfigError: nothing of the device is stored, or its submission is in a sum of the task that is served.
        StateError: the state cannot be written.
    """
    with store.transaction():
        served = store.facts.get(ServedTask)
        if served is not None and device in devices_of(sums_of(store.facts, served.digest)):
            raise ConfigError(
                f"the submission of {device} is in a sum that a second operator has opened or is asked for: it cannot "
                "be taken out. A new task is without the device; revoke it, so that it submits no more"
            )
        newest = {head.task: head for head in store.heads.all()}  # the last one of each task
        digests = _digests(store, device, newest.values())
        if not digests:
            raise ConfigError(
                f"no submission of {device!r} is stored: `aggregator status` lists the devices that have submitted"
            )
        summed = opened_tasks(store.facts, device)
        for task in digests.keys() - summed:  # a head of opened sums cannot be made again
            head = _newest_with(store, device, newest.get(task))
            if head and store.heads.rollout(task).current <= head:  # also if it is not the newest
                head = newest[task].version
            store.forgotten.put(task, ForgottenDevice(device, head, time.time()))
        drop_requests(store.facts, device=device)
        store.submissions.delete(device)
        store.evaluations.delete_device(device)
        store.devices.delete_info(device)
        store.quarantine.delete_findings(device)
        for planned in store.heads.all_planned():
            if _is_of(store, planned, device):
                store.heads.delete(planned.task, planned.version)
    with store.transaction():  # no other device submits the same meanwhile
        every = {digest for of_task in digests.values() for digest in of_task}
        store.blobs.delete([digest for digest in every if not store.submissions.has_digest(digest)])
    forgot = f"forgot {device}: its submissions are deleted"
    if summed:
        forgot += ", except from sums of earlier tasks that a second operator has opened"
    return [forgot, *_consequences(store, device, newest)]


def _digests(store: Store, device: str, newest: Iterable[HeadRecord]) -> Mapping[bytes, set[bytes]]:
    """Return the digests of a device's submissions by task: the stored ones, and those in a head or a training."""
    found: dict[bytes, set[bytes]] = {}
    for task, digest in store.submissions.of_device(device):
        found.setdefault(task, set()).add(digest)
    for head in (*store.heads.all_planned(), *newest):
        with contextlib.suppress(BlobLost):
            if (of_head := store.members(head).get(device)) is not None:
                found.setdefault(head.task, set()).add(of_head)
    return found


def _newest_with(store: Store, device: str, newest: HeadRecord | None) -> int:
    """Return the newest head that may have learned from a device; 0 with rounds, which cannot do without it.

    Of older heads than the newest, the members are not stored.
    """
    if newest is None or newest.tensors is not None:
        return 0
    return newest.version if _is_of(store, newest, device) else newest.version - 1


def _is_of(store: Store, head: HeadRecord, device: str) -> bool:
    """Return True if a head is of a device's submission, or may be, since it is lost of which it is."""
    try:
        return device in store.members(head)
    except BlobLost:
        return True


def _consequences(store: Store, device: str, newest: Mapping[bytes, HeadRecord]) -> list[str]:
    served, done = store.facts.get(ServedTask), []
    if served is not None and (head := newest.get(served.digest)) is not None:
        if served.settings.rounds is not None:
            done.append(
                "closed rounds have learned from it, and later ones learn from those: only a new task, with another "
                "`seed` under [client], does not"
            )
        elif any(
            each.device == device and each.head >= head.version for each in store.forgotten.all(head.task)
        ):
            when = "now" if store.database.is_locked() else "when the aggregator is started"
            if not store.submissions.all(served.digest):
                when = "once another device submits"
            in_use = store.heads.rollout(head.task).current or head.version
            done.append(f"head {in_use} is made again without it {when}; until then it stays in use")
    known = store.keys.get(device)
    if known is None or known.revoked_s is None:
        done.append(f"it may upload again: to prevent that, run `aggregator revoke {device}`")
    return done
