"""Who is quarantined: what a training finds is stored and told, and an operator may know better."""

import logging
import time

from aggregator.storage.heads import HeadRecord
from aggregator.storage.quarantine import REVOKED
from aggregator.storage.store import Store
from aggregator.training.jobs import Result
from protocol.errors import ConfigError

log = logging.getLogger(__name__)


def keep_asides(store: Store, head: HeadRecord, result: Result) -> None:
    """Store who was quarantined for a head, and that others no longer are; say what is new.

    Who was readmitted while the head was trained stays readmitted, and who was revoked stays out.

    Raises:
        StateError: it cannot be stored.
    """
    known = store.quarantine.all(head.task)
    for device in sorted({**head.members, **head.quarantined}):
        before = known.get(device)
        if before is not None and (before.released_s is not None or before.reason == REVOKED):
            continue
        if device in head.quarantined:
            store.quarantine.add(head.task, device, reason=result.aside[device], now_s=head.trained_s)
            if before is None:
                log.warning(
                    "%s is quarantined: %s; `aggregator release %s` releases it",
                    *(device, result.aside[device], device),
                )
        elif before is not None:
            store.quarantine.delete(head.task, device)
            log.info("%s is no longer quarantined: what it has uploaded is like the others'", device)
    if result.doubt:
        log.warning("%s", result.doubt)


def release(store: Store, device: str) -> str:
    """Release a device from quarantine; returns the outcome for the operator.

    Raises:
        ConfigError: it is not quarantined, or was revoked.
        StateError: there is no task yet, or the state cannot be written.
    """
    task = store.served_task().digest
    aside = store.quarantine.all(task).get(device)
    if aside is None:
        raise ConfigError(f"{device} is not quarantined: `aggregator status` lists quarantined devices")
    if aside.released_s is not None:
        return f"{device} is already released"
    if aside.reason == REVOKED:
        raise ConfigError(f"{device} is revoked: enroll it again with `aggregator enroll --renew`")
    store.quarantine.release(task, device, now_s=time.time())
    when = "" if store.is_locked() else " after the start of the aggregator"
    return f"released {device}: the next head{when} includes it"
