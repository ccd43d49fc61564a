"""The bytes that the aggregator receives and sends, stored every few seconds for `aggregator status`."""

import time

from aggregator.storage.store import Store
from aggregator.storage.stored_values import Traffic

KEEP_S = 5.0
"""Seconds between writes: what a crash forgets at most."""


class TrafficMeter:
    """Counts bytes on top of those of earlier starts."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._before = store.facts.get(Traffic) or Traffic()
        self._kept = self._before
        self._next_s = 0.0
        self.received = 0

    def keep(self, *, sent: int, at_once: bool = False) -> None:
        """Store the sums if they have changed and the last write is KEEP_S old; raises StateError."""
        if time.monotonic() < self._next_s and not at_once:
            return
        self._next_s = time.monotonic() + KEEP_S
        now = Traffic(self._before.received + self.received, self._before.sent + sent)
        if now != self._kept:
            self._store.facts.put(now)
            self._kept = now
