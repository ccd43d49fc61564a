"""Broadcasts over a real broker, and what happens while the broker takes nothing."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from aggregator.messaging.publisher import MAX_BACKLOG, FleetPublisher
from protocol.mqtt.own_presence import OwnPresence
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Received
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_FRAME_BYTES, Frame
from protocol.wire.topics import device_filters, fleet_topic
from tests.support.network.sessions import EventLog, running


def test_broadcast_frames_have_the_set_size(broker: BrokerAddress) -> None:
    payload = bytes(range(250))
    ear = EventLog()
    presence = OwnPresence(epoch=1, topic=fleet_topic("f", "state"), key=b"k" * 32)
    publisher = FleetPublisher(
        broker, fleet="f", presence=presence, subscriptions=device_filters("f"), on_event=ear.put
    )
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


def test_messages_stay_unacknowledged_while_the_broker_takes_no_answers() -> None:
    """The broker then sends no more of them, so that the answers do not fill the memory; until all have left."""
    acknowledged: list[Received] = []
    presence = OwnPresence(epoch=1, topic=fleet_topic("f", "state"), key=b"k" * 32)
    publisher = FleetPublisher(
        BrokerAddress("nowhere", 1), fleet="f", presence=presence, subscriptions=(), on_event=lambda _: None
    )
    session: Any = SimpleNamespace(backlog=0, acknowledge=acknowledged.append)
    publisher._session = session
    messages = [Received(f"topic-{number}", b"payload") for number in range(4)]
    for backlog, message, count in (
        (MAX_BACKLOG, messages[0], 1),
        (MAX_BACKLOG + 1, messages[1], 1),
        (1, messages[2], 1),
        (0, messages[3], 4),
    ):
        session.backlog = backlog
        publisher.acknowledge([message])
        assert acknowledged == [replace(each, payload=b"") for each in messages[:count]]
