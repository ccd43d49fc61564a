"""Who is quarantined: what a training finds is stored and told, and an operator may know better."""

import logging
import time

from aggregator.storage.store import REVOKED, HeadRow, Store
from aggregator.training.jobs import Result
from protocol.errors import ConfigError, StateError

log = logging.getLogger(__name__)


def keep_asides(store: Store, head: HeadRow, result: Result) -> None:
    """Store who was quarantined for a head, and that others no longer are; say what is new.

    Who was readmitted while the head was trained stays readmitted, and who was revoked stays out.

    Raises:
        StateError: it cannot be stored.
    """
    known = store.asides(head.task)
    for device in sorted({**head.members, **head.aside}):
        before = known.get(device)
        if before is not None and (before.readmitted_s is not None or before.why == REVOKED):
            continue
        if device in head.aside:
            store.quarantined(head.task, device, why=result.aside[device], now_s=head.trained_s)
            if before is None:
                log.warning(
                    "%s is quarantined: %s; `aggregator readmit %s` takes it in all the same",
                    *(device, result.aside[device], device),
                )
        elif before is not None:
            store.forget_aside(head.task, device)
            log.info("%s is no longer quarantined: what it has uploaded is like the others'", device)
    if result.doubt:
        log.warning("%s", result.doubt)


def readmit(store: Store, device: str) -> str:
    """Have a device's prototypes trained on all the same; returns what comes of it.

    Raises:
        ConfigError: it is not quarantined, or was revoked.
        StateError: there is no task yet, or the state cannot be written.
    """
    task = bytes.fromhex(store.fact("task"))
    if not task:
        raise StateError(f"no task in {store.folder} yet: start `aggregator run`")
    aside = store.asides(task).get(device)
    if aside is None:
        raise ConfigError(f"{device} is not quarantined: `aggregator status` shows who is")
    if aside.readmitted_s is not None:
        return f"{device} was readmitted before"
    if aside.why == REVOKED:
        raise ConfigError(f"{device} is quarantined because {aside.why}: enroll it again")
    store.readmit(task, device, now_s=time.time())
    when = "it is in the next head" if store.is_locked() else "it is in the next head after the start"
    return f"{device} is readmitted: {when}"
