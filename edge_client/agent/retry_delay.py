"""Delays before a request is repeated."""

FIRST_DELAY_S = 10.0
MAX_DELAY_S = 300.0

MAX_DAMAGED = 3
"""Transfers with a wrong digest after which the device stops trying."""


def retry_delay_s(attempts: int) -> float:
    """Return the seconds to wait for an answer, doubled with each attempt up to `MAX_DELAY_S`."""
    return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempts, 10)))
