"""Delays before a request or a job is repeated. No clock and no randomness."""

FIRST_DELAY_S = 10.0
MAX_DELAY_S = 300.0


def retry_delay_s(attempts: int) -> float:
    """Return the seconds to wait, doubled with each earlier attempt up to `MAX_DELAY_S`."""
    return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempts, 10)))


class RestartDelay:
    """The delay before a program is started again: it grows with each failure, until one run has lasted."""

    def __init__(self) -> None:
        self._attempts = 0

    def next_s(self, *, ran_s: float) -> float:
        """Return the seconds to wait after a run of so many seconds."""
        if ran_s >= MAX_DELAY_S:
            self._attempts = 0
        self._attempts += 1
        return retry_delay_s(self._attempts - 1)
