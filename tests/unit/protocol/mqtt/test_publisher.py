"""Publications that the broker denied are sent again later, unless newer ones replace them."""

from typing import cast

from protocol.mqtt.client import Connection, Version
from protocol.mqtt.events import Event, Outgoing
from protocol.mqtt.publisher import Publisher


class _Connection:
    version = Version.MQTTv5
    window = 8
    max_packet_bytes = None

    def __init__(self) -> None:
        self.published: list[bytes] = []

    def publish(self, outgoing: Outgoing) -> int:
        self.published.append(outgoing.payload)
        return len(self.published)


def test_newer_publication_replaces_a_denied_one() -> None:
    events: list[Event] = []
    connection = _Connection()
    publisher = Publisher(events.append)
    publisher.begin(cast("Connection", connection))
    publisher.add([Outgoing("a", b"old", retain=True), Outgoing("b", b"other", retain=True)])
    publisher.acknowledge(1, "not authorized")
    publisher.acknowledge(2, "not authorized")
    publisher.add([Outgoing("a", b"new", retain=True)])
    publisher.acknowledge(3, "")
    publisher.retry_denied()
    assert connection.published == [b"old", b"other", b"new", b"other"]
