"""Canary ranks: devices and aggregator derive which devices try a new head first, without a list on the wire."""

from protocol.wire.codec import digest_of


def canary_rank(device: str, version: int) -> int:
    """Return a device's rank for a head version, in [0, 2^32): every version orders the devices differently."""
    return int.from_bytes(digest_of(f"{version}/{device}".encode())[:4], "big")
