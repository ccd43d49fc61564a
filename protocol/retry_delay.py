"""Delays before a request or a job is repeated. No clock and no randomness."""

FIRST_DELAY_S = 10.0
MAX_DELAY_S = 300.0


def retry_delay_s(attempts: int) -> float:
    """Return the seconds to wait, doubled with each earlier attempt up to `MAX_DELAY_S`."""
    return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempts, 10)))
