"""Which devices try a new head before the others do: the same answer on both sides, without a list on the wire."""

from protocol.wire.codec import digest_of

RANKS = 2**32
"""Every rank is below this."""


def canary_rank(device: str, version: int) -> int:
    """A device's place in the order in which devices try head `version`, in [0, 2^32): another order each time."""
    return int.from_bytes(digest_of(f"{version}/{device}".encode())[:4], "big")
