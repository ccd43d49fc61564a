"""Items in the outbox that are not uploaded any more: damaged on disk, or not allowed by the device's owner."""

import logging

from edge_client.agent.state import Kind, UploadItem
from edge_client.privacy.policy import may_upload
from edge_client.storage.device_state import DeviceState
from protocol.errors import MalformedMessage
from protocol.log import event
from protocol.wire.codec import decode
from protocol.wire.messages import Evaluation, Submission

log = logging.getLogger(__name__)


def drop_damaged(store: DeviceState) -> set[Kind]:
    """Delete damaged items, and return their kinds."""
    damaged = store.outbox.drop_damaged()
    if damaged:
        event(log, logging.WARNING, "deleted damaged items from the outbox", items=len(damaged))
    return {item.kind for item in damaged}


def drop_forbidden(store: DeviceState, max_epsilon: float | None) -> None:
    """Delete what an earlier start has built, and the owner's `max_epsilon` of this start does not allow."""
    if max_epsilon is None:
        return
    forbidden = [item for item in store.outbox.items() if not _is_allowed(store, item, max_epsilon)]
    if forbidden:
        store.outbox.drop(forbidden)
        text = "deleted items from the outbox that --max-epsilon does not allow to be uploaded"
        event(log, logging.WARNING, text, items=len(forbidden), max_epsilon=max_epsilon)


def _is_allowed(store: DeviceState, item: UploadItem, max_epsilon: float) -> bool:
    """Return whether an item may be uploaded; one that the aggregator could not decode either may not."""
    payload = store.outbox.payload(item) or b""
    size = len(payload)
    try:
        message: Submission | Evaluation = (
            decode(payload, Submission, max_bytes=size)
            if item.kind == "submission"
            else decode(payload, Evaluation, max_bytes=size)
        )
    except MalformedMessage:
        return False
    return may_upload(message, max_epsilon=max_epsilon)
