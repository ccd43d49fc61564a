"""The size of a publication on the wire, and inferring the packet limit of a broker. No I/O.

MQTT 3.1.1 brokers do not announce their limit: publications shrink until the broker accepts them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

MIN_LIMIT_BYTES = 4096
"""No lower limit is inferred."""

DISCONNECTS_TO_INFER = 2
"""Consecutive connections that end during a large publication before its size is taken to be the reason."""


def packet_bytes(topic: str, payload_bytes: int) -> int:
    """Return the packet size of a QoS 1 publication in MQTT 5 without properties: one more than in 3.1.1."""
    rest = 2 + len(topic.encode()) + 2 + 1 + payload_bytes
    length_bytes = max(1, (rest.bit_length() + 6) // 7)
    return 1 + length_bytes + rest


@dataclass(frozen=True)
class InferredLimit:
    """The packet limit of a broker that speaks MQTT 3.1.1, inferred from how its connections end.

    A broker closes the connection when a packet is too large, and a bad network may do so at any time. The limit is
    lowered after two consecutive connections that ended during a packet larger than any that was acknowledged.
    """

    limit_bytes: int | None = None
    """The largest packet to send from now on."""
    acknowledged_bytes: int = 0
    """The largest packet that the broker has acknowledged."""
    disconnects: int = 0

    def acknowledged(self, size_bytes: int) -> "InferredLimit":
        """Return the limit after a packet of this size was acknowledged."""
        return replace(self, acknowledged_bytes=max(self.acknowledged_bytes, size_bytes))

    def disconnected(self, in_flight: Iterable[int]) -> "InferredLimit":
        """Return the limit after a connection ended while packets of these sizes were not acknowledged."""
        largest = max(in_flight, default=0)
        if largest <= self.acknowledged_bytes:
            return replace(self, disconnects=0)
        if self.disconnects + 1 < DISCONNECTS_TO_INFER:
            return replace(self, disconnects=self.disconnects + 1)
        limit = max(largest // 2, self.acknowledged_bytes, MIN_LIMIT_BYTES)
        return replace(self, disconnects=0, limit_bytes=limit if limit < largest else self.limit_bytes)
