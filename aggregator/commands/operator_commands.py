"""An operator's commands about heads and submissions, in transactions of their own."""

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from aggregator.coordination.canary_rollout import commanded, named_head
from aggregator.coordination.rollout_state import CommandKind, HeadCommand, RefuseCommand, without_forgotten
from aggregator.heads.rollout_steps import log_action, with_made_heads
from aggregator.storage.heads import HeadRecord
from aggregator.storage.quarantine import REVOKED, ForgottenDevice
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask
from aggregator.sums.stored_lists import devices_of, drop_requests, opened_tasks, sums_of
from protocol.errors import BlobLost, ConfigError


def make_current(store: Store, kind: CommandKind, version: int | None = None) -> str:
    """Make a head current, the previous one without `version`; return the outcome in words.

    Raises ConfigError if that is impossible, and StateError if there is no task yet or the state cannot be written.
    """
    served = store.served_task()
    task = served.digest
    with store.transaction():
        heads = {head.version: head for head in store.heads.all(task)}
        state = store.heads.rollout_among(heads.values(), task)
        now_s = store.clock.now_s()
        state, actions = with_made_heads(state, heads, now_s=now_s, settings=served.rollout)
        command = HeadCommand(kind, version)
        command = replace(command, heads=_usable(store, heads, named_head(state, command)))
        state, done = commanded(state, command)
        for action in done:
            if isinstance(action, RefuseCommand):
                raise ConfigError(action.reason)
        state = without_forgotten(state, state.forgotten)
        store.heads.put_rollout(task, state)
    for action in (*actions, *done):
        log_action(store, state, action)
    if not store.is_served:
        return f"head {state.current} will be current when the aggregator is started"
    return f"head {state.current} is current"


def _usable(store: Store, heads: Mapping[int, HeadRecord], named: int | None) -> Mapping[int, bool]:
    """Return every head with True, the one that is named with whether its blobs are stored."""
    return {
        version: version != named
        or (head.digest in store.blobs and (head.tensors is None or head.tensors.digest in store.blobs))
        for version, head in heads.items()
    }


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
    when = "" if store.is_served else " after the start of the aggregator"
    return f"released {device}: the next head{when} includes it"


def forget(store: Store, device: str) -> list[str]:
    """Delete a device's submissions, evaluations and report; return what follows, a sentence each.

    All of it is deleted durably, or nothing. Sums of earlier tasks that a second operator has opened stay, and a list
    that it has not opened is made again without the device.

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
            when = "now" if store.is_served else "when the aggregator is started"
            if not store.submissions.all(served.digest):
                when = "once another device submits"
            in_use = store.heads.rollout(head.task).current or head.version
            done.append(f"head {in_use} is made again without it {when}; until then it stays in use")
    known = store.keys.get(device)
    if known is None or known.revoked_s is None:
        done.append(f"it may upload again: to prevent that, run `aggregator revoke {device}`")
    return done
