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
                    "%s is quarantined: %s; `aggregator readmit %s` takes it in all the same",
                    *(device, result.aside[device], device),
                )
        elif before is not None:
            store.quarantine.delete(head.task, device)
            log.info("%s is no longer quarantined: what it has uploaded is like the others'", device)
    if result.doubt:
        log.warning("%s", result.doubt)


def readmit(store: Store, device: str) -> str:
    """Have a device's prototypes trained on all the same; returns what comes of it.

    Raises:
        ConfigError: it is not quarantined, or was revoked.
        StateError: there is no task yet, or the state cannot be written.
    """
    task = store.served_task().digest
    aside = store.quarantine.all(task).get(device)
    if aside is None:
        raise ConfigError(f"{device} is not quarantined: `aggregator status` shows who is")
    if aside.released_s is not None:
        return f"{device} was readmitted before"
    if aside.reason == REVOKED:
        raise ConfigError(f"{device} is quarantined because {aside.reason}: enroll it again")
    store.quarantine.release(task, device, now_s=time.time())
    when = "it is in the next head" if store.is_locked() else "it is in the next head after the start"
    return f"{device} is readmitted: {when}"
