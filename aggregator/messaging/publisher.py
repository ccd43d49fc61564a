"""What the aggregator says, and to whom: to the whole fleet, or to one device."""

from collections.abc import Callable

from protocol.mqtt import session as mqtt
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import MAX_CHUNK_BYTES, Frame, Message, Presence, PresenceState
from protocol.wire.topics import (
    RETAINED,
    DeviceChannel,
    FleetChannel,
    device_filters,
    device_topic,
    fleet_topic,
)
from protocol.wire.transfer import frames_of

KEPT: tuple[FleetChannel, ...] = ("state", "task", "round", "head")
"""What the broker keeps of us. We listen to it, for where there is no access list others can write there as well."""


class Wire:
    """The aggregator's connection to its fleet.

    Args:
        broker: where the fleet meets.
        access: how it lets us in.
        fleet: its name.
        epoch: of this start of the aggregator.
        on_event: called from a thread with what comes in; it must only put it somewhere.
    """

    def __init__(
        self,
        broker: mqtt.BrokerAddress,
        *,
        access: BrokerAccess = NO_AUTHENTICATION,
        fleet: str,
        epoch: int,
        on_event: Callable[[mqtt.Event], None],
    ) -> None:
        self.chunk_bytes = MAX_CHUNK_BYTES
        """Bytes of payload in a frame, by what the broker takes."""
        self._fleet = fleet
        self._epoch = epoch
        self._told: dict[str, bytes] = {}
        self._session = mqtt.Session(
            broker,
            client_id=f"pf-{fleet}-aggregator-{epoch}",
            subscriptions=[*device_filters(fleet), *(fleet_topic(fleet, channel) for channel in KEPT)],
            on_event=on_event,
            access=access,
            will=self._presence("offline"),
            manual_ack=True,
        )

    def start(self) -> None:
        """Connect, again and again if need be."""
        self._session.start()

    def stop(self) -> None:
        """Say that we stop, and disconnect."""
        self._session.stop([self._presence("stopped")])

    def acknowledge(self, received: mqtt.Received) -> None:
        """Let the broker forget a message, and hand out another one."""
        self._session.acknowledge(received)

    def is_own_state(self, topic: str) -> bool:
        """Whether a topic is that of the aggregator's presence."""
        return topic == fleet_topic(self._fleet, "state")

    def say_online(self) -> None:
        """Tell the fleet that we are there."""
        self._session.send(self._presence("online"))

    def tell_fleet(self, channel: FleetChannel, payload: bytes) -> None:
        """Publish to everybody; nothing clears what was said there before."""
        outgoing = self._outgoing(channel, payload)
        self._told[outgoing.topic] = payload
        self._session.send(outgoing)

    def is_own_manifest(self, topic: str) -> bool:
        """Whether a topic is that of the fleet's task, round or head."""
        return topic in {fleet_topic(self._fleet, channel) for channel in KEPT if channel != "state"}

    def is_other(self, topic: str, payload: bytes) -> bool:
        """Whether there is something else on a topic than what we have said there last."""
        return self._told.get(topic) != payload

    def cast(self, payload: bytes) -> None:
        """Send a blob to everybody at once."""
        for frame in frames_of(payload, digest=digest_of(payload), chunk_bytes=self.chunk_bytes):
            self._session.send(self._outgoing("cast", encode(frame)))

    def tell_device(self, device: str, channel: DeviceChannel, message: Message | Frame) -> None:
        """Publish to one device."""
        topic = device_topic(self._fleet, device, channel)
        self._session.send(mqtt.Outgoing(topic, encode(message), RETAINED[channel]))

    def _presence(self, state: PresenceState) -> mqtt.Outgoing:
        return self._outgoing("state", encode(Presence(state=state, epoch=self._epoch)))

    def _outgoing(self, channel: FleetChannel, payload: bytes) -> mqtt.Outgoing:
        return mqtt.Outgoing(fleet_topic(self._fleet, channel), payload, RETAINED[channel])
