"""The bytes that the aggregator receives and sends, stored every few seconds for `aggregator status`."""

import time

from aggregator.storage.store import Store
from aggregator.storage.stored_values import Traffic

KEEP_S = 5.0
"""Seconds between writes: what a crash forgets at most."""


class TrafficMeter:
    """Counts bytes on top of those of earlier starts, and of other programs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept = Traffic()
        self._next_s = 0.0
        self.received = 0

    def keep(self, *, sent: int, at_once: bool = False) -> None:
        """Store the sums if they have changed and the last write is KEEP_S old; raises StateError."""
        if time.monotonic() < self._next_s and not at_once:
            return
        self._next_s = time.monotonic() + KEEP_S
        now, kept = Traffic(self.received, sent), self._kept
        if now == kept:
            return
        with self._store.transaction():
            sums = self._store.facts.get(Traffic) or Traffic()
            received = sums.received + now.received - kept.received
            self._store.facts.put(Traffic(received, sums.sent + now.sent - kept.sent))
        self._kept = now
