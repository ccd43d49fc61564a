"""The quarantine: stores and logs what outlier detection decides; an operator may release a device."""

import logging
import time

from aggregator.storage.heads import HeadRecord
from aggregator.storage.quarantine import REVOKED
from aggregator.storage.store import Store
from aggregator.training.jobs import Result
from protocol.errors import ConfigError
from protocol.log import event

log = logging.getLogger(__name__)


def update_quarantine(store: Store, head: HeadRecord, result: Result) -> None:
    """Quarantine the devices that a training excluded, and end the quarantine of those that it did not.

    A device that was released meanwhile stays released, and a revoked one stays quarantined.

    Raises:
        StateError: it cannot be stored.
    """
    known = store.quarantine.all(head.task)
    for device in sorted({**head.members, **head.quarantined}):
        entry = known.get(device)
        if entry is not None and (entry.released_s is not None or entry.reason == REVOKED):
            continue
        if device in head.quarantined:
            reason = result.quarantined[device]
            store.quarantine.add(head.task, device, reason=reason, now_s=head.trained_s)
            if entry is None:
                what_to_do = "device quarantined: `aggregator release DEVICE` includes it again"
                event(log, logging.WARNING, what_to_do, device=device, reason=reason)
        elif entry is not None:
            store.quarantine.delete(head.task, device)
            event(log, logging.INFO, "device no longer quarantined", device=device)
    if result.warning:
        event(log, logging.WARNING, "outlier detection without effect", reason=result.warning)


def release(store: Store, device: str) -> str:
    """Release a device from quarantine; return the outcome in words.

    Raises:
        ConfigError: it is not quarantined, or was revoked.
        StateError: there is no task yet, or the state cannot be written.
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
