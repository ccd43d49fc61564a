"""How long to wait before connecting again: exponential backoff with full jitter. No clock and no randomness."""

from collections.abc import Callable

MIN_RETRY_DELAY_S = 0.2
MAX_RETRY_DELAY_S = 60.0

USEFUL_MESSAGES = 16
"""Messages of a useful connection: more than are exchanged at the start of every one."""


def retry_delay_s(failures: int, uniform: Callable[[float, float], float]) -> float:
    """Return the seconds before the next attempt, spread so that a fleet does not reconnect all at once."""
    return uniform(MIN_RETRY_DELAY_S, min(MAX_RETRY_DELAY_S, 2.0 ** min(failures, 10)))


class Backoff:
    """The pauses between a session's connections to one or more addresses, which are tried in turn.

    A pause follows the end of a connection: all clients of a lost broker move at the same time. An address that cannot
    be reached is followed by the next one at once, and a whole round of them by a pause.

    The pauses grow with the number of failures, which only a useful connection resets: one that outlived the last
    pause, or that carried more than the first few messages. A broker that ends every connection at the first
    publication is thus retried ever more slowly.
    """

    def __init__(self, addresses: int, uniform: Callable[[float, float], float]) -> None:
        self._addresses = addresses
        self._uniform = uniform
        self._unreachable = 0
        self._failures = 0
        self._pause_s = 0.0

    def pause_s(self, *, connected_s: float, messages: int) -> float:
        """Return the seconds to wait after a connection has ended, or could not be made (`connected_s` 0)."""
        if connected_s > self._pause_s or messages >= USEFUL_MESSAGES:
            self._failures = 0
        self._unreachable = 0 if connected_s else self._unreachable + 1
        if self._unreachable % self._addresses:
            return 0.0
        self._failures += 1
        self._pause_s = retry_delay_s(self._failures, self._uniform)
        return self._pause_s
