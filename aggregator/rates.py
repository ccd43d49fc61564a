"""How often devices may cause work, and lines in the log: token buckets."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from protocol.log import event

Key = TypeVar("Key", bound=Hashable)

MAX_KEYS = 100_000
"""Buckets in memory; the one that was used least recently is dropped for one more, and is full when used again."""


class TokenBuckets(Generic[Key]):
    """A bucket of tokens per key: full at first, refilled at a constant rate.

    With `capacity` tokens and `per_s` more each second, the tokens taken in any t seconds are at most
    `capacity + per_s * t`. `left` of an earlier object, kept meanwhile, continues its buckets.
    """

    def __init__(
        self,
        *,
        capacity: float,
        per_s: float,
        left: Mapping[Key, tuple[float, float]] = MappingProxyType({}),
    ) -> None:
        self._capacity = capacity
        self._per_s = per_s
        self._left = dict(left)
        """Tokens left, and when (seconds of any clock that is never set back). Least recently used first."""

    def take(self, key: Key, tokens: float = 1.0, *, now_s: float) -> bool:
        """Take tokens from a bucket; returns False, and takes none, if it has not as many."""
        left = self.available(key, now_s=now_s)
        if left < tokens:
            return False
        self._left.pop(key, None)
        if len(self._left) >= MAX_KEYS:
            del self._left[next(iter(self._left))]
        self._left[key] = (left - tokens, now_s)
        return True

    def left(self, key: Key) -> tuple[float, float] | None:
        """Return the tokens left in a bucket at its last use, and when that was; None if it is full."""
        return self._left.get(key)

    def wait_s(self, key: Key, tokens: float = 1.0, *, now_s: float) -> float:
        """Return the seconds until a bucket has as many tokens; 0 if it has."""
        return max(0.0, tokens - self.available(key, now_s=now_s)) / self._per_s

    def available(self, key: Key, *, now_s: float) -> float:
        """Return the tokens in a bucket."""
        left, since_s = self._left.get(key, (self._capacity, now_s))
        return min(self._capacity, left + max(0.0, now_s - since_s) * self._per_s)


LINES_AT_ONCE = 100
"""Lines about one device with the same message, after a pause."""

LINES_PER_S = 10 / 60

MAX_COUNTS = 10_000
"""Counts of omitted lines in memory."""


class DeviceEvents:
    """Events that devices cause as often as they want: the lines of each device and message are limited.

    A line has the number of those that were omitted before it, as `omitted_before`. `clock` returns seconds.
    """

    def __init__(self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lines = TokenBuckets[tuple[str, str]](capacity=LINES_AT_ONCE, per_s=LINES_PER_S)
        self._omitted: Counter[tuple[str, str]] = Counter()

    def event(self, level: int, message: str, *, device: str, **fields: object) -> None:
        """Log an event like `protocol.log.event`, or count it as omitted."""
        key = (device, message)
        if self._lines.take(key, now_s=self._clock()):
            omitted = self._omitted.pop(key, None)
            event(self._logger, level, message, device=device, **fields, omitted_before=omitted)
        elif key in self._omitted or len(self._omitted) < MAX_COUNTS:
            self._omitted[key] += 1
