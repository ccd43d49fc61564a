"""Queues that tell a test when the threads of a device wait for work, and a clock that the test moves."""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

SETTLE_S = 60.0
"""Seconds that a device may work on one message, on a busy machine."""

_CLOCK = time.monotonic


class Clock:
    """The system's monotonic clock, which a test sets forward; all clocks of a process are one."""

    _ahead_s = 0.0
    _users = 0

    def advance(self, seconds: float) -> None:
        Clock._ahead_s += seconds

    def install(self) -> None:
        Clock._users += 1
        time.monotonic = lambda: _CLOCK() + Clock._ahead_s

    def remove(self) -> None:
        Clock._users -= 1
        if not Clock._users:
            time.monotonic = _CLOCK


class QuietQueues:
    """The queues that a program makes in `installed`; their timeouts pass in `expire` only."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: list[_Queue] = []
        self.is_over = False
        """Set once the program has ended: no thread waits at its queues any more."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace `queue.SimpleQueue`."""

        def make() -> "_Queue":
            self._queues.append(_Queue(self._changed))
            return self._queues[-1]

        with patch.object(queue, "SimpleQueue", make):
            yield

    def settle(self) -> None:
        """Wait until every queue is empty, and a thread waits at it."""
        with self._changed:
            if not self._changed.wait_for(self._is_quiet, SETTLE_S):
                raise TimeoutError(f"the device still works after {SETTLE_S:g} s")

    def expire(self) -> None:
        """End the waiting of every `get` that has a timeout, and settle."""
        self.settle()
        with self._changed:
            for each in self._queues:
                each.is_expired = each.has_timeout
            self._changed.notify_all()
        self.settle()

    def end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def _is_quiet(self) -> bool:
        return self.is_over or all(each.is_quiet for each in self._queues)


class _Queue:
    """Like `queue.SimpleQueue`."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._items: deque[Any] = deque()
        self._waiting = 0
        self.has_timeout = False
        self.is_expired = False

    @property
    def is_quiet(self) -> bool:
        return bool(self._waiting) and not self._items and not self.is_expired

    def put(self, item: Any) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def get(self, timeout: float | None = None) -> Any:
        with self._changed:
            self._waiting += 1
            self.has_timeout = timeout is not None
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._items or self.is_expired)
                if not self._items:
                    raise queue.Empty
                return self._items.popleft()
            finally:
                self._waiting -= 1
                self.has_timeout = self.is_expired = False

    def empty(self) -> bool:
        return not self._items
