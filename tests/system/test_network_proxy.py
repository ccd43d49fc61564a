"""The network proxy: each fault does what it states, is counted, and nothing else changes."""

import itertools
import queue
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from protocol.mqtt.reconnecting_session import (
    BrokerAddress,
    Connected,
    Disconnected,
    Event,
    Outgoing,
    Received,
    Session,
)
from protocol.wire.codec import decode, encode
from protocol.wire.messages import Frame
from tests.support.brokers import free_address, mosquitto, mosquitto_program
from tests.support.network_proxy import Faults, Proxy, Seen

PATIENCE_S = 120.0
COUNT = 40
TOPIC = "pf/1/fleet/d/device/{channel}"


class Client:
    """A session and its events."""

    def __init__(self, broker: BrokerAddress, name: str, *subscriptions: str) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.session = Session(
            broker, client_id=name, subscriptions=subscriptions, on_event=self.events.put, window=COUNT
        )
        self.session.start()
        self.until(Connected)

    def until(self, kind: type[Event]) -> Event:
        """Wait for an event of a kind."""
        while not isinstance(event := self.events.get(timeout=PATIENCE_S), kind):
            pass
        return event

    def numbers(self) -> list[int]:
        """The first bytes of what comes, up to 255."""
        got: list[int] = []
        while not got or got[-1] != 255:
            received = self.until(Received)
            assert isinstance(received, Received)
            got.append(received.payload[0])
        return got[:-1]


@pytest.fixture
def target(tmp_path: Path) -> Iterator[BrokerAddress]:
    """The real broker."""
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    address = free_address()
    with mosquitto(address, tmp_path):
        yield address


def pass_through(
    target: BrokerAddress, faults: Faults, *, channel: str = "up/1"
) -> tuple[list[int], Proxy, list[Seen]]:
    """Send numbered publications through a proxy; returns what arrived, the proxy, and what it saw."""
    seen: list[Seen] = []
    topic = TOPIC.format(channel=channel)
    with Proxy(free_address(), target, seed=1, on_seen=seen.append) as proxy:
        listener, sender = Client(target, "listener", topic), Client(proxy.address, "sender")
        proxy.up = faults
        for number in range(COUNT):
            sender.session.send(Outgoing(topic, bytes([number]) * 5000))
        sender.session.stop()
        proxy.calm()
        last = Client(target, "last")
        last.session.send(Outgoing(topic, bytes([255])))
        got = listener.numbers()
        for client in (listener, last):
            client.session.stop()
    return got, proxy, seen


@pytest.mark.parametrize(
    "faults", [Faults(), Faults(delay_s=0.002), Faults(bytes_per_s=1e6)], ids=["calm", "late", "slow"]
)
def test_slow_network_changes_nothing(target: BrokerAddress, faults: Faults) -> None:
    """Without faults, delayed or throttled: everything, once, in order, and seen."""
    got, _, seen = pass_through(target, faults)
    assert got == list(range(COUNT))
    assert [one.payload[0] for one in seen] == got
    assert {(one.client_id, one.direction) for one in seen} == {("sender", "up")}


def test_duplicates_arrive_twice(target: BrokerAddress) -> None:
    """As many more as were counted, each beside the first."""
    got, proxy, _ = pass_through(target, Faults(duplicate=0.5))
    assert len(got) == COUNT + proxy.counts["duplicated"]
    assert proxy.counts["duplicated"] > 5
    assert got == sorted(got)
    assert set(got) == set(range(COUNT))


def test_reordering_swaps_neighbors(target: BrokerAddress) -> None:
    """Nothing is lost, and as many pairs are out of order as were counted."""
    got, proxy, _ = pass_through(target, Faults(reorder=0.5))
    assert sorted(got) == list(range(COUNT))
    swapped = sum(after < before for before, after in itertools.pairwise(got))
    assert swapped == proxy.counts["reordered"] > 5


def test_dropped_publications_were_acknowledged(target: BrokerAddress) -> None:
    """The sender is done with everything, and what was counted is gone; but nothing that brokers retain."""
    got, proxy, _ = pass_through(target, Faults(drop=0.5))
    assert len(got) == COUNT - proxy.counts["dropped"]
    assert proxy.counts["dropped"] > 5
    kept, proxy, _ = pass_through(target, Faults(drop=0.5), channel="info")
    assert kept == list(range(COUNT))


def test_only_blob_frames_are_damaged(target: BrokerAddress) -> None:
    """A frame of a blob arrives with another last byte; nothing else does."""
    for channel, damaged in (("blk", COUNT), ("up/1", 0)):
        _, proxy, seen = pass_through(target, Faults(damage=1.0), channel=channel)
        assert proxy.counts["damaged"] == damaged
        assert len(seen) == COUNT


def test_damaged_frame_is_still_decoded(target: BrokerAddress) -> None:
    """It is of the same transfer, and has other bytes: only the digest of the whole shows it."""
    frame = Frame(v=1, digest=bytes(32), size_bytes=9, offset=6, data=b"abc")
    topic = TOPIC.format(channel="blk")
    with Proxy(free_address(), target, seed=1) as proxy:
        sender, device = Client(target, "sender"), Client(proxy.address, "device", topic)
        proxy.down = Faults(damage=1.0)
        sender.session.send(Outgoing(topic, encode(frame)))
        received = device.until(Received)
        for client in (sender, device):
            client.session.stop()
    assert isinstance(received, Received)
    arrived = decode(received.payload, Frame, max_bytes=1000)
    assert arrived == msgspec.structs.replace(frame, data=b"ab" + bytes((ord("c") ^ 0xFF,)))


def test_cut_ends_the_connection(target: BrokerAddress) -> None:
    """The client notices and reconnects; `cut` with a name ends that client's connection alone."""
    with Proxy(free_address(), target, seed=1) as proxy:
        one, other = Client(proxy.address, "one"), Client(proxy.address, "other")
        proxy.up = Faults(cut=1.0)
        one.session.send(Outgoing(TOPIC.format(channel="up/1"), b"1"))
        one.until(Disconnected)
        assert proxy.counts["cut"] == 1
        proxy.calm()
        one.until(Connected)
        proxy.cut("other")
        other.until(Disconnected)
        other.until(Connected)
        assert one.events.empty()
        for client in (one, other):
            client.session.stop()
