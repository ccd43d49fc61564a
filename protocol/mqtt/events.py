"""Publications, and the events of connections and sessions: values without behavior."""

from dataclasses import dataclass, field

from protocol.errors import ThreadFailed


@dataclass(frozen=True)
class Outgoing:
    """A publication."""

    topic: str
    payload: bytes
    retain: bool = False


@dataclass(frozen=True)
class Connected:
    """The broker accepted the connection and every subscription."""

    max_packet_bytes: int | None = None
    """The largest packet that it accepts; None if it does not say."""
    address: str = field(default="", compare=False)
    """This machine's IP address on the connection."""
    broker: str = field(default="", compare=False)
    """The broker's address."""
    is_v5: bool = field(default=True, compare=False)
    """It speaks MQTT 5, and reports what it denies."""


@dataclass(frozen=True)
class Closed:
    """One connection ended, was refused or could not be made; its session connects again."""

    reason: str
    unanswered: bool = False
    """Possibly because of the MQTT version."""


@dataclass(frozen=True)
class Acknowledged:
    """The broker answered a publication, which its session reports as `Unsendable` or `Drained`."""

    mid: int
    denial: str = ""
    """Why the broker refused it; empty if it was accepted."""


@dataclass(frozen=True)
class Disconnected:
    """The connection ended or could not be made."""

    reason: str
    retry_s: float
    """Seconds until the next attempt."""
    repeated: bool = False
    """The previous attempt at this broker failed for the same reason."""
    broker: str = field(default="", compare=False)
    """The broker's address."""


@dataclass(frozen=True)
class Received:
    """A message arrived."""

    topic: str
    payload: bytes
    retained: bool = field(default=False, compare=False)
    """The broker had stored it before the subscription; otherwise it was published just now."""
    connection: object = field(default=None, compare=False, repr=False)
    """The connection that delivered it, if it is to be acknowledged with `Session.acknowledge`; else None."""
    mid: int = field(default=0, compare=False, repr=False)
    """Its message id on that connection; 0 at QoS 0."""

    @property
    def is_at_qos_0(self) -> bool:
        """True if its publisher, or a bridge between two brokers, has sent it at QoS 0, so that it may be lost."""
        return self.mid == 0


@dataclass(frozen=True)
class Unsendable:
    """The broker refuses a publication; later ones are sent all the same."""

    topic: str
    reason: str
    repeated: bool = False
    """The same was reported for the topic before."""


@dataclass(frozen=True)
class Drained:
    """Every publication so far was acknowledged by the broker or reported as `Unsendable`."""


Event = Connected | Disconnected | Received | Unsendable | Drained | ThreadFailed
"""ThreadFailed is the last event of a session that has failed."""
