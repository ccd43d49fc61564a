"""Token buckets: how often a device may cause work, such as a download. Pure; the time is an argument."""

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

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
