"""Broadcasts over a real broker."""

from aggregator.messaging.publisher import Publisher
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Received
from protocol.presence import OwnPresence
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_FRAME_BYTES, Frame
from protocol.wire.topics import fleet_topic
from tests.support.sessions import EventLog, running


def test_broadcast_frames_have_the_set_size(broker: BrokerAddress) -> None:
    payload = bytes(range(250))
    ear = EventLog()
    presence = OwnPresence(epoch=1, topic=fleet_topic("f", "state"), key=b"k" * 32)
    publisher = Publisher(broker, fleet="f", presence=presence, on_event=ear.put)
    with running(broker, "device", fleet_topic("f", "cast")) as (_, hears):
        hears.wait(Connected)
        publisher.start()
        try:
            ear.wait(Connected)
            publisher.chunk_bytes = 100
            publisher.broadcast(payload)
            frames = [
                decode(hears.wait(Received).payload, Frame, max_bytes=MAX_FRAME_BYTES) for _ in range(3)
            ]
        finally:
            publisher.stop()
    assert [(frame.offset, len(frame.data)) for frame in frames] == [(0, 100), (100, 100), (200, 50)]
    assert b"".join(frame.data for frame in frames) == payload
