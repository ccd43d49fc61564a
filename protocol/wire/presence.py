"""Which of two programs of one name is the newer one. No I/O and no clock."""

FARTHEST_S = 3600.0
"""Seconds by which the clock of another machine may be ahead of ours."""


def is_newer(epoch: int, *, own: int, now_s: float) -> bool:
    """Whether a presence on our own topic is of a program that was started after this one.

    Epochs follow the clock. One from the far future is of nobody who has started: if a program gave way to it, whoever
    could once write there would have shut it out for ever, for a broker keeps what was said.

    Args:
        epoch: of the presence.
        own: of this start.
        now_s: unix seconds.
    """
    return own < epoch <= max(own, now_s) + FARTHEST_S
