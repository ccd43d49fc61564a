"""What goes over a session, and what is heard of it: values, and nothing that does anything."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outgoing:
    """One publication."""

    topic: str
    payload: bytes
    retain: bool = False


@dataclass(frozen=True)
class Connected:
    """The broker accepted us and every subscription.

    `max_packet_bytes` is the largest packet that it takes; None where it does not say, and takes all we know of.
    """

    max_packet_bytes: int | None = None


@dataclass(frozen=True)
class Disconnected:
    """The connection is gone, or could not be made; the next try comes after `retry_s` seconds.

    `repeated` is set where the try before has ended for the same reason: a person knows it by now.
    """

    reason: str
    retry_s: float
    repeated: bool = False


@dataclass(frozen=True)
class Token:
    """Which message of which connection is acknowledged."""

    connection: object
    mid: int


@dataclass(frozen=True)
class Received:
    """A message came in. `token` is for `Session.acknowledge`.

    `retained` if the broker has kept it since somebody said it; else it is said at this moment.
    """

    topic: str
    payload: bytes
    retained: bool = field(default=False, compare=False)
    token: Token | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Unsendable:
    """The broker will not take a publication, now or later, and why; what was sent after it goes on.

    `repeated` is set where the same was said of the topic before.
    """

    topic: str
    reason: str
    repeated: bool = False


@dataclass(frozen=True)
class Drained:
    """Everything that was sent so far has reached the broker, or was called `Unsendable`."""


Event = Connected | Disconnected | Received | Unsendable | Drained
