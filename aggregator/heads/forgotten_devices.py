"""`aggregator forget`: deletes what is stored of a device's submissions, while the aggregator runs or not."""

import time
from collections.abc import Iterable, Mapping

from aggregator.heads.next_head import delete_members
from aggregator.storage.devices import ForgottenDevice
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.stored_values import NextHead, ServedTask
from protocol.errors import ConfigError


def forget(store: Store, device: str) -> list[str]:
    """Delete a device's submissions, evaluations and report; return what follows, a sentence each.

    All of it is deleted durably, or nothing. The aggregator notices it at once, or at its next start.

    Raises:
        ConfigError: nothing of the device is stored.
        StateError: the state cannot be written.
    """
    with store.transaction():
        newest = {head.task: head for head in store.heads.all()}  # the last one of each task
        digests = _digests(store, device, newest.values())
        if not digests:
            raise ConfigError(
                f"no submission of {device!r} is stored: `aggregator status` lists the devices that have submitted"
            )
        for task in digests:
            head = _newest_with(device, newest.get(task))
            store.forgotten.put(task, ForgottenDevice(device, head, time.time()))
        store.submissions.delete_device(device)
        store.evaluations.delete_device(device)
        store.devices.delete_info(device)
        store.quarantine.delete_findings(device)
        delete_members(store, [device])
    with store.transaction():  # no other device submits the same meanwhile
        every = {digest for of_task in digests.values() for digest in of_task}
        store.blobs.delete([digest for digest in every if not store.submissions.has_digest(digest)])
    return [f"forgot {device}: its submissions are deleted", *_consequences(store, device, newest)]


def _digests(store: Store, device: str, newest: Iterable[HeadRecord]) -> Mapping[bytes, set[bytes]]:
    """Return the digests of a device's submissions by task: the stored ones, and those in a head or a training."""
    found: dict[bytes, set[bytes]] = {}
    for task, digest in store.submissions.of_device(device):
        found.setdefault(task, set()).add(digest)
    pending = store.facts.get(NextHead)
    if pending is not None and device in pending.members:
        found.setdefault(pending.task, set()).add(pending.members[device].digest)
    for head in newest:
        if member := {**head.members, **head.quarantined}.get(device):
            found.setdefault(head.task, set()).add(bytes.fromhex(member))
    return found


def _newest_with(device: str, newest: HeadRecord | None) -> int:
    """Return the newest head that may have learned from a device; 0 with rounds, which cannot do without it.

    Of older heads than the newest, the members are not stored.
    """
    if newest is None or newest.tensors is not None:
        return 0
    return newest.version if device in {**newest.members, **newest.quarantined} else newest.version - 1


def _consequences(store: Store, device: str, newest: Mapping[bytes, HeadRecord]) -> list[str]:
    served, done = store.facts.get(ServedTask), []
    if served is not None and (head := newest.get(served.digest)) is not None:
        if served.settings.rounds is not None:
            done.append(
                "closed rounds have learned from it, and later ones learn from those: only a new task, with another "
                "`seed` under [client], does not"
            )
        elif device in {**head.members, **head.quarantined}:
            when = "now" if store.is_locked() else "when the aggregator is started"
            if not store.submissions.all(served.digest):
                when = "once another device submits"
            done.append(f"head {head.version} is made again without it {when}; until then it stays in use")
    known = store.keys.get(device)
    if known is None or known.revoked_s is None:
        done.append(f"it may upload again: to prevent that, run `aggregator revoke {device}`")
    return done
