"""How large a publication is on the wire, and how large a one a broker takes that does not say. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

SMALLEST_GUESS_BYTES = 4096
"""No broker is taken to want less than this, unless it says so."""

ENDS_TO_SUSPECT = 2
"""Connections in a row that end over a large publication before its size is taken to be the reason."""


def packet_bytes(topic: str, payload_bytes: int) -> int:
    """Bytes of the packet of a QoS 1 publication in MQTT 5, without properties: one more than in 3.1.1."""
    rest = 2 + len(topic.encode()) + 2 + 1 + payload_bytes
    length_bytes = max(1, (rest.bit_length() + 6) // 7)
    return 1 + length_bytes + rest


@dataclass(frozen=True)
class Experience:
    """What a broker that does not say how much it takes has shown of that.

    A broker ends the connection over a packet that is too large for it, and so does a bad network over any; so
    twice in a row, over something larger than all that it ever acknowledged, is taken for the former.
    """

    limit_bytes: int | None = None
    """The largest packet that it is given from now on."""
    acknowledged_bytes: int = 0
    """The largest packet that it has acknowledged."""
    suspicions: int = 0

    def acknowledged(self, size_bytes: int) -> "Experience":
        """It has taken a packet of this size."""
        return replace(self, acknowledged_bytes=max(self.acknowledged_bytes, size_bytes))

    def ended(self, in_flight: Iterable[int]) -> "Experience":
        """A connection has ended while packets of these sizes were not acknowledged."""
        largest = max(in_flight, default=0)
        if largest <= self.acknowledged_bytes:
            return replace(self, suspicions=0)
        if self.suspicions + 1 < ENDS_TO_SUSPECT:
            return replace(self, suspicions=self.suspicions + 1)
        guess = max(largest // 2, self.acknowledged_bytes, SMALLEST_GUESS_BYTES)
        return replace(self, suspicions=0, limit_bytes=guess if guess < largest else self.limit_bytes)
