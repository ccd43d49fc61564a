"""Refused messages, counted for `aggregator status` and logged."""

import logging
import time

from aggregator.ingest.validation import Refused
from aggregator.storage.store import Store
from protocol.log import event

log = logging.getLogger(__name__)

MAX_DETAIL = 500


def count_refusal(store: Store, device: str, refused: Refused) -> None:
    """Count a refused message; log the first of its device and reason.

    Raises:
        StateError: the count cannot be stored.
    """
    detail = refused.detail[:MAX_DETAIL]
    if store.refusals.count(device, reason=refused.reason, detail=detail, now_s=time.time()):
        event(log, logging.WARNING, "message refused", device=device, reason=refused.reason, detail=detail)
