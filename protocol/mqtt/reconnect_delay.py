"""How long to wait before connecting again: exponential backoff with full jitter. No clock and no randomness."""

from collections.abc import Callable

MIN_RETRY_DELAY_S = 0.2
MAX_RETRY_DELAY_S = 60.0

USEFUL_MESSAGES = 16
"""Messages of a useful connection: more than are exchanged at the start of every one."""


def retry_delay_s(failures: int, uniform: Callable[[float, float], float]) -> float:
    """Return the seconds before the next attempt, spread so that a fleet does not reconnect all at once."""
    return uniform(MIN_RETRY_DELAY_S, min(MAX_RETRY_DELAY_S, 2.0 ** min(failures, 10)))


def failures_after(failures: int, *, connected_s: float, delay_s: float, messages: int) -> int:
    """Return the number of consecutive failures after another connection ended or could not be made.

    Only a useful connection resets the count: one that outlived the delay before it, or that carried more than the
    first few messages. A broker that ends every connection at the first publication is thus retried ever more slowly.
    """
    return 1 if connected_s > delay_s or messages >= USEFUL_MESSAGES else failures + 1
