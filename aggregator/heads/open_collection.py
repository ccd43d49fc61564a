"""The open collection of submissions, as the rows of heads, submissions and devices make it."""

import logging

from aggregator.coordination.collection import Collection
from aggregator.coordination.round_state import DeviceDecisions, Settings
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from protocol.errors import BlobLost
from protocol.log import event

log = logging.getLogger(__name__)


def open_collection(store: Store, task: bytes, settings: Settings) -> Collection:
    """Return the open collection of a task in figures; raises StateError."""
    head, decisions = store.heads.newest(task), store.decisions(task)
    is_round = settings.rounds is not None
    return store.submissions_of(task, settings).read(
        *((head.version, head.up_to) if head is not None else (0, 0)),
        expected=_expected(store, settings, head, decisions) if is_round else None,
        must_retrain=not is_round and head is not None and _must_retrain(store, head, decisions),
    )


def _expected(
    store: Store, settings: Settings, head: HeadRecord | None, decisions: DeviceDecisions
) -> set[str] | None:
    """Return the devices that a round waits for: those listed, else those in the previous round."""
    if settings.devices is not None:
        return set(settings.devices - decisions.quarantined)
    covered = _devices(store, head) if head is not None else None
    return None if covered is None else set(filter(decisions.counts, covered))


def _must_retrain(store: Store, head: HeadRecord, decisions: DeviceDecisions) -> bool:
    """Return True if a head was made of submissions that no longer count."""
    if any(newest >= head.version for newest in decisions.forgotten.values()):
        return True
    gone = decisions.quarantined - head.quarantined.keys()
    if not gone:
        return False
    covered = _devices(store, head)
    return covered is None or not gone.isdisjoint(covered)


def _devices(store: Store, head: HeadRecord) -> set[str] | None:
    """Return the devices of a head, also those that it excluded; None if it is lost which they are."""
    try:
        return set(store.members(head))
    except BlobLost as error:
        event(log, logging.ERROR, "cannot read which devices a head is of", head=head.version, reason=error)
        return None
