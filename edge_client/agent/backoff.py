"""How long a device waits for an answer."""

FIRST_PATIENCE_S = 10.0
LAST_PATIENCE_S = 300.0

CAST_PATIENCE_S = 3.0
"""Seconds to wait for what is sent to the whole fleet before asking for it alone."""

MAX_BROKEN = 3
"""Times a transfer may arrive with another digest than announced before a person should look at it."""


def patience_s(attempts: int) -> float:
    """Seconds to wait for an answer before asking again."""
    return float(min(LAST_PATIENCE_S, FIRST_PATIENCE_S * 2.0 ** min(attempts, 10)))
