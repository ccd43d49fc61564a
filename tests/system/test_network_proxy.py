"""The network proxy: each fault does what it states, is counted, and nothing else changes."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Disconnected, Outgoing, Received
from protocol.wire.codec import decode, encode
from protocol.wire.messages import Frame
from tests.support.network.brokers import free_address, mosquitto
from tests.support.network.proxy import Faults, Proxy, Seen
from tests.support.network.sessions import running

COUNT = 40
LAST = 255
TOPIC = "pf/1/fleet/d/device/{channel}"


@pytest.fixture
def target(tmp_path: Path) -> Iterator[BrokerAddress]:
    address = free_address()
    with mosquitto(address, tmp_path):
        yield address


def forward(
    target: BrokerAddress, faults: Faults, *, channel: str = "up/1"
) -> tuple[list[int], Proxy, list[Seen]]:
    """Send numbered publications through a proxy; returns what arrived, the proxy, and what it saw."""
    seen: list[Seen] = []
    topic = TOPIC.format(channel=channel)
    with (
        Proxy(free_address(), target, seed=1, on_seen=seen.append) as proxy,
        running(target, "listener", topic) as (_, listener),
    ):
        listener.wait(Connected)
        with running(proxy.address, "sender", window=COUNT) as (sender, log):
            log.wait(Connected)
            proxy.up = faults
            for number in range(COUNT):
                sender.send(Outgoing(topic, bytes([number]) * 5000))
        proxy.calm()
        with running(target, "last") as (last, _):
            last.send(Outgoing(topic, bytes([LAST])))
            received = [*iter(lambda: listener.wait(Received).payload[0], LAST)]
    return received, proxy, seen


@pytest.mark.parametrize(
    "faults", [Faults(), Faults(delay_s=0.002), Faults(bytes_per_s=1e6)], ids=["none", "delay", "slow"]
)
def test_slow_network_changes_nothing(target: BrokerAddress, faults: Faults) -> None:
    """Without faults, delayed or throttled: everything, once, in order, and seen."""
    received, _, seen = forward(target, faults)
    assert received == list(range(COUNT))
    assert [one.payload[0] for one in seen] == received
    assert {(one.client_id, one.direction) for one in seen} == {("sender", "up")}


def test_duplicates_arrive_twice(target: BrokerAddress) -> None:
    """As many packets more as were counted arrive, each right after the first one."""
    received, proxy, _ = forward(target, Faults(duplicate=0.5))
    assert len(received) == COUNT + proxy.counts["duplicated"]
    assert proxy.counts["duplicated"] > 5
    assert received == sorted(received)
    assert set(received) == set(range(COUNT))


def test_reordering_swaps_neighbors(target: BrokerAddress) -> None:
    """Nothing is lost, and as many pairs are out of order as were counted."""
    received, proxy, _ = forward(target, Faults(reorder=0.5))
    assert sorted(received) == list(range(COUNT))
    swapped = sum(after < before for before, after in itertools.pairwise(received))
    assert swapped == proxy.counts["reordered"] > 5


def test_dropped_publications_were_acknowledged(target: BrokerAddress) -> None:
    """The sender finishes, and what was counted is lost; but nothing on topics that brokers retain."""
    received, proxy, _ = forward(target, Faults(drop=0.5))
    assert len(received) == COUNT - proxy.counts["dropped"]
    assert proxy.counts["dropped"] > 5
    received, _, _ = forward(target, Faults(drop=0.5), channel="info")
    assert received == list(range(COUNT))


def test_only_blob_frames_are_damaged(target: BrokerAddress) -> None:
    """A frame of a blob arrives with another last byte of data; nothing else does."""
    _, proxy, _ = forward(target, Faults(damage=1.0), channel="up/1")
    assert proxy.counts["damaged"] == 0
    frame = Frame(v=1, digest=bytes(32), size_bytes=9, offset=6, data=b"abc")
    topic = TOPIC.format(channel="blk")
    with (
        Proxy(free_address(), target, seed=1, down=Faults(damage=1.0)) as proxy,
        running(target, "sender") as (sender, _),
        running(proxy.address, "device", topic) as (_, device),
    ):
        device.wait(Connected)
        sender.send(Outgoing(topic, encode(frame)))
        damaged = decode(device.wait(Received).payload, Frame, max_bytes=1000)
        assert proxy.counts["damaged"] == 1
    assert damaged == msgspec.structs.replace(frame, data=b"ab" + bytes((ord("c") ^ 0xFF,)))


def test_cut_ends_the_connection(target: BrokerAddress) -> None:
    """The client reconnects; `cut` with a name ends only that client's connection."""
    with (
        Proxy(free_address(), target, seed=1) as proxy,
        running(proxy.address, "one") as (one, log_one),
        running(proxy.address, "other") as (_, log_other),
    ):
        log_one.wait(Connected)
        log_other.wait(Connected)
        proxy.up = Faults(cut=1.0)
        one.send(Outgoing(TOPIC.format(channel="up/1"), b"1"))
        log_one.wait(Disconnected)
        assert proxy.counts["cut"] == 1
        proxy.calm()
        log_one.wait(Connected)
        proxy.cut("other")
        log_other.wait(Disconnected)
        log_other.wait(Connected)
        assert Disconnected not in map(type, log_one.rest())
