"""The aggregator's connection to the fleet."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.own_presence import OwnPresence
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, Brokers
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import MAX_CHUNK_BYTES, Frame, Message
from protocol.wire.topics import RETAINED, DeviceChannel, FleetChannel, device_topic, fleet_topic
from protocol.wire.transfer import frames_of

OWN_CHANNELS: tuple[FleetChannel, ...] = ("state", "task", "round", "head")
"""The retained fleet topics. The aggregator subscribes to them: without an access list other clients can write them."""

MAX_BACKLOG = 1024
"""Publications waiting for the broker beyond which no message is acknowledged until all have left: memory for them."""


class Publisher:
    """An MQTT session that subscribes to topics, and publishes to devices and to the whole fleet.

    `subscriptions` are those beside the fleet's own topics; `presence` is that of this start of the aggregator.
    `may_connect` is that of `Session`. `on_event` is called from a thread, and must only enqueue.
    """

    def __init__(
        self,
        broker: Brokers,
        *,
        access: BrokerAccess = NO_AUTHENTICATION,
        fleet: str,
        presence: OwnPresence,
        subscriptions: Sequence[str],
        on_event: Callable[[mqtt.Event], None],
        may_connect: Callable[[], bool] = lambda: True,
    ) -> None:
        self.presence = presence
        self.own_topics = {fleet_topic(fleet, channel): channel for channel in OWN_CHANNELS}
        self.chunk_bytes = MAX_CHUNK_BYTES
        """Payload bytes of a frame, as the broker's packet size allows."""
        self._fleet = fleet
        self._session = mqtt.Session(
            broker,
            client_id=f"pf-{fleet}-aggregator-{presence.client_id}",
            subscriptions=[*subscriptions, *self.own_topics],
            on_event=on_event,
            access=access,
            will=lambda: presence.outgoing("offline"),
            manual_ack=True,
            may_connect=may_connect,
        )
        self._unacknowledged: list[mqtt.Received] = []
        self._is_congested = False

    def start(self) -> None:
        """Connect, and reconnect after each failure."""
        self._session.start()

    def stop(self) -> None:
        self._session.stop([self.presence.outgoing(self.presence.final_state)])

    def acknowledge(self, messages: Sequence[mqtt.Received]) -> None:
        """Acknowledge messages, so that the broker sends others: not while too many answers wait for the broker."""
        self._unacknowledged += [replace(message, payload=b"") for message in messages]
        backlog = self._session.backlog
        self._is_congested = backlog > (0 if self._is_congested else MAX_BACKLOG)
        if not self._is_congested:
            for message in self._unacknowledged:
                self._session.acknowledge(message)
            self._unacknowledged.clear()

    def publish_to_device(self, device: str, channel: DeviceChannel, message: Message | Frame) -> None:
        topic = device_topic(self._fleet, device, channel)
        self._session.send(mqtt.Outgoing(topic, encode(message), channel in RETAINED))

    def publish_presence(self) -> None:
        self._session.send(self.presence.outgoing("online"))

    def publish_to_fleet(self, channel: FleetChannel, payload: bytes) -> None:
        """Publish to all devices; an empty payload clears a retained message."""
        self._session.send(self._outgoing(channel, payload))

    def request_sum(self, payload: bytes) -> None:
        """Publish a request to the second operator."""
        for frame in frames_of(payload, digest=digest_of(payload), chunk_bytes=self.chunk_bytes):
            topic = fleet_topic(self._fleet, "sums/request")
            self._session.send(mqtt.Outgoing(topic, encode(frame), retain=False))

    def broadcast(self, payload: bytes) -> None:
        for frame in frames_of(payload, digest=digest_of(payload), chunk_bytes=self.chunk_bytes):
            self._session.send(self._outgoing("cast", encode(frame)))

    def _outgoing(self, channel: FleetChannel, payload: bytes) -> mqtt.Outgoing:
        return mqtt.Outgoing(fleet_topic(self._fleet, channel), payload, channel in RETAINED)
