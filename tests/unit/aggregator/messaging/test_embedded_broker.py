"""The embedded broker: its end is reported."""

import queue

import pytest

from aggregator.messaging.embedded_broker import EmbeddedBroker
from protocol.errors import ConfigError, ThreadFailed
from protocol.mqtt.reconnecting_session import BrokerAddress

TIMEOUT_S = 60.0


def test_unexpected_end_is_reported(address: BrokerAddress) -> None:
    """The aggregator would otherwise try for ever to connect to it."""
    failures: queue.SimpleQueue[ThreadFailed] = queue.SimpleQueue()
    broker = EmbeddedBroker(address, on_failure=failures.put)
    broker.start()
    broker._loop.call_soon_threadsafe(broker._loop.stop)
    assert "the thread embedded-broker has ended unexpectedly" in str(failures.get(timeout=TIMEOUT_S))


def test_stop_and_address_in_use_are_no_unexpected_end(address: BrokerAddress) -> None:
    failures: list[ThreadFailed] = []
    broker = EmbeddedBroker(address, on_failure=failures.append)
    broker.start()
    with pytest.raises(ConfigError, match="cannot listen on"):
        EmbeddedBroker(address, on_failure=failures.append).start()
    broker.stop()
    assert failures == []
