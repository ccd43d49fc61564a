"""Compare the start times of two programs with the same name. No I/O and no clock."""

MAX_CLOCK_SKEW_S = 3600.0
"""Seconds by which another machine's clock may be ahead."""


def is_newer(epoch: int, *, own: int, now_s: float) -> bool:
    """Return whether a presence on this program's own topic belongs to a program that started later.

    Epochs are start times in unix seconds. One from the far future is ignored: it is retained by the broker, so that an
    attacker who published it once would shut this program out for good.
    """
    return own < epoch <= max(own, now_s) + MAX_CLOCK_SKEW_S
